import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate._text import list_some, number_of, printable, short_repr, shorten

STEERING = [*range(9), *range(11, 32), *range(127, 160), 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]
anything = st.text(st.sampled_from([*map(chr, STEERING), *'\ud800\udfff\t\n\\"/a≥🌊ש']))


@pytest.mark.parametrize("code", STEERING)
def test_a_character_that_steers_is_spelled(code):
    assert printable(f"a{chr(code)}b") == f"a\\u{code:04x}b"


@given(text=anything)
def test_what_is_printable_can_be_encoded_and_stays_as_it_is(text):
    shown = printable(text)
    assert printable(shown) == shown
    assert shown.encode().decode() == shown


@given(text=anything)
def test_json_keeps_its_value(text):
    assert json.loads(printable(json.dumps([text], ensure_ascii=False))) == [text]


@pytest.mark.parametrize("text", ["", "tab\tand\nbreak", "größer ≥ 3 … 🌊", "שלום", r"a\b"])
def test_other_text_stays_as_it_is(text):
    assert printable(text) == text


def test_a_long_list_says_how_many_it_leaves_out():
    assert list_some(["a", "b"], most=2) == "a, b"
    assert list_some(["a", "b", "c", "d"], most=2) == "a, b and 2 more"


@pytest.mark.parametrize("value", ["g1", 3, None, [1, "a"], "x" * 198], ids=lambda value: str(value)[:9])
def test_what_is_short_is_quoted_as_python_writes_it(value):
    assert short_repr(value) == repr(value)


def test_of_a_long_value_the_beginning_is_quoted_and_its_length():
    assert short_repr("x" * 10**6) == "'" + "x" * 199 + "… (1,000,002 characters)"
    assert shorten("x" * 201) == "x" * 200 + "… (201 characters)"


def test_a_number_that_python_does_not_write_is_named_by_its_type():
    assert short_repr(10**5000) == "a value of type int that cannot be printed"


@pytest.mark.parametrize(
    ("count", "noun", "words"),
    [
        (1, "run", "1 run"),
        (2048, "batch", "2,048 batches"),
    ],
)
def test_a_noun_is_in_the_singular_after_one_alone(count, noun, words):
    assert number_of(count, noun) == words
