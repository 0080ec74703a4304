import warnings
from dataclasses import replace

import numpy as np
import pytest
from errors import rejects

from tidegate.experts.estimate import ExpertExperiment, RateData, run_experiment
from tidegate.experts.models import PLACEMENTS, Design, ExpertModel, default_design, default_truth
from tidegate.experts.modulus import profile_modulus
from tidegate.experts.rates import estimate_rate

UNGATED = ("none", "query", "key", "dense")
SMALL = {"ns": (1_000, 10_000, 100_000, 1_000_000), "replicates": 48, "starts": 3}
FEW = SMALL | {"replicates": 12}
"""For verdicts that are far from their limits; fits that do not converge are slow."""


@pytest.fixture(scope="module")
def data():
    return {placement: run_experiment(ExpertExperiment(placement=placement, **SMALL)) for placement in PLACEMENTS}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_experts_are_identified_where_each_has_a_gate_and_nowhere_else(placement, data):
    rate = estimate_rate(data[placement])
    if placement in UNGATED:
        assert rate.verdict == "not identified"
        assert rate.interval[0] > -0.2
        assert rate.spread_ratio > 0.3
    else:
        assert rate.verdict == "identified"
        assert -0.65 < rate.interval[0] < rate.interval[1] < -0.38
        assert rate.spread_ratio < 1e-3


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("metric", ["regression", "scores"])
def test_prediction_and_scores_are_as_good_without_a_gate(metric, placement, data):
    rate = estimate_rate(data[placement], metric)
    assert rate.verdict == "identified"
    assert -0.6 < rate.interval[0] < rate.interval[1] < -0.4


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_regression_error_is_that_of_the_rank(placement, data):
    # The optimizer is not the floor: squared errors average to σ² rank / n.
    model = ExpertModel(placement=placement, k=2)
    for n, errors in zip(SMALL["ns"], data[placement].errors["regression"], strict=True):
        assert np.sqrt(np.mean(errors**2)) == pytest.approx(0.3 * np.sqrt(model.rank / n), rel=0.2)


def test_a_surplus_expert_is_not_called_identified_while_fits_fail_to_converge():
    found = run_experiment(ExpertExperiment(placement="g2", k=3, **FEW), max_steps=60)
    rate = estimate_rate(found)
    assert rate.converged < 0.9
    assert rate.verdict == "inconclusive"
    assert any("of the fits converged" in reason for reason in rate.reasons)


def made_up(slope, *, spread=1e-9, converged=True):
    """Data whose expert error falls with the given slope."""
    ns = (1_000, 10_000, 100_000)
    errors = np.array([n**slope * np.exp(0.1 * np.random.default_rng(n).standard_normal(20)) for n in ns])
    return RateData(
        experiment=ExpertExperiment(placement="none", ns=ns, replicates=20),
        ns=ns,
        errors={"expert": errors, "over": 0 * errors},
        converged=np.full((3, 20, 4), converged),
        start_spread={"expert": np.full((3, 20), spread)},
        start_error=np.ones((3, 20)),
    )


def test_verdicts_follow_the_interval():
    assert estimate_rate(made_up(-0.5)).verdict == "identified"
    assert estimate_rate(made_up(-0.5)).slope == pytest.approx(-0.5, abs=0.05)
    assert estimate_rate(made_up(0.0)).verdict == "not identified"
    assert estimate_rate(made_up(-0.2)).verdict == "inconclusive"


def test_identified_is_refused_where_starts_stay_apart_or_fits_fail():
    assert estimate_rate(made_up(-0.5, spread=0.3)).verdict == "inconclusive"
    assert estimate_rate(made_up(-0.5, spread=np.nan)).verdict == "inconclusive"
    assert estimate_rate(made_up(-0.5, converged=False)).verdict == "inconclusive"
    assert estimate_rate(made_up(0.0, converged=False)).verdict == "inconclusive"


def test_spreads_that_fall_with_n_are_enough():
    found = made_up(-0.25)
    falling = replace(found, start_spread={"expert": found.errors["expert"] * 0.5})
    assert estimate_rate(falling).verdict == "identified"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_modulus_is_zero_without_gates_and_linear_with_them(placement):
    model, design = ExpertModel(placement=placement, k=2), default_design(num_points=64)
    found = profile_modulus(model, default_truth(placement), (0.01, 0.1), design=design, num_directions=4)
    if placement in UNGATED:
        assert not found.identified
        assert found.values.max() < 1e-12
        assert np.isnan(found.exponent)
    else:
        assert found.identified
        assert 0.9 < found.exponent < 1.1


def test_gates_that_nearly_coincide_are_warned_of():
    truth = default_truth("g1")
    near = replace(truth, gate=truth.gate[[0, 0]] + [[0, 0], [0.05, 0]])
    with pytest.warns(UserWarning, match="Two true gates"):
        ExpertExperiment(placement="g1", truth=near, **FEW)


def test_experiments_repeat():
    experiment = ExpertExperiment(placement="g1", **(SMALL | {"ns": (1_000,), "replicates": 3}))
    calls = []
    first = run_experiment(experiment, progress=lambda done, total: calls.append((done, total)))
    np.testing.assert_array_equal(first.errors["expert"], run_experiment(experiment).errors["expert"])
    assert calls == [(1, 1)]


BAD = [
    ({"k": 1}, "k"),
    ({"ns": (11,)}, "ns"),
    ({"starts": 1}, "starts"),
    ({"radius": 0.0}, "radius"),
    ({"design": Design(points=np.ones((64, 4, 2)))}, "design"),
    ({"truth": default_truth("dense")}, "truth.gate"),
    ({"truth": replace(default_truth("g1"), experts=default_truth("g1").experts.astype(np.float32))}, "truth.experts"),
]


@pytest.mark.parametrize(("options", "field"), BAD)
def test_bad_experiments_name_the_option(options, field):
    with rejects(field):
        ExpertExperiment(placement="g1", **options)


def test_starts_that_can_reach_a_duplicate_are_warned_of():
    with pytest.warns(UserWarning, match="exact duplicate"):
        ExpertExperiment(placement="g1", k=3, radius=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ExpertExperiment(placement="g1", k=3).model.num_parameters == 16


def test_bad_questions_to_data_are_rejected():
    for metric in ("other", "over"):
        with rejects("metric"):
            estimate_rate(made_up(-0.5), metric)
    with rejects("n_min"):
        estimate_rate(made_up(-0.5), n_min=5_000)
    with rejects("model.k"):
        profile_modulus(ExpertModel(placement="g1", k=3), default_truth("g1"))
    with rejects("radii"):
        profile_modulus(ExpertModel(placement="g1", k=2), default_truth("g1"), [0.1])
