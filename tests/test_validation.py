import pickle
from pathlib import Path

import pytest
from errors import rejects

from tidegate import InputError
from tidegate._validation import require_size

ERROR = InputError("window", expected="a positive integer or None", got=-3, hint="Use None for full attention.")


def test_an_error_renders_its_parts_in_one_sentence_and_a_hint():
    assert str(ERROR) == "window must be a positive integer or None, got -3. Use None for full attention."
    assert str(InputError("cache", expected="None with a context")) == "cache must be None with a context."
    assert str(InputError("data", expected="a file", got=Path("a b"))) == "data must be a file, got a b."


def test_a_long_or_unprintable_value_is_shortened():
    assert len(str(InputError("name", expected="short", got="x" * 10_000))) < 300


def test_an_error_keeps_its_parts_between_processes():
    again = pickle.loads(pickle.dumps(ERROR))
    assert vars(again) == vars(ERROR)
    assert str(again) == str(ERROR)
    assert str(pickle.loads(pickle.dumps(InputError("x", expected="None")))) == "x must be None."


def test_an_error_of_a_nested_field_names_the_path():
    assert ERROR.inside("curve[3]").field == "curve[3].window"
    assert InputError("[1]", expected="a number").inside("pair").field == "pair[1]"
    assert str(ERROR.inside("config")) == f"config.{ERROR}"


@pytest.mark.parametrize("size", [0, 1.5, False])
def test_a_size_is_none_only_where_that_is_allowed(size):
    require_size("reach", None, optional=True)
    with rejects("reach"):
        require_size("reach", size, optional=True)
    with rejects("reach"):
        require_size("reach", None)
