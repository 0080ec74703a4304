from dataclasses import replace

import pytest

from tidegate.lab.studies.rates import finding, view
from tidegate.lab.studies.rates.result import (
    ErrorCurve,
    GaugeCount,
    ModulusCurve,
    NearGates,
    OtherTruth,
    PlacementRates,
    RatesOptions,
    RatesResult,
    Slope,
    StartRadius,
    Surplus,
)
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

NS = (1_000, 10_000, 100_000)
OPTIONS = RatesOptions(placements=("none", "g1"), ns=NS, start_radii=(0.05, 0.2), gate_distances=(0.1, 1.6))


def slope(value, verdict, *, converged=1.0):
    return Slope(
        slope=value,
        low=value - 0.05,
        high=value + 0.05,
        verdict=verdict,
        reasons=("a reason",),
        converged=converged,
        spread_ratio=None,
    )


def curve(*median, x=NS):
    return ErrorCurve(
        x=tuple(map(float, x)), median=median, low=tuple(m / 2 for m in median), high=tuple(2 * m for m in median)
    )


def placement(name, *, gated):
    expert = slope(-0.5, "identified") if gated else slope(0.0, "not identified")
    falling = slope(-0.5, "identified")
    errors = curve(0.1, 0.03, 0.01) if gated else curve(0.4, 0.4, 0.4)
    return PlacementRates(
        placement=name,
        gated=gated,
        num_parameters=12,
        rank=12,
        slopes={"expert": expert, "regression": falling, "scores": falling},
        errors={"expert": errors, "regression": curve(0.1, 0.03, 0.01), "start": curve(0.5, 0.5, 0.5)},
    )


def count(gate, measured, predicted):
    return GaugeCount(
        layout="plain",
        gate=gate,
        num_parameters=144,
        nullity=measured,
        predicted=predicted,
        value_block=measured,
        predicted_value_block=predicted,
        gap=None,
    )


RESULT = RatesResult(
    options=OPTIONS,
    rates=(placement("none", gated=False), placement("g1", gated=True)),
    gauge=(count("none", 36, 36), count("g1", 24, 23), count("odd", 5, None)),
    modulus=(
        ModulusCurve(placement="none", radii=(0.1, 0.3), values=(0.0, 1e-16), exponent=None),
        ModulusCurve(placement="g1", radii=(0.1, 0.3), values=(0.02, 0.06), exponent=1.0),
    ),
    start_radius=(
        StartRadius(placement="none", error=curve(0.1, 0.4, x=(0.05, 0.2))),
        StartRadius(placement="g1", error=curve(0.01, 0.01, x=(0.05, 0.2))),
    ),
    near_gates=(
        NearGates(placement="g1", distance=0.1, slope=slope(-0.1, "inconclusive", converged=0.7), error=1.1),
        NearGates(placement="g1", distance=1.6, slope=slope(-0.5, "identified"), error=0.01),
    ),
    truths=(
        OtherTruth(placement="none", number=0, slope=slope(0.0, "not identified")),
        OtherTruth(placement="g1", number=0, slope=slope(-0.4, "inconclusive", converged=0.5)),
        OtherTruth(placement="g1", number=1, slope=slope(-0.5, "identified")),
    ),
    surplus=(Surplus(placement="g1", kind="raw", slope=slope(-0.01, "inconclusive", converged=0.8)),),
)


def cells(table):
    return {row[0]: row for row in table.rows}


def test_slopes_have_intervals_and_verdicts():
    row = cells(slope_table(RESULT))["g1"]
    assert row[1:6] == ("identified", -0.5, -0.55, -0.45, -0.5)
    panel = slope_intervals(RESULT)
    assert [item.value for item in panel.items] == [0.0, -0.5]
    assert "none 0.00, not identified" in panel.alternative


def test_expert_and_regression_errors_stand_side_by_side_on_logarithmic_axes():
    expert, regression = error_panels(RESULT)
    for panel in (expert, regression):
        assert panel.log_x
        assert panel.log_y
        assert [series.group for series in panel.series] == ["none", "g1"]
        assert all(series.low is not None for series in panel.series)
    assert "stays where it began for none, and falls for g1" in expert.title


def test_theory_stands_beside_measurement():
    table = gauge_counts(RESULT)
    assert "agree for 1 of 3" in table.title
    assert [row[-1] for row in table.rows] == ["yes", "no", "no theory"]


def test_a_modulus_of_zero_is_told_in_words_and_not_drawn():
    lines, table = modulus_panels(RESULT)
    assert [series.label for series in lines.series] == ["g1"]
    assert "for none it is at most 1e-16" in lines.title
    assert cells(table)["none"][-1] == "never"
    assert cells(table)["g1"][-1] == "n^(−0.50)"


def test_starts_matter_only_where_nothing_is_identified():
    title = start_panel(RESULT).title
    assert title == "The error is that of the start for none. It does not matter where fits begin for g1"


def test_limits_compare_near_gates_with_no_gate_count_verdicts_over_truths_and_warn_of_surplus_experts():
    lines, near, truths, surplus, caution = limit_panels(RESULT)
    assert "at 0.1 larger than without a gate, everywhere" in lines.title
    assert [series.label for series in lines.series] == ["g1", "none, for comparison"]
    assert near.rows[0][:2] == ("g1", 0.1)
    row = cells(truths)["g1"]
    assert row[1:5] == (2, -0.5, pytest.approx(-0.45), -0.4)
    assert row[-1] == "1 inconclusive, 1 identified"
    assert surplus.rows[0][1] == "single experts"
    assert any("too few fits converged for g1" in paragraph for paragraph in caution.paragraphs)


def test_parts_that_were_left_out_make_no_panels():
    (caution,) = limit_panels(replace(RESULT, near_gates=(), truths=(), surplus=()))
    assert not any("converged" in paragraph for paragraph in caution.paragraphs)


def test_the_finding_names_positions_by_verdict():
    assert "identified for g1, not identified for none" in finding(RESULT)
    assert [section.title for section in view(RESULT)][-1] == "Limits"


def test_names_are_listed_as_in_a_sentence():
    assert [list_names(""), list_names("a"), list_names("ab"), list_names("abc")] == ["", "a", "a and b", "a, b and c"]
