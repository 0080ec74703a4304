import errno
import os
import stat
import threading

import fault_points
import pytest
import torch
from damage import flip, forge_tensors
from errors import rejects
from safetensors.torch import load_file, save_file

from tidegate import _files
from tidegate._files import (
    TensorFormat,
    nonregular_file_type,
    read_tensor_header,
    require_shapes,
    write_atomically,
    write_content,
    write_tensors,
)


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


@pytest.mark.parametrize("write", [lambda file: file.write_text("new"), lambda file: save_file(TENSORS, file)])
def test_files_may_be_read_by_whoever_the_mask_admits(tmp_path, write):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "a.txt", write)
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


class TestAFullDisk:
    @pytest.fixture(autouse=True)
    def full(self, monkeypatch):
        fault_points.ask_for(monkeypatch, "file:before-move")

    def test_is_named_with_the_file_its_need_and_what_is_free(self, tmp_path):
        path = tmp_path / "a.txt"
        path.write_text("old")
        words = rf"^{path} could not be written: No space left on device\. 1\.5 kB are needed, .* are free\. Free space"
        with pytest.raises(OSError, match=words) as raised:
            write_content(path, b"x" * 1500)
        assert raised.value.errno == errno.ENOSPC
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]

    def test_of_a_need_that_is_not_known_is_named_with_what_is_free(self, tmp_path):
        with pytest.raises(OSError, match=r"[\d.]+ \w+ are free"):
            write_atomically(tmp_path / "a.txt", lambda file: file.write_text("x"))


def test_a_file_that_cannot_be_written_is_named_and_keeps_the_kind_of_its_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone/a\.txt"):
        write_content(tmp_path / "gone" / "a.txt", b"")


FORM = TensorFormat(name="waves", version="3", keys=frozenset(("sea",)), holds="waves", writer="write_waves")
TENSORS = {"a": torch.arange(3.0), "digest": torch.zeros(2, 1, dtype=torch.int64)}


@pytest.fixture
def waves(tmp_path):
    path = tmp_path / "waves.safetensors"
    save_waves(path, '{"digest":"%s"}' % ("a" * 64))
    return path


def save_waves(path, sea="calm", **options):
    return write_tensors(
        path,
        lambda file, metadata: save_file(TENSORS, file, metadata=metadata),
        FORM,
        {"sea": sea},
        num_bytes=28,
        **options,
    )


