"""The phrase check of `make check` flags quaint phrases and nothing else."""

import re

import pytest
from phrases import PHRASES, ROOT, flagged


@pytest.mark.parametrize(
    "text",
    [
        "g1 is not told apart from none",
        "Drawn anew for every step.",
        "# A run that failed goes\n    # on from its checkpoint.",
        "It is no\nfile.",
        "Mend it or take it out.",
        "0.0287 would be seen 4 times in 5.",
        "The luck of that choice is not in the intervals.",
    ],
)
def test_a_quaint_phrase_is_flagged(text):
    assert len(flagged(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "recommended",
        "There is no file.",
        "where there is no number",
        "a renewed test",
        "almost at work",
        "the baseline goes up",
        "amendment",
    ],
)
def test_other_sentences_pass(text):
    assert flagged(text) == []


def test_a_flagged_phrase_names_its_line_and_its_replacement():
    assert flagged("one\ntwo seldom") == ["2: 'seldom' (write: rarely)"]


def test_replacements_are_not_flagged_themselves():
    assert [line for instead in PHRASES.values() for line in flagged(instead)] == []


def test_make_check_runs_it():
    (recipe,) = re.findall(r"^check:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert "tests/support/phrases.py" in recipe
