import pytest

from tidegate._text import echo, shorten


@pytest.mark.parametrize("value", ["g1", 3, None, [1, "a"], "x" * 198], ids=lambda value: str(value)[:9])
def test_what_is_short_is_quoted_as_python_writes_it(value):
    assert echo(value) == repr(value)


def test_of_a_long_value_the_beginning_is_quoted_and_its_length():
    assert echo("x" * 10**6) == "'" + "x" * 199 + "… (1,000,002 characters)"
    assert shorten("x" * 201) == "x" * 200 + "… (201 characters)"


def test_control_characters_are_escaped():
    assert echo("a\x1b[31m\n") == "'a\\x1b[31m\\n'"


def test_a_number_that_python_does_not_write_is_named_by_its_type():
    assert echo(10**5000) == "a value of type int that is too long to write"
