import re
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.experts import ExpertExperiment, estimate_rate, run_experiment
from tidegate.gate import PRESETS, legal_gates
from tidegate.lab.studies.rates import QUICK, STUDY, RatesOptions, finding, run_rates, view
from tidegate.lab.studies.rates.views import (
    error_panels,
    gauge_counts,
    limit_panels,
    modulus_panels,
    slope_intervals,
    slope_summary,
    slope_table,
    start_panel,
)
from tidegate.lab.studies.study import read_record

DOCUMENTS = Path(__file__).parents[3] / "docs"
PLAIN, GATED = "none, query, key and dense", "g1, g2, bma and bma-query"
TINY = replace(
    QUICK,
    placements=("none", "g1"),
    ns=(1_000, 10_000, 100_000),
    replicates=12,
    limit_replicates=8,
    starts=2,
    start_radii=(0.05, 0.2),
    gate_distances=(0.1, 1.6),
    surplus=1,
)


@pytest.fixture(scope="module")
def result():
    return run_rates(TINY)


@pytest.fixture(scope="module")
def committed():
    return read_record(STUDY, DOCUMENTS / "records" / "experts" / "rates.json")


def test_the_gated_expert_is_identified_and_the_other_is_not(result):
    verdicts = {found.placement: found.slopes["expert"].verdict for found in result.rates}
    assert verdicts == {"none": "not identified", "g1": "identified"}
    assert all(abs(found.slopes["regression"].slope + 0.5) < 0.15 for found in result.rates)


def test_slopes_are_those_of_the_experiment_itself(result):
    data = run_experiment(ExpertExperiment(placement="g1", ns=TINY.ns, replicates=12, starts=2))
    rate, found = estimate_rate(data), result.rates[1].slopes["expert"]
    assert (found.slope, found.low, found.high) == (rate.slope, *rate.interval)


def test_bands_hold_their_medians(result):
    for curve in (curve for found in result.rates for curve in found.errors.values()):
        assert all(low <= middle <= high for low, middle, high in zip(curve.low, curve.median, curve.high, strict=True))


def test_every_legal_gate_that_reads_is_counted_and_the_theory_holds(result):
    readers = {str(gate) for gate in legal_gates() if gate.reads != "nothing"}
    assert {count.gate for count in result.gauge} == {"none", *PRESETS, *readers}
    assert all(count.agrees for count in result.gauge)


def test_the_error_follows_the_start_only_without_a_gate(result):
    none, g1 = (found.error.median for found in result.start_radius)
    assert none[1] > 2 * none[0]
    assert g1[1] == pytest.approx(g1[0], rel=1e-3)


def test_gates_that_nearly_coincide_lose_the_advantage(result):
    near, far = result.near_gates
    assert (near.placement, near.distance, far.distance) == ("g1", 0.1, 1.6)
    assert near.error > 10 * far.error
    assert near.slope.verdict != "identified"


def test_a_modulus_of_zero_has_no_exponent(result):
    none, g1 = result.modulus
    assert none.exponent is None
    assert max(none.values) < 1e-12
    assert 0.9 < g1.exponent < 1.1


def test_single_masses_of_surplus_experts_are_not_told(result):
    assert [found.kind for found in result.surplus] == ["vector_mass", "raw"]
    assert result.surplus[1].slope.slope > result.surplus[0].slope.slope


@pytest.mark.full
def test_the_same_options_give_the_same_numbers():
    options = replace(TINY, placements=("bma",), layouts=(), gate_distances=(), num_truths=0, surplus=0)
    assert run_rates(options) == run_rates(options)


def test_the_committed_record_is_of_the_default_run_and_has_the_numbers_of_the_document(committed):
    text = (DOCUMENTS / "experts.md").read_text().replace("\u2212", "-")
    assert committed.options == RatesOptions()
    for placement in committed.rates:
        slope = placement.slopes["expert"]
        row = re.search(rf"\| {placement.placement} \| (.*) \| (.*) to (.*) \| (.*) \|", text)
        assert [float(cell) for cell in row.groups()[:3]] == pytest.approx(
            [slope.slope, slope.low, slope.high], abs=6e-4
        )
        assert row.group(4) == slope.verdict


