"""Shards of tokens: what is written, what is kept after a stop, what reads them, and what is refused."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pytest
import torch
from damage import flip_inside
from datasets import Dataset
from errors import rejects

from tidegate._json import add_checksum, parse_json, verify_checksum
from tidegate.lab.tasks import tokenizing
from tidegate.lab.tasks.documents import file_documents
from tidegate.lab.tasks.shards import ShardedTokens, open_shards, read_index
from tidegate.lab.tasks.text import text_task
from tidegate.lab.tasks.tokenizer import byte_tokenizer, read_tokenizer
from tidegate.lab.tasks.tokenizing import tokenize

LINES = [f"{number}: the sum of {number} and {number % 7} is {number + number % 7}.\n" for number in range(600)]
TEXT = "".join(LINES)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text" / "sums.txt"
    path.parent.mkdir()
    path.write_text(TEXT)
    return path


@pytest.fixture
def made(monkeypatch):
    """Numbers of the shards that are encoded."""
    numbers, write = [], tokenizing._write_shard
    monkeypatch.setattr(tokenizing, "_write_shard", lambda *job: numbers.append(job[0].number) or write(*job))
    return numbers


def files_in(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def all_tokens(folder):
    index = read_index(folder)
    return np.concatenate([np.fromfile(folder / shard.name, dtype=index.dtype) for shard in index.shards])


class TestShards:
    def test_hold_the_bytes_of_the_text_in_order_the_last_of_each_held_out(self, text, tmp_path):
        index = tokenize(str(text), tmp_path / "out", shard_bytes=4096)
        assert len(index.shards) == 4
        assert bytes(all_tokens(tmp_path / "out")) == TEXT.encode()
        training, held_out = open_shards(tmp_path / "out", index)
        assert len(training) + len(held_out) == len(TEXT)
        assert len(held_out) == pytest.approx(0.05 * len(TEXT), abs=len(index.shards))
        assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".bin", ".json"}

    def test_of_byte_pairs_give_the_text_back(self, text, tmp_path):
        index = tokenize(str(text), tmp_path / "out", tokenizer="bpe:300", shard_bytes=4096)
        merges = read_tokenizer((tmp_path / "out" / "tokenizer.json").read_text(), 0).merges
        assert merges.decode(all_tokens(tmp_path / "out").tolist()) == TEXT
        assert (index.vocab_size, index.dtype) == (300, "uint16")
        # Other shards may have the same tokens.
        again = tokenize(str(text), tmp_path / "b", tokenizer=str(tmp_path / "out" / "tokenizer.json"), shard_bytes=999)
        assert again.tokenizer_digest == index.tokenizer_digest
        assert merges.decode(all_tokens(tmp_path / "b").tolist()) == TEXT

    def test_of_folders_json_lines_and_datasets_hold_their_documents(self, text, tmp_path):
        (text.parent / "more.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in LINES[:50]))
        tokenize(str(text.parent), tmp_path / "out", field="body", shard_bytes=3000)
        expected = byte_tokenizer().encode(file_documents(str(text.parent), "body"))
        assert bytes(all_tokens(tmp_path / "out")) == bytes(expected)
        Dataset.from_dict({"text": [line.strip() for line in LINES]}).to_parquet(tmp_path / "set" / "train.parquet")
        tokenize(f"hf:{tmp_path / 'set'}", tmp_path / "hub", shard_bytes=3000)
        assert bytes(all_tokens(tmp_path / "hub")) == TEXT.encode()

    def test_a_long_line_is_cut_between_characters(self, tmp_path):
        path = tmp_path / "long.txt"
        path.write_text("aé€𝄞" * 700)
        index = tokenize(str(path), tmp_path / "out", tokenizer="bpe:260", shard_bytes=100)
        assert len(index.shards) > 10
        merges = read_tokenizer((tmp_path / "out" / "tokenizer.json").read_text(), 0).merges
        # Each piece of a document without line breaks is ended by one.
        assert merges.decode(all_tokens(tmp_path / "out").tolist()).replace("\n", "") == "aé€𝄞" * 700


class TestAStop:
    def test_keeps_what_is_done_and_the_rest_comes_out_the_same(self, text, tmp_path, monkeypatch):
        whole = tokenize(str(text), tmp_path / "whole", tokenizer="bpe:300", shard_bytes=4096)
        made, write = [], tokenizing._write_shard

        def stopped(job, *others):
            if len(made) == 3:
                raise KeyboardInterrupt
            made.append(job.number)
            return write(job, *others)

        monkeypatch.setattr(tokenizing, "_write_shard", stopped)
        with pytest.raises(KeyboardInterrupt):
            tokenize(str(text), tmp_path / "out", tokenizer="bpe:300", shard_bytes=4096)
        with (tmp_path / "out" / "progress.jsonl").open("a") as journal:
            journal.write('{"name": "00002.bin", "num_tok')
        lines = (tmp_path / "out" / "progress.jsonl").read_text().splitlines()[1:-1]
        done = [line for line in lines if '"name"' in line]
        made.clear()
        monkeypatch.setattr(tokenizing, "_write_shard", lambda *job: made.append(job[0].number) or write(*job))
        assert tokenize(str(text), tmp_path / "out", tokenizer="bpe:300", shard_bytes=4096) == whole
        assert len(made) == len(whole.shards) - len(done)
        assert len(done) > 0
        assert not (tmp_path / "out" / "progress.jsonl").exists()

    def test_shards_that_were_damaged_are_made_again_and_no_others(self, text, tmp_path, made):
        whole = tokenize(str(text), tmp_path / "out", shard_bytes=4096)
        path = tmp_path / "out" / "00001.bin"
        path.write_bytes(path.read_bytes()[:-1])
        made.clear()
        assert tokenize(str(text), tmp_path / "out", shard_bytes=4096) == whole
        assert made == [1]

    @pytest.mark.parametrize(
        "names",
        [("pytorch_model.bin",), ("index.json",), ("tokenizer.json",), ("00000.bin", "notes.txt"), ("1.bin.partial",)],
    )
    def test_files_of_others_are_left_alone(self, text, tmp_path, names):
        folder = tmp_path / "out"
        folder.mkdir()
        for name in names:
            (folder / name).write_text("{}")
        with rejects("out", hint="It has other files: "):
            tokenize(str(text), folder, tokenizer="bpe:300")
        assert {file.name: file.read_text() for file in folder.iterdir()} == dict.fromkeys(names, "{}")

    def test_a_stop_before_the_first_shard_leaves_no_folder_of_texts(self, text, tmp_path, monkeypatch):
        def stopped(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(tokenizing, "_write_shard", stopped)
        with pytest.raises(KeyboardInterrupt):
            tokenize(str(text), tmp_path / "out")
        assert [file.name for file in (tmp_path / "out").iterdir()] == ["progress.jsonl"]
        with rejects("data", hint="Run tidegate tokenize again with the same options"):
            text_task(str(tmp_path / "out"), length=16).load()

    def test_partial_files_of_a_killed_writer_are_ignored_and_those_of_shards_removed(self, text, tmp_path):
        whole = tokenize(str(text), tmp_path / "whole")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / f"progress.jsonl.{'0' * 16}.partial").write_text("{")
        left = tmp_path / "out" / f"00009.bin.{'0' * 16}.partial"
        left.write_text("half")
        assert tokenize(str(text), tmp_path / "out") == whole
        assert not left.exists()

    def test_a_call_that_ended_before_its_first_shard_is_no_obstacle_to_another(self, text, tmp_path, monkeypatch):
        other = text.with_name("other.txt")
        other.write_text(TEXT.upper())
        expected = tokenize(str(text), tmp_path / "whole", tokenizer="bpe:300")

        def stopped(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(tokenizing, "_write_shard", stopped)
            with pytest.raises(KeyboardInterrupt):
                tokenize(str(other), tmp_path / "out", tokenizer="bpe:300")
        assert set(files_in(tmp_path / "out")) == {"progress.jsonl", "tokenizer.json"}
        assert tokenize(str(text), tmp_path / "out", tokenizer="bpe:300") == expected
        assert files_in(tmp_path / "out") == files_in(tmp_path / "whole")


class TestFinishedShards:
    @pytest.mark.parametrize(
        ("options", "difference"),
        [
            ({"data": "other.jsonl"}, "other.jsonl."),
            ({"field": "body"}, "field was None and is body."),
            ({"tokenizer": "bpe:300"}, "tokenizer was bytes and is bpe:300."),
            ({"shard_bytes": 2048}, "shard_bytes was 4096 and is 2048."),
        ],
        ids=["source", "field", "tokenizer", "shard_bytes"],
    )
    def test_of_other_options_are_rejected_and_left_as_they_were(self, tmp_path, monkeypatch, options, difference):
        monkeypatch.chdir(tmp_path)
        for name in ("lines", "other"):
            records = [{"text": f"{name} {line}", "body": line.upper()} for line in LINES]
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        first = {"data": "lines.jsonl", "folder": tmp_path / "out", "shard_bytes": 4096}
        tokenize(**first)
        before = files_in(tmp_path / "out")
        with rejects("out", hint=difference):
            tokenize(**(first | options))
        assert files_in(tmp_path / "out") == before

    def test_are_kept_by_the_same_call_with_a_relative_path(self, text, tmp_path, monkeypatch, made):
        monkeypatch.chdir(text.parent)
        whole = tokenize(text.name, tmp_path / "out", tokenizer="bpe:300", shard_bytes=4096)
        before = files_in(tmp_path / "out")
        made.clear()
        assert tokenize(text.name, tmp_path / "out", tokenizer="bpe:300", shard_bytes=4096) == whole
        assert made == []
        assert files_in(tmp_path / "out") == before

    def test_of_a_text_that_has_grown_keep_their_byte_pairs_and_what_has_not_changed(self, text, tmp_path, made):
        before = tokenize(str(text), tmp_path / "out", tokenizer="bpe:300", shard_bytes=4096)
        made.clear()
        text.write_text(TEXT + "ONE MORE LINE\n" * 400)
        after = tokenize(str(text), tmp_path / "out", tokenizer="bpe:300", shard_bytes=4096)
        assert after.tokenizer_digest == before.tokenizer_digest
        assert after.shards[:3] == before.shards[:3]
        assert made == list(range(3, len(after.shards)))

    def test_of_an_older_version_are_read(self, text, tmp_path):
        out = tmp_path / "out"
        whole = tokenize(str(text), out, shard_bytes=4096)
        older = verify_checksum(parse_json((out / "index.json").read_bytes()))
        for name in ("source", "field", "shard_bytes"):
            del older[name]
        (out / "index.json").write_text(json.dumps(add_checksum(older), indent=1))
        assert read_index(out).fingerprint == whole.fingerprint
        assert text_task(str(out), length=16).load().num_training_examples > 0


class TestASourceThatCannotBeOpened:
    @pytest.fixture
    def unreachable(self, monkeypatch):
        """A hub that has no dataset."""

        def refuse(*_, **__):
            raise datasets.exceptions.DatasetNotFoundError("It doesn't exist on the Hub.")

        monkeypatch.setattr(datasets, "load_dataset", refuse)

    @pytest.mark.usefixtures("unreachable")
    def test_leaves_no_folder_so_that_the_corrected_call_works(self, text, tmp_path):
        with rejects("data", hint="Check the name and the network"):
            tokenize("hf:mistyped", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        assert tokenize(str(text), tmp_path / "out").title == "sums.txt"

    def test_or_that_holds_no_text_leaves_finished_shards_as_they_were(self, text, tmp_path):
        tokenize(str(text), tmp_path / "out")
        before = files_in(tmp_path / "out")
        text.write_text("")
        with rejects("data", hint="contains no text"):
            tokenize(str(text), tmp_path / "out")
        assert files_in(tmp_path / "out") == before


def test_processes_write_what_one_process_does(text, tmp_path):
    in_processes = tokenize(str(text), tmp_path / "two", tokenizer="bpe:300", num_processes=2, shard_bytes=4096)
    assert tokenize(str(text), tmp_path / "one", tokenizer="bpe:300", shard_bytes=4096) == in_processes


class TestTheTask:
    def test_batches_are_those_of_the_same_tokens_in_memory(self, text, tmp_path):
        index = tokenize(str(text), tmp_path / "out", shard_bytes=2048)
        training, held_out = open_shards(tmp_path / "out", index)
        plain = training[np.arange(len(training))]
        np.save(tmp_path / "plain.npy", np.concatenate([plain, held_out[np.arange(len(held_out))]]))
        sharded = text_task(str(tmp_path / "out"), length=16)
        # Held out is the end: exactly what the shards hold out.
        share = len(held_out) / (len(training) + len(held_out))
        whole = replace(text_task(str(tmp_path / "plain.npy"), length=16), validation_share=share)
        for step in (0, 7):
            ours, theirs = (task.load().batch(seed=3, step=step, size=5) for task in (sharded, whole))
            assert torch.equal(ours.inputs, theirs.inputs)
            assert torch.equal(ours.targets, theirs.targets)
        assert all(map(torch.equal, sharded.load().validation()[0], whole.load().validation()[0]))
        assert sharded.load().bytes_per_token == 1.0

    def test_it_is_known_by_its_tokens_and_not_by_its_place(self, text, tmp_path):
        for name in ("a", "b"):
            tokenize(str(text), tmp_path / name, shard_bytes=2048)
        tokenize(str(text), tmp_path / "c", tokenizer="bpe:300", shard_bytes=2048)
        moved = text.rename(tmp_path / "moved.txt")
        tokenize(str(moved), tmp_path / "d", shard_bytes=2048)
        a, b, c, d = (text_task(str(tmp_path / name)) for name in "abcd")
        assert a.to_dict(location=False) == b.to_dict(location=False) == d.to_dict(location=False)
        assert a.fingerprint != c.fingerprint
        assert c.load().tokenizer

    @pytest.mark.parametrize(
        ("damage", "message"),
        [
            (lambda out: (out / "00001.bin").write_bytes(b"short"), "00001.bin has 5 bytes instead of "),
            (lambda out: (out / "00000.bin").unlink(), "00000.bin has 0 bytes"),
            (lambda out: flip_inside(out / "00001.bin"), "00001.bin has a wrong checksum"),
            (lambda out: (out / "index.json").rename(out / "progress.jsonl"), "index.json is missing"),
            (
                lambda out: (out / "index.json").write_text("{}"),
                "index.json is damaged",
            ),
            (lambda out: (out / "tokenizer.json").write_text("{}"), "is not the tokenizer of the shards"),
            (
                lambda out: (out / "index.json").write_text((out / "index.json").read_text().replace("300", "301")),
                "index.json is damaged",
            ),
        ],
        ids=["cut short", "missing", "flipped", "unfinished", "emptied index", "another tokenizer", "index"],
    )
    def test_damage_is_an_error_that_names_the_file_and_the_remedy(self, text, tmp_path, damage, message):
        out = tmp_path / "out"
        whole = tokenize(str(text), out, tokenizer="bpe:300", shard_bytes=4096)
        pairs = (out / "tokenizer.json").read_text()
        damage(out)
        with rejects("data", hint=message) as rejected:
            text_task(str(out), length=16).load()
        assert "Run tidegate tokenize again" in rejected.value.hint
        # The remedy works.
        assert tokenize(str(text), out, tokenizer="bpe:300", shard_bytes=4096) == whole
        assert text_task(str(out), length=16).load().tokenizer == pairs

    def test_another_tokenizer_than_their_own_is_refused_with_both_and_the_remedy(self, text, tmp_path):
        tokenize(str(text), tmp_path / "pairs", tokenizer="bpe:300")
        tokenize(str(text), tmp_path / "bytes")
        for folder, own, other in (("pairs", "bpe:300", "bytes"), ("bytes", "bytes", "bpe:300")):
            data = str(tmp_path / folder)
            with rejects("tokenizer", hint=f"{data} is already tokenized by {own}."):
                text_task(data, tokenizer=other)
            assert text_task(data, tokenizer=own) == text_task(data)

    def test_what_is_for_text_is_refused(self, text, tmp_path):
        tokenize(str(text), tmp_path / "out")
        with rejects("tokenizer", hint="already tokenized"):
            text_task(str(tmp_path / "out"), tokenizer="bpe:300")
        with rejects("data", hint="already tokenized"):
            tokenize(str(tmp_path / "out"), tmp_path / "again")
        no_tokenizer = str(tmp_path / "out" / "index.json")
        with rejects("tokenizer") as rejected:
            tokenize(str(text), tmp_path / "no", tokenizer=no_tokenizer)
        assert (rejected.value.got, rejected.value.expected) == (no_tokenizer, "the JSON of a tokenizer")


def test_places_outside_of_a_stream_are_refused():
    stream = ShardedTokens(
        [np.arange(3, dtype=np.uint8), np.arange(0, dtype=np.uint8), np.arange(3, 5, dtype=np.uint8)]
    )
    assert stream[np.array([[0, 2], [3, 4]])].tolist() == [[0, 2], [3, 4]]
    for place in (-1, 5):
        with pytest.raises(IndexError, match="positions"):
            stream[np.array([place])]
