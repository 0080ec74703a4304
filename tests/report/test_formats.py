import math

import pytest

from tidegate.report.formats import (
    cell_text,
    estimate_digits,
    estimate_text,
    number_text,
    scale_digits,
    slug,
    typographic,
)
from tidegate.report.lines import log_ticks, tick_text
from tidegate.report.page import Column, Estimate


@pytest.mark.parametrize(
    ("value", "digits", "signed", "text"),
    [
        (1234567.0, None, False, "1,234,567"),
        (0.123456, None, False, "0.1235"),
        (1.25, 1, False, "1.2"),
        (-1234.5, 2, False, "-1,234.50"),
        (0.5, 2, True, "+0.50"),
        (-0.0001, 2, True, "0.00"),
        (None, 2, False, ""),
        (math.nan, 2, False, ""),
        (-math.inf, None, True, ""),
    ],
)
def test_a_number_is_written_with_its_digits_separators_and_sign(value, digits, signed, text):
    assert number_text(value, digits, signed=signed) == text


def test_text_in_a_cell_stays_as_it_is():
    assert cell_text("1234 ± 5", Column(title="loss", digits=2)) == "1234 ± 5"


def test_digits_follow_the_narrowest_interval():
    wide = Estimate(label="wide", value=1.0, low=-5.0, high=7.0)
    narrow = Estimate(label="narrow", value=0.1, low=0.07, high=0.13)
    assert estimate_digits([wide]) == 1
    assert estimate_digits([wide, narrow]) == 3
    assert estimate_text(narrow, 3) == "+0.100 [+0.070, +0.130]"


@pytest.mark.parametrize(("value", "text"), [(-0.25, "-0.250"), (None, "")])
def test_an_estimate_without_an_interval_is_written_alone_and_one_without_a_value_not_at_all(value, text):
    item = Estimate(label="a", value=value)
    assert estimate_text(item, estimate_digits([item])) == text


@pytest.mark.parametrize(("low", "high", "digits"), [(0, 1, 2), (0, 0.3, 2), (0, 0.05, 3), (-40, 60, 0), (1, 1, 2)])
def test_a_scale_tells_a_hundred_values_apart(low, high, digits):
    assert scale_digits(low, high) == digits


def test_a_minus_sign_replaces_hyphens_before_numbers_only():
    assert typographic("-0.1 to -.2, g1-3, 2024-01") == "\u22120.1 to \u2212.2, g1-3, 2024-01"


def test_a_slug_has_letters_digits_and_hyphens():
    assert [slug("What the gates do?"), slug("×")] == ["what-the-gates-do", "part"]


def test_few_values_of_a_logarithmic_axis_are_its_ticks():
    assert log_ticks((64, None, 32, 128, 0, -1, 64)) == [32, 64, 128]


@pytest.mark.parametrize("top", [1.3, 4.0, 30.0, 2e3, 7e8])
def test_a_logarithmic_axis_has_some_ticks_and_not_many_all_within_its_values(top):
    values = [top ** (k / 50) for k in range(51)]
    ticks = log_ticks(values)
    assert 2 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    assert 1 <= ticks[0] < ticks[-1] <= top


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1024, "1,024"),
        (20_000, "20k"),
        (5e6, "5M"),
        (0.25, "0.25"),
        (2e-7, "2e-07"),
        (0, "0"),
    ],
)
def test_a_tick_is_short(value, text):
    assert tick_text(value) == text