class TestAFileOfTensors:
    def test_says_what_is_in_it(self, waves):
        header = read_tensor_header(waves, FORM)
        assert header.shapes == {"a": (3,), "digest": (2, 1)}
        assert header.dtypes == {"a": "F32", "digest": "I64"}
        assert header.metadata["sea"].startswith('{"digest":"aaa')
        assert header.digest == header.metadata["digest"] != _files._BLANK
        assert save_waves(waves) == read_tensor_header(waves, FORM).digest
        assert torch.equal(load_file(waves)["a"], TENSORS["a"])

    def test_has_the_same_bytes_each_time_it_is_written(self, tmp_path):
        paths = [tmp_path / f"{number}.safetensors" for number in range(8)]
        for path in paths:
            save_waves(path, 'caf\u00e9, \x7f, \U0001f30a, \x01 and "quotes" \\ \n')
        assert len({path.read_bytes() for path in paths}) == 1
        assert read_tensor_header(paths[0], FORM).metadata["sea"].startswith("café, \x7f, 🌊, \x01 and")

    def test_is_named_where_its_folder_was_given(self, waves):
        with rejects("path", hint=f"It is a directory. Name a file that write_waves wrote, such as {waves}."):
            read_tensor_header(waves.parent, FORM)

    def test_notices_every_flipped_bit(self, waves):
        content = waves.read_bytes()
        # Every byte, and each of its bits in turn.
        for bit in range(0, 8 * len(content), 7):
            waves.write_bytes(flip(content, bit))
            with rejects("path"):
                read_tensor_header(waves, FORM)

    def test_notices_every_cut_and_whatever_is_added(self, waves):
        content = waves.read_bytes()
        for changed in (*(content[:length] for length in range(len(content))), content + b"\0", b"\0" + content):
            waves.write_bytes(changed)
            with rejects("path"):
                read_tensor_header(waves, FORM)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"metadata": {"format": "tides"}}, "Its format is 'tides', not 'waves'. Write it with write_waves."),
            ({"metadata": {"version": "2"}}, "Load it with the release that wrote it"),
            ({"metadata": {"version": "2" * 10_000}}, "… (10,002 characters)"),
            ({"metadata": {"format": "t" * 10_000}}, "… (10,002 characters), not 'waves'"),
            ({"metadata": {"w" * 10_000: ""}}, "… (10,000 characters) is missing or unknown"),
            ({"metadata": {f"w{number}": "" for number in range(100)}}, "w12, w13 and 94 more is missing or unknown"),
            ({"metadata": {"sea": None}}, "sea is missing or unknown"),
            ({"metadata": {"wind": "strong"}}, "wind is missing or unknown"),
            ({"metadata": {"digest": None}, "sealed": False}, "digest is missing or unknown"),
            ({"metadata": {"digest": "0" * 64}, "sealed": False}, "checksum mismatch"),
            ({"metadata": {"digest": "x"}, "sealed": False}, "It is damaged: it has 0."),
        ],
    )
    def test_of_another_kind_or_without_a_digest_is_refused(self, waves, change, words):
        forge_tensors(waves, **change)
        with rejects("path", hint=words):
            read_tensor_header(waves, FORM)

    @pytest.mark.parametrize(
        "content",
        [b"", b"x" * 100, (2**60).to_bytes(8, "little") + b"{}", b"\x02\0\0\0\0\0\0\0[]", b"\x02\0\0\0\0\0\0\0{]"],
        ids=["empty", "text", "endless header", "list", "no JSON"],
    )
    def test_that_is_none_is_refused(self, tmp_path, content):
        (tmp_path / "a").write_bytes(content)
        with rejects("path"):
            read_tensor_header(tmp_path / "a", FORM)

    def test_with_a_header_nested_too_deeply_is_refused(self, tmp_path):
        header = b'{"a":' + b"[" * 100_000
        (tmp_path / "a").write_bytes(len(header).to_bytes(8, "little") + header)
        with rejects("path", hint="nested too deeply"):
            read_tensor_header(tmp_path / "a", FORM)

    def test_that_is_a_pipe_is_refused_and_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with rejects("path", hint="It is a named pipe."):
            read_tensor_header(tmp_path / "pipe", FORM)

    def test_on_a_full_disk_raises_what_the_system_says(self, tmp_path):
        def refuse(file, metadata):
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

        with pytest.raises(OSError, match=r"2\.0 MB are") as raised:
            write_tensors(tmp_path / "a", refuse, FORM, {"sea": ""}, num_bytes=2 * 10**6)
        assert raised.value.errno == errno.ENOSPC


def test_names_and_shapes_of_any_length_are_quoted_in_part():
    given = {"x" * 10_000: (1,), "wide": (1,) * 10_000}
    with pytest.raises(ValueError, match=r"^It differs: y{200}… \(10,000 characters\) is missing; x{200}… ") as raised:
        require_shapes(given, {"y" * 10_000: (1,), "wide": (1,)}, complaint="It differs")
    assert len(str(raised.value)) < 1000


def test_the_file_before_is_kept_where_it_is_asked_for(tmp_path):
    path, previous = tmp_path / "a", tmp_path / "b"
    for text in ("first", "second", "third"):
        write_atomically(path, lambda file, text=text: file.write_text(text), previous=previous)
    assert (path.read_text(), previous.read_text()) == ("third", "second")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_write_does_not_replace_what_is_not_a_regular_file(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    with rejects("path", hint="a named pipe"):
        write_content(pipe, b"text")
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


def test_what_is_no_regular_file_is_named(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for link, target in (("to_file", "file"), ("to_pipe", "pipe"), ("to_null", os.devnull), ("nowhere", "gone")):
        (tmp_path / link).symlink_to(target)
    kinds = {"file": "", "to_file": "", "pipe": "a named pipe", "to_pipe": "a named pipe", "to_null": "a device"}
    assert {name: nonregular_file_type(tmp_path / name) for name in kinds} == kinds
    assert nonregular_file_type(tmp_path) == "a directory"
    with pytest.raises(FileNotFoundError):
        nonregular_file_type(tmp_path / "nowhere")