def cells(table):
    return {row[0]: row for row in table.rows}


def test_slopes_have_intervals_and_verdicts(committed):
    g1 = next(found for found in committed.rates if found.placement == "g1").slopes
    row = cells(slope_table(committed))["g1"]
    assert row[1:5] == ("identified", g1["expert"].slope, g1["expert"].low, g1["expert"].high)
    assert row[5] == g1["regression"].slope
    panel = slope_intervals(committed)
    assert [item.value for item in panel.items] == [found.slopes["expert"].slope for found in committed.rates]
    assert "none 0.01, not identified" in panel.alternative


def test_the_table_of_the_command_line_has_the_slopes_of_both_errors(committed):
    g1 = next(found for found in committed.rates if found.placement == "g1").slopes
    row = cells(slope_summary(committed))["g1"]
    for cell, slope in zip(row[2:], (g1["expert"], g1["regression"]), strict=True):
        assert cell == f"{slope.slope:+.3f} ({slope.low:+.3f} … {slope.high:+.3f})"


def test_expert_and_regression_errors_stand_side_by_side_on_logarithmic_axes(committed):
    expert, regression = error_panels(committed)
    for panel in (expert, regression):
        assert panel.log_x
        assert panel.log_y
        assert [series.group for series in panel.series] == list(committed.options.placements)
        assert all(series.low is not None for series in panel.series)
    assert expert.title == f"The expert error stays at its start for {PLAIN}, and falls for {GATED}"


def test_theory_stands_beside_measurement(committed):
    agrees, *_ = committed.gauge
    wrong, silent = replace(agrees, nullity=agrees.nullity + 1), replace(agrees, predicted=None)
    table = gauge_counts(replace(committed, gauge=(agrees, wrong, silent)))
    assert "agree for 1 of 3" in table.title
    assert [row[-1] for row in table.rows] == ["yes", "no", "no theory"]


def test_a_modulus_of_zero_is_told_in_words_and_not_drawn(committed):
    lines, table = modulus_panels(committed)
    assert [series.label for series in lines.series] == list(committed.options.gated_placements)
    assert f"for {PLAIN} the change is at most 3e-16" in lines.title
    assert cells(table)["none"][-1] == "never"
    assert cells(table)["g1"][-1] == "n^(−0.51)"


def test_starts_matter_only_where_nothing_is_identified(committed):
    words = f"The error is that of the start for {PLAIN}. The start does not matter for {GATED}"
    assert start_panel(committed).title == words


def test_limits_compare_near_gates_with_no_gate_count_verdicts_over_truths_and_warn_of_surplus_experts(committed):
    lines, near, truths, surplus, caution = limit_panels(committed)
    assert "exceeds that without a gate for all" in lines.title
    assert [series.label for series in lines.series] == [*committed.options.gated_placements, "none, for comparison"]
    assert near.rows[0][:2] == ("g1", 0.05)
    slopes = [truth.slope.slope for truth in committed.truths if truth.placement == "bma"]
    assert cells(truths)["bma"][1:5] == (3, min(slopes), sorted(slopes)[1], max(slopes))
    assert cells(truths)["bma"][-1] == "2 identified, 1 inconclusive"
    assert surplus.rows[1][1] == "single experts"
    assert any("too few fits converged for bma" in paragraph for paragraph in caution.paragraphs)


def test_parts_that_were_left_out_make_no_panels(committed):
    (caution,) = limit_panels(replace(committed, near_gates=(), truths=(), surplus=()))
    assert not any("converged" in paragraph for paragraph in caution.paragraphs)
    assert view(committed)[-1].title == "Limits"


def test_the_finding_names_placements_by_verdict(committed):
    assert f"identified for {GATED}, not identified for {PLAIN}" in finding(committed)
