import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
from closeness import assert_close
from covers import axis, over
from errors import rejects

from tidegate.lab.tasks.documents import Document
from tidegate.lab.tasks.source import read_corpus
from tidegate.lab.tasks.streams import hold_out
from tidegate.lab.tasks.text import text_task
from tidegate.lab.tasks.tokenizer import Tokenizer, trained_tokenizer


def test_bytes_have_one_byte_a_token(text_file):
    data = text_task(str(text_file)).load()
    assert data.bytes_per_token == 1.0
    assert bytes(data.batch(seed=0, step=0, size=1).inputs[0].tolist()) in text_file.read_bytes()


def test_byte_pairs_come_back_as_the_text_and_count_its_bytes(folder):
    (folder / "shelf0" / "accents.txt").write_text("déjà vu 日本 🌊\n" * 30)
    data = text_task(str(folder), tokenizer="bpe:400", length=32).load()
    split = hold_out(read_corpus(str(folder), None).documents, share=0.05, at_least=33 * 8)
    text = b"".join(document.content for document in split.held_out)
    merges = data._streams.token_bytes
    assert int(merges[data._streams.held_out].sum()) == len(text)
    assert data.vocab_size == 400
    assert 1.2 < data.bytes_per_token < 8
    targets = np.concatenate([batch.targets.numpy().ravel() for batch in data.validation()])
    assert_close(np.asarray(data.bytes_per_token), np.asarray(merges[targets].mean()))


def test_byte_pairs_are_the_same_in_another_process(folder):
    task = text_task(str(folder), tokenizer="bpe:400", length=32)
    code = (
        "import pickle, sys; task = pickle.loads(bytes.fromhex(sys.argv[1]));"
        "print(task.load().batch(seed=1, step=2, size=4).inputs.tolist())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(task).hex()], check=True, capture_output=True, text=True
    )
    assert json.loads(done.stdout) == task.load().batch(seed=1, step=2, size=4).inputs.tolist()


def test_byte_pairs_are_trained_from_the_training_text_alone(tmp_path):
    path = tmp_path / "two.txt"
    path.write_text("abab " * 2000 + "xyzxyz " * 60)
    merges = text_task(str(path), tokenizer="bpe:300", length=8).load()
    held_out = merges.validation()[-1].targets
    # The end was never seen in training, so that each of its letters is a token.
    assert set(merges._streams.token_bytes[held_out[-1].numpy()].tolist()) == {1}


def test_text_with_few_pairs_has_fewer_tokens_than_asked_for(tmp_path):
    path = tmp_path / "ab.txt"
    path.write_text("ab" * 3000)
    data = text_task(str(path), tokenizer="bpe:4096", length=2).load()
    assert 256 < data.vocab_size < 300


@pytest.mark.parametrize("spelling", ["bpe", "bpe:256", "bpe:-5", "words", "bpe:1e4", "", "none"])
def test_other_tokenizers_are_refused(spelling, text_file):
    with rejects("tokenizer"):
        text_task(str(text_file), tokenizer=spelling)


class Spy:
    """Stands in for the library: a token is a character, and every call is remembered."""

    def __init__(self):
        self.calls = []

    def encode_batch_fast(self, texts):
        self.calls.append(texts)
        return [type("Encoding", (), {"ids": [ord(character) for character in text]}) for text in texts]


LARGE = {
    "lines": "a line of text\n" * 160_000,
    "one line": "words without a line break " * 90_000,
    "no spaces": "日本🌊é" * 200_000,
    "one long line among short": "short\n" * 20_000 + "x" * 1_000_000 + "\nshort" * 20_000,
}


@over(text=axis(LARGE, "no spaces"), view=axis({"bytes": bytes, "memoryview": memoryview}))
def test_text_is_encoded_a_little_at_a_time_and_all_of_it(text, view):
    spy = Spy()
    tokenizer = Tokenizer(np.ones(0x110000, dtype=np.int64), spy)
    tokens = tokenizer.encode([Document("large", view(text.encode())), Document("empty", b""), Document("small", b"e")])
    assert "".join(map(chr, tokens)) == text + ("" if text.endswith("\n") else "\n") + "\ne\n"
    assert max(len("".join(call).encode()) for call in spy.calls) <= 2 << 20
    assert max(len(slice_.encode()) for call in spy.calls for slice_ in call) <= 2 << 16


def test_where_text_is_cut_does_not_show_in_its_tokens():
    text = "".join(f"{number}: some words of line {number % 13}\n" for number in range(9000))
    documents = [Document("lines", text.encode())]
    tokenizer = trained_tokenizer(documents, 400)
    assert len(text) > 3 << 16
    assert tokenizer.encode(documents).tolist() == tokenizer.merges.encode(text).ids


def test_a_byte_that_is_no_text_is_named_by_its_place_in_the_document(tmp_path):
    path = tmp_path / "mixed.txt"
    path.write_bytes(b"a line of text\n" * 10_000 + b"\xff\n" + b"another line\n" * 10_000)
    with rejects("tokenizer", hint="mixed.txt, which has an invalid byte at 150000."):
        text_task(str(path), tokenizer="bpe:300").load()
