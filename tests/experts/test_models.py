import numpy as np
import pytest
from closeness import assert_close
from errors import rejects

from tidegate.experts.decomposition import decompose
from tidegate.experts.models import PLACEMENTS, Design, ExpertModel, default_design, default_truth
from tidegate.gates import Gates
from tidegate.tensors.layer import AttentionArrays

DESIGN = default_design(num_points=40)
GATES = {"query": "g4", "key": "g3", "dense": "g5"}

every_placement = pytest.mark.parametrize("placement", PLACEMENTS)


def parameters(model, *, fits=3, seed=0):
    return np.random.default_rng(seed).standard_normal((fits, model.num_parameters))


@every_placement
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_jacobian_by_hand_is_the_derivative(placement, k):
    model = ExpertModel(placement=placement, k=k)
    point = parameters(model)
    values, jacobian = model.value_and_jacobian(point, DESIGN)
    steps = 1e-6 * np.eye(model.num_parameters)
    differences = [(model.value(point + step, DESIGN) - model.value(point - step, DESIGN)) / 2e-6 for step in steps]
    assert_close(jacobian, np.stack(differences, axis=1), what="finite difference")
    assert_close(values, model.value(point, DESIGN))


@every_placement
def test_the_rank_is_that_of_the_jacobian(placement):
    for k in (1, 2, 3):
        model = ExpertModel(placement=placement, k=k)
        _, jacobian = model.value_and_jacobian(parameters(model), DESIGN)
        values = np.linalg.svd(jacobian[0], compute_uv=False)
        assert np.sum(values > 1e-10 * values[0]) == model.rank


def as_layer(model, point):
    """The attention layer, one head of one output, of which the model is an entry."""
    B, u, gate = model.split(point)
    spelling = GATES.get(model.placement, model.placement)
    site = None if spelling == "none" else Gates.parse(spelling)[0].site
    width, k = model.width, model.k
    # Scores are divided by the root of the head's width, which is that of the values.
    W_Q = np.zeros((1, width, k))
    W_K = np.zeros((1, width, k))
    W_Q[0, :, :width], W_K[0, :, :width] = B * np.sqrt(k), np.eye(width)
    weights = {"g1": gate.T, "g2": gate.T, "query": gate, "key": gate, "dense": np.outer(gate, np.eye(width)[0])}
    if model.placement in ("bma", "bma-query"):
        weights[model.placement] = gate.T / np.sqrt(k)
    return AttentionArrays(
        W_Q=W_Q,
        W_K=W_K,
        W_V=u.T[None],
        W_O=np.outer(np.ones(k), np.eye(width)[0])[None],
        gates=Gates.parse(spelling),
        gate_parameters={} if site is None else {site: {"weight": weights[model.placement][None]}},
        causal=False,
    )


@every_placement
def test_the_model_is_an_entry_of_an_attention_layer(placement):
    model = ExpertModel(placement=placement, k=2)
    point = default_truth(placement).vector()
    layer = as_layer(model, point)
    output = layer(DESIGN.points)[:, -1, 0]
    assert_close(model.value(point[None], DESIGN)[0], output)
    parts = decompose(layer, DESIGN.points)
    assert parts.expert_kind == ("gated" if model.gated_experts else "linear")


def test_a_sigmoid_gate_has_an_exact_duplicate_with_one_more_expert():
    truth = default_truth("g1")
    B, u, theta = truth.scores.ravel(), truth.experts, truth.gate
    twin = np.concatenate([B, 2 * u[0], -u[0], u[1], 0 * theta[0], -theta[0], theta[1]])
    small, large = ExpertModel(placement="g1", k=2), ExpertModel(placement="g1", k=3)
    assert_close(large.value(twin[None], DESIGN), small.value(truth.vector()[None], DESIGN))


def test_bad_models_and_designs_are_rejected():
    with rejects("placement"):
        ExpertModel(placement="g9", k=2)
    with rejects("k"):
        ExpertModel(placement="g1", k=0)
    with rejects("points"):
        Design(points=np.ones((4, 3, 2), dtype=np.float32))
