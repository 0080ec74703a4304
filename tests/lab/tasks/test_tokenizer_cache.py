import json
from dataclasses import replace

import numpy as np
import pytest

from tidegate.lab.tasks import tokenizer as merged
from tidegate.lab.tasks.documents import Document
from tidegate.lab.tasks.text import text_task
from tidegate.lab.tasks.tokenizer import merged_tokens

TRAINING = [Document("a", b"the cat sat on the mat\n" * 50), Document("b", "déjà vu".encode())]
HELD_OUT = [Document("c", b"the mat sat on the cat\n" * 5)]


@pytest.fixture
def trainings(monkeypatch):
    """How often byte pairs were trained."""
    calls = []

    def count(documents, num_tokens):
        calls.append(num_tokens)
        return learn(documents, num_tokens)

    learn = merged.trained_tokenizer
    monkeypatch.setattr(merged, "trained_tokenizer", count)
    return calls


def as_lists(encoded):
    return [part.tolist() for part in encoded[:3]]


def files_of(folder):
    return sorted((folder / "tidegate").iterdir())


def test_byte_pairs_are_trained_once_and_then_mapped(cache_folder, trainings):
    first = merged_tokens(TRAINING, HELD_OUT, 280)
    again = merged_tokens(TRAINING, HELD_OUT, 280)
    assert trainings == [280]
    assert as_lists(first) == as_lists(again)
    assert all(isinstance(part, np.memmap) for part in (*first[:2], *again[:2]))
    assert [path.suffix for path in files_of(cache_folder)] == [".json", ".npy"]
    assert int(again.token_bytes[again.training].sum()) == sum(len(document.content) for document in TRAINING) + 1


def test_what_is_kept_is_what_is_trained(cache_folder):
    kept = merged_tokens(TRAINING, HELD_OUT, 280)
    tokenizer = merged.trained_tokenizer(TRAINING, 280)
    assert kept.training.tolist() == tokenizer.encode(TRAINING).tolist()
    assert kept.held_out.tolist() == tokenizer.encode(HELD_OUT).tolist()
    assert kept.token_bytes.tolist() == tokenizer.token_bytes.tolist()
    assert json.loads(files_of(cache_folder)[0].read_text())["tokenizer"] == tokenizer.merges.to_str()


def test_other_text_another_division_and_another_size_are_kept_apart(trainings):
    merged_tokens(TRAINING, HELD_OUT, 280)
    merged_tokens(TRAINING, HELD_OUT, 281)
    merged_tokens(TRAINING[:1], [*TRAINING[1:], *HELD_OUT], 280)
    merged_tokens(TRAINING, [Document("c", b"other")], 280)
    assert len(trainings) == 4


def test_another_version_of_the_library_learns_again(monkeypatch, trainings):
    merged_tokens(TRAINING, HELD_OUT, 280)
    monkeypatch.setattr("tokenizers.__version__", "99.0")
    merged_tokens(TRAINING, HELD_OUT, 280)
    assert len(trainings) == 2


@pytest.mark.parametrize("harm", [lambda _: b"", lambda _: b"[1]", lambda _: b"{}", None])
@pytest.mark.parametrize("which", [0, 1], ids=["json", "npy"])
def test_a_broken_file_is_made_again(cache_folder, trainings, harm, which):
    first = as_lists(merged_tokens(TRAINING, HELD_OUT, 280))
    path = files_of(cache_folder)[which]
    whole = path.read_bytes()
    if harm is None:
        path.unlink()
    else:
        path.write_bytes(harm(whole))
    assert as_lists(merged_tokens(TRAINING, HELD_OUT, 280)) == first
    assert path.read_bytes() == whole
    assert len(trainings) == 2
    assert len(files_of(cache_folder)) == 2


def test_where_nothing_can_be_written_tokens_are_made_each_time(cache_folder, monkeypatch, trainings):
    kept = as_lists(merged_tokens(TRAINING, HELD_OUT, 280))
    (cache_folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_folder / "file"))
    for _ in range(2):
        assert as_lists(merged_tokens(TRAINING, HELD_OUT, 280)) == kept
    assert len(trainings) == 3


def test_a_full_disk_leaves_nothing_behind(cache_folder, monkeypatch):
    def refuse(file, array):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", refuse)
        made = as_lists(merged_tokens(TRAINING, HELD_OUT, 280))
    assert files_of(cache_folder) == []
    assert as_lists(merged_tokens(TRAINING, HELD_OUT, 280)) == made


def test_a_user_without_a_home_learns_each_time(monkeypatch, tmp_path, trainings):
    def refuse(_path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pathlib.Path.expanduser", refuse)
    assert as_lists(merged_tokens(TRAINING, HELD_OUT, 280)) == as_lists(merged_tokens(TRAINING, HELD_OUT, 280))
    assert len(trainings) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_window_that_moves_the_division_is_kept_apart(text_file, trainings):
    task = text_task(str(text_file), tokenizer="bpe:300", length=16)
    lengths = [len(replace(task, length=length).load()._streams.held_out) for length in (16, 17, 2000)]
    assert lengths[0] == lengths[1] < lengths[2]
    assert len(trainings) == 2
