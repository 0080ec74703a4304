import json
import os
import re
import sys

import datasets
import numpy as np
import pytest
import torch
from errors import rejects

from tidegate.lab.tasks.documents import Document, read_bytes
from tidegate.lab.tasks.source import read_corpus
from tidegate.lab.tasks.text import TextTask, text_task


def text_of(batch):
    return [bytes(row.tolist()) for row in batch.inputs]


# Kinds of sources


def test_a_folder_is_read_in_the_order_of_names_without_hidden_and_binary_files(folder):
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("secret")
    (folder / "picture.bin").write_bytes(b"ab\0cd")
    (folder / "empty.txt").touch()
    names = [document.name for document in read_corpus(str(folder), None).documents]
    assert names == sorted(names)
    assert len(names) == 40


def test_a_pattern_reads_what_matches(folder):
    (folder / "shelf1" / ".hidden.txt").write_text("secret")
    assert len(read_corpus(str(folder / "shelf1" / "*.txt"), None).documents) == 13
    assert len(read_corpus(str(folder / "**" / "*.txt"), None).documents) == 40
    assert len(read_corpus(str(folder / "**"), None).documents) == 40
    names = {document.name for document in read_corpus(str(folder / "shelf[01]" / "*3.txt"), None).documents}
    assert names == {"shelf0/3.txt", "shelf0/33.txt", "shelf1/13.txt"}


class TestWhatAComparisonWrote:
    def test_is_no_part_of_a_folder(self, folder, records):
        before = text_task(str(folder))
        for out in (folder / "out", folder / "shelf1" / "deeper" / "out"):
            records(out)
        assert text_task(str(folder)) == before
        assert before.load().facts["num_documents"] == 40

    @pytest.mark.parametrize("pattern", ["**", "**/*", "*/*", "*/*.*", "[so]*/**/*.*"])
    def test_is_no_part_of_a_pattern(self, folder, records, pattern):
        before = text_task(str(folder / pattern))
        records(folder / "out")
        assert text_task(str(folder / pattern)) == before
        assert before.load().facts["num_documents"] == 40

    def test_is_told_from_records_of_another_kind(self, folder):
        (folder / "records.jsonl").write_text('{"text": "a song", "kind": "single"}\n')
        (folder / "shelf1" / "records.jsonl").write_text("")
        assert len(read_corpus(str(folder), None).documents) == 41

    @pytest.mark.parametrize("pattern", ["", "*", "**/*.txt"])
    def test_keeps_its_own_folder_from_being_the_text(self, folder, records, pattern):
        records(folder)
        with rejects("data", hint="records.jsonl of a comparison"):
            text_task(str(folder / pattern))
        assert len(read_corpus(str(folder / "shelf1"), None).documents) == 13


def test_json_lines_are_documents(json_lines, sentences):
    corpus = read_corpus(str(json_lines), "body")
    assert corpus.documents[7] == Document("sums.jsonl:8", sentences[7].encode())
    assert len(corpus.documents) == len(sentences)
    assert text_task(str(json_lines), field="body").load().facts["num_documents"] == len(sentences)


def test_json_lines_in_a_folder_are_documents_too(folder):
    (folder / "more.jsonl").write_text('{"text": "one"}\n\n{"text": null}\n{"text": "two\\ud800"}\n')
    contents = [document.content for document in read_corpus(str(folder), None).documents if "more" in document.name]
    assert contents == [b"one", b"two?"]


def test_documents_are_ended_by_a_line_break(tmp_path):
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps({"text": f"a{number}b"}) + "\n" for number in range(10, 50)))
    data = TextTask(source=str(path), length=9).load()
    rows = text_of(data.batch(seed=0, step=0, size=50))
    assert all(re.search(rb"b\na", row) for row in rows)
    assert not any(b"ba" in row for row in rows)


def test_token_arrays_stay_on_the_disk_and_have_no_bytes(token_file):
    task = text_task(str(token_file), length=64)
    data = task.load()
    assert task.tokenizer == "none"
    assert data.vocab_size == 777
    assert data.bytes_per_token is None
    assert isinstance(data._streams.training, np.memmap)
    batch = data.batch(seed=0, step=0, size=20)
    assert torch.equal((batch.inputs + 1) % 777, batch.targets)
    assert data.facts["held_out"] == "the last 5 % of the tokens"


