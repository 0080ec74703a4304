import os
import stat
import threading

import pytest

from tidegate._files import irregular_kind, write_atomically


@pytest.mark.parametrize("given", [str, os.fspath, lambda path: path])
def test_a_file_is_written_in_its_place_and_no_other_is_left(tmp_path, given):
    path = tmp_path / "a.txt"
    for text in ("first", "second"):
        write_atomically(given(path), lambda file, text=text: file.write_text(text))
        assert path.read_text() == text
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def fail(file):
        file.write_text("half")
        raise error

    with pytest.raises(type(error)):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_writer_that_fails_before_it_writes_shows_its_own_error(tmp_path):
    def fail(file):
        raise ValueError("nothing to write")

    with pytest.raises(ValueError, match="nothing to write"):
        write_atomically(tmp_path / "a.txt", fail)
    assert list(tmp_path.iterdir()) == []


def test_the_old_file_stands_until_the_new_one_is_on_the_disk(tmp_path, monkeypatch):
    path, seen = tmp_path / "a.txt", []
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append((os.fstat(descriptor).st_size, path.read_text())))
    write_atomically(path, lambda file: file.write_text("new content"))
    assert seen == [(len("new content"), "old")]
    assert path.read_text() == "new content"


def test_files_may_be_read_by_whoever_the_mask_admits(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.txt", lambda file: file.write_text("new"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o640


def test_two_who_write_at_once_do_not_mix(tmp_path):
    path, both_are_writing = tmp_path / "a.txt", threading.Barrier(2)

    def write(file, text):
        file.write_text(text[:1])
        both_are_writing.wait(timeout=10)
        file.write_text(text)

    threads = [
        threading.Thread(target=write_atomically, args=(path, lambda file, text=text: write(file, text)))
        for text in ("first", "second")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in ("first", "second")
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_regular_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for link, target in (("to_file", "file"), ("to_pipe", "pipe"), ("to_null", os.devnull), ("nowhere", "gone")):
        (tmp_path / link).symlink_to(target)
    kinds = {"file": "", "to_file": "", "pipe": "a named pipe", "to_pipe": "a named pipe", "to_null": "a device"}
    assert {name: irregular_kind(tmp_path / name) for name in kinds} == kinds
    assert irregular_kind(tmp_path) == "a folder"
    with pytest.raises(FileNotFoundError):
        irregular_kind(tmp_path / "nowhere")
