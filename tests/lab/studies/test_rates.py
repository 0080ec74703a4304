import re
from dataclasses import replace
from pathlib import Path

import pytest

from tidegate.experts import ExpertExperiment, estimate_rate, run_experiment
from tidegate.gate import PRESETS, legal_gates
from tidegate.lab.studies.rates import QUICK, STUDY, RatesOptions, finding, run_rates, view
from tidegate.lab.studies.rates.views import (
    limit_panels,
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


def test_parts_that_were_left_out_make_no_panels(committed):
    (caution,) = limit_panels(replace(committed, near_gates=(), truths=(), surplus=()))
    assert not any("converged" in paragraph for paragraph in caution.paragraphs)
    assert view(committed)[-1].title == "Limits"


def test_the_finding_names_placements_by_verdict(committed):
    assert f"identified for {GATED}, not identified for {PLAIN}" in finding(committed)