def test_a_dataset_of_the_hub_is_a_list_of_documents(monkeypatch, sentences):
    def load(name, configuration, *, split, streaming):
        assert not streaming
        assert (name, configuration, split) == ("owner/sums", "small", "train")
        return datasets.Dataset.from_dict({"text": [*sentences, ""], "id": list(range(len(sentences) + 1))})

    monkeypatch.setattr(datasets, "load_dataset", load)
    task = text_task("owner/sums@small")
    assert task.source == "hf:owner/sums@small"
    assert task.load().facts["num_documents"] == len(sentences)


# Bad data


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *((name, "does not exist") for name in ("missing.txt", "./missing", "a/b/c", "~/missing.jsonl", "missing.npy")),
        ("~nobody-of-this-name/text.txt", "no such home directory"),
        ("", ""),
    ],
)
def test_a_missing_file_is_named(name, hint):
    with rejects("data", hint=hint) as rejected:
        text_task(name)
    assert rejected.value.got == name


def test_a_name_too_long_for_a_file_is_an_error_of_the_data():
    with rejects("data", hint="File name too long"):
        text_task("x" * 5000)


def test_a_missing_file_of_a_folder_is_no_name_on_the_hub(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with rejects("data", hint="does not exist"):
        text_task("shelf1/99")


def test_an_unreadable_file_is_named(text_file, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("pathlib.Path.read_bytes", refuse)
    with rejects("data", hint="Permission denied.") as rejected:
        read_bytes(text_file)
    assert rejected.value.got == text_file
    with rejects("data", hint="Permission denied."):
        text_task(str(text_file))


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "empty.txt").touch()
    with rejects("data") as rejected:
        text_task(str(tmp_path / "empty.txt"))
    assert rejected.value.got == tmp_path / "empty.txt"
    with rejects("data"):
        text_task(str(tmp_path))


def test_a_pattern_without_a_match_is_refused(tmp_path):
    with rejects("data", hint="Quote the pattern") as rejected:
        text_task(str(tmp_path / "*.txt"))
    assert rejected.value.got == tmp_path / "*.txt"


@pytest.mark.parametrize("num_bytes", [1, 255])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_a_corpus_shorter_than_a_window_says_what_there_is_and_what_is_needed(tmp_path, num_bytes, tokenizer):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * num_bytes)
    task = text_task(str(path), length=128, tokenizer=tokenizer)
    with rejects("data", hint="smaller length") as rejected:
        task.load()
    assert rejected.value.got == path
    assert "at least 129 training tokens" in rejected.value.expected


def test_json_lines_without_the_field_name_those_found(json_lines):
    with rejects("field") as rejected:
        text_task(str(json_lines))
    assert rejected.value.expected.endswith("sums.jsonl:1, which has 'body', 'id'")


def test_a_field_that_is_no_text_is_refused(json_lines):
    with rejects("field", hint="sums.jsonl:1 has int there"):
        text_task(str(json_lines), field="id")


@pytest.mark.parametrize(("line", "words"), [('{"text": ', "is not JSON"), ("[1]", "is list.")])
def test_bad_json_is_named_with_its_line(tmp_path, line, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with rejects("data", hint=f"bad.jsonl:3 {words}"):
        text_task(str(path))


def test_a_field_for_plain_text_is_refused(text_file, folder):
    for path in (text_file, folder):
        with rejects("field", hint="for JSON lines"):
            text_task(str(path), field="body")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (np.zeros(9), "1 dimensions of float64"),
        (np.zeros((3, 3), dtype=int), "2 dimensions of int64"),
        (np.zeros(0, dtype=int), "is empty"),
        (np.arange(-1, 9), "has -1"),
    ],
)
def test_arrays_that_are_no_tokens_are_refused(tmp_path, array, words):
    np.save(tmp_path / "bad.npy", array)
    with rejects("data", hint=words) as rejected:
        text_task(str(tmp_path / "bad.npy"))
    assert rejected.value.got == tmp_path / "bad.npy"


def test_a_file_that_is_no_array_is_refused_and_never_unpickled(tmp_path):
    np.save(tmp_path / "objects.npy", np.asarray([{}], dtype=object))
    (tmp_path / "text.npy").write_text("no array")
    for name in ("objects", "text"):
        with rejects("data") as rejected:
            text_task(str(tmp_path / f"{name}.npy"))
        assert (rejected.value.expected, rejected.value.got) == ("a NumPy array", tmp_path / f"{name}.npy")


def test_tokens_admit_no_tokenizer_and_no_field(token_file):
    for tokenizer in ("bytes", "bpe:300"):
        with rejects("tokenizer", hint="already tokenized"):
            text_task(str(token_file), tokenizer=tokenizer)
    with rejects("field", hint="already tokenized"):
        text_task(str(token_file), field="text")
    with rejects("tokenizer"):
        TextTask(source=str(token_file)).load()


