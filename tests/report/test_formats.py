import math
from dataclasses import replace

import pytest
from pages import main_table

from tidegate.report.charts import map_figures
from tidegate.report.formats import (
    estimate_digits,
    estimate_text,
    format_rows,
    map_table,
    number_text,
    numeric_columns,
    scale_digits,
    slug,
    typographic,
)
from tidegate.report.lines import log_ticks, tick_text
from tidegate.report.page import Column, Estimate, Map, Table, layer_head_maps


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


def marked(values, better):
    table = Table(title="", columns=(Column(title="", better=better),), rows=tuple((value,) for value in values))
    return [row[0].best for row in format_rows(table)]


def test_the_best_number_of_a_column_is_marked():
    assert marked((3.0, 1.0, None, "words", 1.0), "low") == [False, True, False, False, True]
    assert marked((3.0, 1.0, 2.0), "high") == [True, False, False]


def test_nothing_is_marked_where_nothing_is_better():
    assert not any(marked((3.0, 1.0), None))
    assert not any(marked((2.0, 2.0), "low"))
    assert not any(marked((2.0, None), "low"))
    assert not any(marked((2.0, float("nan")), "low"))


def test_numbers_may_be_written_as_text():
    columns = tuple(Column(title=title) for title in "abcd")
    rows = (("x", "1.2 ± 0.1", 3.0, None), ("2 y", "−0.5 to +1", None, ""))
    assert numeric_columns(Table(title="", columns=columns, rows=rows)) == [False, True, True, False]


def test_cells_carry_their_numbers_unrounded():
    table = main_table()
    numbers = [[cell.number for cell in row] for row in format_rows(table)]
    assert numbers == [[None if isinstance(value, str) else value for value in row] for row in table.rows]


def test_a_map_is_a_table_too():
    map_ = Map(label="g1", values=((0.125, None), (1.0,)))
    panel = layer_head_maps("title", "mean gate", {"g1": map_.values})
    table = map_table(map_, panel, digits=2)
    assert [[cell.text for cell in row] for row in format_rows(table)] == [
        ["layer 0", "0.12", ""],
        ["layer 1", "1.00", ""],
    ]


def test_named_rows_and_columns_of_a_map_have_their_names():
    map_ = Map(label="g1", values=((0.1, 0.2), (0.3, 0.4)))
    panel = replace(
        layer_head_maps("title", "difference", {"g1": map_.values}),
        row_label="init",
        column_label="rate",
        row_names=("0.02", "torch"),
        column_names=("0.001", "0.002"),
    )
    table = map_table(map_, panel, digits=2)
    assert [column.title for column in table.columns] == ["", "rate 0.001", "rate 0.002"]
    assert [row[0] for row in table.rows] == ["init 0.02", "init torch"]
    (figure,) = map_figures(replace(panel, maps=(map_,)))
    assert figure["layout"]["xaxis"]["ticktext"] == ["0.001", "0.002"]
    assert figure["data"][0]["customdata"][1][0] == ["torch", "0.001"]
