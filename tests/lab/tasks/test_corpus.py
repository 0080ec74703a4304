import sysconfig
from pathlib import Path

from errors import rejects

from tidegate.lab.tasks.documents import Document, fingerprint
from tidegate.lab.tasks.source import HELD_OUT, TRAINING, embedded_corpus

STDLIB = Path(sysconfig.get_path("stdlib"))


def test_no_module_is_both_trained_on_and_held_out():
    names = [*TRAINING, *HELD_OUT]
    assert len(set(names)) == len(names)


def test_the_running_python_has_enough_of_both():
    corpus = embedded_corpus()
    training = corpus.documents
    assert 4e6 < sum(len(document.content) for document in training) < 9e6
    assert 1.5e5 < sum(len(document.content) for document in corpus.held_out) < 4e5
    assert len(corpus.missing) < 5
    assert [document.name for document in training] == [name for name in TRAINING if name not in corpus.missing]
    assert training[0].content == (STDLIB / training[0].name).read_bytes()


def test_a_missing_module_is_left_out_and_named(tmp_path):
    for name in (TRAINING[0], HELD_OUT[0]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"pass\n")
    corpus = embedded_corpus(tmp_path)
    assert corpus.documents == (Document(TRAINING[0], b"pass\n"),)
    assert corpus.held_out == (Document(HELD_OUT[0], b"pass\n"),)
    assert corpus.missing == (*TRAINING[1:], *HELD_OUT[1:])


def test_a_python_without_sources_says_what_to_do(tmp_path):
    with rejects("data", hint="standard library"):
        embedded_corpus(tmp_path)


def test_the_fingerprint_tells_names_contents_order_and_sides_apart():
    a, b = Document("a", b"1"), Document("b", b"2")
    lists = [
        ([a, b],),
        ([b, a],),
        ([a], [b]),
        ([a],),
        ([a, b], []),
        ([Document("a", b"2"), b],),
        ([Document("c", b"1"), b],),
    ]
    found = [fingerprint(*groups) for groups in lists]
    assert len(set(found)) == len(found)
    assert found[0] == fingerprint([a, b])
    assert all(len(digits) == 16 and int(digits, 16) >= 0 for digits in found)