# The hub


@pytest.mark.parametrize("name", ["nosuch", "owner/nosuch", "hf:nosuch", "owner/nosuch-v1.2"])
@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("Couldn't reach 'nosuch' on the Hub (OfflineModeIsEnabled)"),
        datasets.exceptions.DatasetNotFoundError("Dataset 'nosuch' doesn't exist on the Hub or cannot be accessed."),
        ValueError("Config name is missing.\nPlease pick one"),
    ],
)
def test_a_dataset_that_cannot_be_had_says_so_and_what_to_do(name, error, monkeypatch, tmp_path):
    def refuse(*args, **options):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with rejects("data", hint="Check the name and the network") as rejected:
        text_task(name)
    assert rejected.value.got == name.removeprefix("hf:")
    assert rejected.value.hint.startswith(f"{type(error).__name__}: {str(error).splitlines()[0].rstrip('.')}.")
    assert "\n" not in str(rejected.value)


def test_a_cache_that_cannot_be_written_is_named_with_the_remedy(monkeypatch):
    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied", "/home/nobody/.cache")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with rejects("data", hint="Permission denied: /home/nobody/.cache. ") as rejected:
        text_task("hf:folder")
    assert rejected.value.got == "folder"
    assert "HF_HOME" in rejected.value.hint


def test_without_the_package_the_hub_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with rejects("data", hint="datasets: pip install 'tidegate[hf]'"):
        text_task("owner/name")


def test_a_dataset_without_text_says_which_fields_it_has(monkeypatch):
    rows = datasets.Dataset.from_dict({"body": ["a"], "id": [1]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: rows)
    with rejects("field") as rejected:
        text_task("hf:name")
    assert rejected.value.expected.endswith("hf:name, which has 'body', 'id'")
    empty = datasets.Dataset.from_dict({"text": ["", None]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **options: empty)
    with rejects("field"):
        text_task("hf:name")


@pytest.fixture
def endless(tmp_path):
    """A folder with one text, and with what can be waited for, or read, without end."""
    folder = tmp_path / "endless"
    folder.mkdir()
    (folder / "text.txt").write_text("the sea rises")
    os.mkfifo(folder / "pipe.txt")
    os.mkfifo(folder / "tokens.npy")
    (folder / "pipe_link.txt").symlink_to("pipe.txt")
    (folder / "zero.txt").symlink_to("/dev/zero")
    (folder / "link.txt").symlink_to("text.txt")
    (folder / "below").mkdir()
    os.mkfifo(folder / "below" / "records.jsonl")
    return folder


@pytest.mark.parametrize("pattern", ["", "*.txt", "**/*"])
def test_of_a_folder_regular_files_alone_are_read(endless, pattern):
    corpus = read_corpus(str(endless / pattern), None)
    assert [document.name for document in corpus.documents] == ["link.txt", "text.txt"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("pipe.txt", "a named pipe"),
        ("pipe_link.txt", "a named pipe"),
        ("tokens.npy", "a named pipe"),
        ("zero.txt", "a device"),
    ],
)
def test_what_is_no_regular_file_is_not_waited_for(endless, name, kind):
    with rejects("data", hint=f"It is {kind}.") as rejected:
        text_task(str(endless / name))
    assert rejected.value.got == endless / name


def test_a_link_that_leads_nowhere_is_named(endless):
    (endless / "gone.txt").symlink_to("nowhere.txt")
    with rejects("data", hint="No such file") as rejected:
        text_task(str(endless))
    assert rejected.value.got == endless / "gone.txt"


def npy(header):
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(8)


BROKEN_ARRAYS = {
    "empty": b"",
    "zip": b"PK\x03\x04" + bytes(40),
    "no literal": npy("("),
    "deep literal": npy("-" * 9000 + "1"),
    "huge shape": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (99999999999999999999,)}"),
    "bool shape": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (True,)}"),
    "old literal": npy("{'descr': '<i8', 'fortran_order': False, 'shape': (1L, 2L, 3L)}"),
}


@pytest.mark.parametrize("content", BROKEN_ARRAYS.values(), ids=BROKEN_ARRAYS)
def test_a_broken_array_is_refused_in_words(tmp_path, content):
    (tmp_path / "tokens.npy").write_bytes(content)
    with rejects("data") as rejected:
        text_task(str(tmp_path / "tokens.npy"))
    assert rejected.value.expected == "a NumPy array"
    assert len(rejected.value.hint) > 1
