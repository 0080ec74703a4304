from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.lab.studies.rates import STUDY, finding, view
from tidegate.lab.studies.rates.run import list_names
from tidegate.lab.studies.rates.views import (
    error_panels,
    gauge_counts,
    limit_panels,
    modulus_panels,
    slope_intervals,
    slope_table,
    start_panel,
)
from tidegate.lab.studies.study import read_record

PLAIN, GATED = "none, query, key and dense", "g1, g2, bma and bma-query"


@pytest.fixture(scope="module")
def result():
    return read_record(STUDY, Path(__file__).parents[3] / "docs" / "records" / "experts" / "rates.json")


def cells(table):
    return {row[0]: row for row in table.rows}


def test_slopes_have_intervals_and_verdicts(result):
    g1 = next(found for found in result.rates if found.placement == "g1").slopes
    row = cells(slope_table(result))["g1"]
    assert row[1:5] == ("identified", g1["expert"].slope, g1["expert"].low, g1["expert"].high)
    assert row[5] == g1["regression"].slope
    panel = slope_intervals(result)
    assert [item.value for item in panel.items] == [found.slopes["expert"].slope for found in result.rates]
    assert "none 0.01, not identified" in panel.alternative


def test_expert_and_regression_errors_stand_side_by_side_on_logarithmic_axes(result):
    expert, regression = error_panels(result)
    for panel in (expert, regression):
        assert panel.log_x
        assert panel.log_y
        assert [series.group for series in panel.series] == list(result.options.placements)
        assert all(series.low is not None for series in panel.series)
    assert expert.title == f"The expert error stays where it began for {PLAIN}, and falls for {GATED}"


def test_theory_stands_beside_measurement(result):
    agrees, *_ = result.gauge
    wrong, silent = replace(agrees, nullity=agrees.nullity + 1), replace(agrees, predicted=None)
    table = gauge_counts(replace(result, gauge=(agrees, wrong, silent)))
    assert "agree for 1 of 3" in table.title
    assert [row[-1] for row in table.rows] == ["yes", "no", "no theory"]


def test_a_modulus_of_zero_is_told_in_words_and_not_drawn(result):
    lines, table = modulus_panels(result)
    assert [series.label for series in lines.series] == list(result.options.gated_placements)
    assert f"for {PLAIN} it is at most 3e-16" in lines.title
    assert cells(table)["none"][-1] == "never"
    assert cells(table)["g1"][-1] == "n^(−0.51)"


def test_starts_matter_only_where_nothing_is_identified(result):
    words = f"The error is that of the start for {PLAIN}. It does not matter where fits begin for {GATED}"
    assert start_panel(result).title == words


def test_limits_compare_near_gates_with_no_gate_count_verdicts_over_truths_and_warn_of_surplus_experts(result):
    lines, near, truths, surplus, caution = limit_panels(result)
    assert "larger than without a gate, everywhere" in lines.title
    assert [series.label for series in lines.series] == [*result.options.gated_placements, "none, for comparison"]
    assert near.rows[0][:2] == ("g1", 0.05)
    slopes = [truth.slope.slope for truth in result.truths if truth.placement == "bma"]
    assert cells(truths)["bma"][1:5] == (3, min(slopes), sorted(slopes)[1], max(slopes))
    assert cells(truths)["bma"][-1] == "2 identified, 1 inconclusive"
    assert surplus.rows[1][1] == "single experts"
    assert any("too few fits converged for bma" in paragraph for paragraph in caution.paragraphs)


def test_parts_that_were_left_out_make_no_panels(result):
    (caution,) = limit_panels(replace(result, near_gates=(), truths=(), surplus=()))
    assert not any("converged" in paragraph for paragraph in caution.paragraphs)
    assert view(result)[-1].title == "Limits"


def test_the_finding_names_placements_by_verdict(result):
    assert f"identified for {GATED}, not identified for {PLAIN}" in finding(result)


def test_names_are_listed_as_in_a_sentence():
    assert [list_names(""), list_names("a"), list_names("ab"), list_names("abc")] == ["", "a", "a and b", "a, b and c"]
