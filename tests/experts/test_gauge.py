from dataclasses import replace

import numpy as np
import pytest
from closeness import assert_close
from covers import axis, over
from errors import rejects
from layers import CONTROLS, EXOTIC, GATES, TOGETHER, make_layer

from tidegate.experts.channel_gauge import channel_gauge
from tidegate.experts.gauge import gauge_report, gauge_table, random_layer
from tidegate.experts.gauge_theory import predict_gauge, why_unpredicted
from tidegate.sizes import HeadShape
from tidegate.tensors.layer_gradients import layer_backward
from tidegate.tensors.rotary import Rotary

GROUPED = {"num_heads": 4, "num_kv_heads": 2}
SHARED = {"num_heads": 2, "num_kv_heads": 1}
OPTIONS = {
    "plain": {},
    "grouped": GROUPED | {"head_dim": 3},
    "biases": {"bias": True},
    "rotary and biases": {"rotary": Rotary(base=100.0), "head_dim": 4, "bias": True},
    "partly rotary": SHARED | {"rotary": Rotary(base=50.0, fraction=0.5), "head_dim": 4, "bias": True},
    "norms": {"qk_norm": True, "bias": True},
    "everything": SHARED | {"rotary": Rotary(base=50.0, fraction=0.5), "head_dim": 4, "bias": True, "qk_norm": True},
}
EVERY_GATE = ("none", *map(str, GATES), *(spelling for spelling in TOGETHER if "+" in spelling))
READERS = tuple(spelling for spelling in EVERY_GATE if "nothing" not in spelling)
ODD = tuple(spelling for spelling in EXOTIC if "w5" not in spelling)


FEW_GATES = ("none", "g1", "g1-head", "bma", "g3", "key:value:head", "query:query", "g1+g2+g3+g4+g5")


@over(gate=axis(READERS, *FEW_GATES), options=axis(OPTIONS, "everything"))
def test_theory_and_measurement_agree_for_every_gate(gate, options):
    (row,) = gauge_table([gate], **options)
    measured, predicted = (
        {"layer": row.report.nullity, "value block": row.report.value_block_nullity},
        {"layer": row.report.predicted, "value block": row.report.predicted_value_block},
    )
    assert measured == predicted
    assert row.report.agrees


@pytest.mark.parametrize("gate", [*(gate for gate in EVERY_GATE if gate not in READERS), *CONTROLS])
def test_the_theory_is_silent_where_a_gate_is_a_control(gate):
    layer = make_layer(gate)
    assert predict_gauge(layer) is None
    reason = why_unpredicted(layer)
    assert any(words in reason for words in ("is constant", "is a placebo", "is not a factor", "adds"))


def test_odd_gates_agree_where_the_theory_speaks():
    rows = gauge_table(ODD, **OPTIONS["partly rotary"])
    spoken = [row for row in rows if row.report.predicted is not None]
    assert len(spoken) >= 4
    assert [row.gate for row in spoken if not row.report.agrees] == []
    assert all(row.report.unpredicted for row in rows if row not in spoken)


def test_the_value_block_has_eighteen_flat_directions_without_a_gate_between_and_six_with_one():
    rows = {row.gate: row.report for row in gauge_table()}
    free = ("none", "g1-head", "g3", "g4", "g5")
    assert {gate: report.value_block_nullity for gate, report in rows.items()} == {
        gate: 18 if gate in free else 6 for gate in rows
    }
    assert rows["none"].nullity == 2 * (9 + 9)
    assert rows["g1"].nullity == rows["bma"].nullity == 2 * (9 + 3)
    assert rows["g3"].nullity == rows["g4"].nullity == 2 * (3 + 9)


def test_a_rotary_embedding_leaves_the_query_and_key_two_directions_a_pair():
    shape = HeadShape.of(d_model=6, num_heads=2, head_dim=4)
    rng = np.random.default_rng(0)
    counts = {
        base: predict_gauge(random_layer("none", shape, rng, rotary=Rotary(base=base))).query_key
        for base in (50.0, 1.0)
    }
    # Pairs that turn alike may mix: 2 m² for m of them.
    assert counts == {50.0: 2 * 4, 1.0: 2 * 8}
    layer = random_layer("none", shape, rng, rotary=Rotary(base=1.0))
    assert gauge_report(layer, rng.standard_normal((12, 7, 6))).agrees


@pytest.mark.parametrize("rotary", [None, Rotary(base=50.0, fraction=0.5), Rotary(base=50.0)])
def test_norms_that_have_not_learned_yet_let_heads_turn(rotary):
    rng = np.random.default_rng(1)
    shape = HeadShape.of(d_model=6, num_heads=4, num_kv_heads=2, head_dim=4)
    layer = random_layer("none", shape, rng, qk_norm=True, rotary=rotary)
    fresh = replace(layer, q_norm=np.ones(4), k_norm=np.ones(4))
    x = rng.standard_normal((20, 7, 6))
    turns = {None: 6, 0.5: 1 + 1, 1.0: 2}[None if rotary is None else rotary.fraction]
    report = gauge_report(fresh, x)
    assert report.nullity == gauge_report(layer, x).nullity + 2 * turns
    assert report.agrees


@pytest.mark.parametrize("gate", ["none", "bma", "query:input:head", "key:value:head", "output:query:shared-group"])
def test_only_the_epsilon_of_the_norms_determines_sizes_of_queries_and_keys(gate):
    rng = np.random.default_rng(1)
    shape = HeadShape.of(d_model=6, num_heads=4, num_kv_heads=2, head_dim=4)
    layer = random_layer(gate, shape, rng, qk_norm=True, bias=True)
    x = rng.standard_normal((20, 7, 6))
    report = gauge_report(replace(layer, norm_epsilon=1e-300), x)
    prediction = predict_gauge(layer)
    assert prediction.soft > 0
    assert report.nullity == prediction.nullity + prediction.soft


def test_the_jacobian_is_the_transpose_of_the_backward_pass():
    from tidegate.experts.torch_adapter import layer_jacobian

    layer = make_layer("g1+bma", full=True)
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 5, 6))
    jacobian = layer_jacobian(layer, x, {name: np.arange(array.size) for name, array in layer.parameters().items()})
    direction = rng.standard_normal(x.shape)
    backward = layer_backward(layer, x, direction)
    for name, columns in jacobian.items():
        np.testing.assert_allclose(direction.ravel() @ columns, backward[name].ravel(), atol=1e-10)


def with_sides(layer, inward, outward):
    """The layer with W_V M and N W_O, and all else as it is; M and N for each head."""
    return replace(layer, W_V=layer.W_V @ inward, W_O=outward @ layer.W_O)


def test_a_constant_gate_lets_the_output_projection_undo_any_mixture_and_a_gate_that_moves_does_not():
    """M G N = G with N = G⁻¹ M⁻¹ G, for gates G that differ from channel to channel but not from token to token."""
    rng = np.random.default_rng(0)
    shape = HeadShape.of(d_model=6, num_heads=2)
    x, M = rng.standard_normal((3, 5, 6)), rng.standard_normal((2, 3, 3))
    constant = random_layer("output:nothing", shape, rng)
    G = 1 / (1 + np.exp(-constant.gate_parameters["output"]["bias"]))[:, :, None]
    N = np.linalg.inv(M) * np.swapaxes(G, 1, 2) / G
    assert np.ptp(G) > 0.1
    assert_close(with_sides(constant, M, N)(x), constant(x))
    moving = random_layer("g1", shape, rng)
    for outward in (np.linalg.inv(M), N):
        assert np.abs(with_sides(moving, M, outward)(x) - moving(x)).max() > 0.1


def test_two_channels_mix_if_the_ratio_of_their_gates_is_the_same_for_every_token():
    """Constants k_c times a gate: k_0 γ(x), k_1 γ(x) and, for the third channel, k_2 γ'(x)."""
    rng = np.random.default_rng(1)
    shape, x = HeadShape.of(d_model=6, num_heads=2), rng.standard_normal((3, 8, 6))
    layer = random_layer("value:nothing+g1", shape, rng)
    assert channel_gauge(layer, x).free == (3, 3)
    weight = layer.gate_parameters["output"]["weight"].copy()
    weight[:, :, 1] = weight[:, :, 0]
    in_ratio = replace(layer, gate_parameters={**layer.gate_parameters, "output": {"weight": weight}})
    assert np.ptp(in_ratio.gate_parameters["value"]["bias"], axis=-1).min() > 0.1
    assert channel_gauge(in_ratio, x).free == (2**2 + 1,) * 2
    assert channel_gauge(random_layer("value:nothing+g1-head", shape, rng), x).free == (9, 9)


def test_gates_that_nearly_coincide_leave_no_clear_gap():
    layer = make_layer("g1")
    near = 1e-11 * np.random.default_rng(0).standard_normal((4, 6, 4)) * np.logspace(-2, 2, 4)
    gates = {"output": {"weight": layer.gate_parameters["output"]["weight"][:, :, :1] + near}}
    with pytest.warns(UserWarning, match="no clear gap"):
        report = gauge_report(
            replace(layer, gate_parameters=gates), np.random.default_rng(1).standard_normal((20, 5, 6))
        )
    assert report.singular_gap < 100


def test_a_layer_that_the_theory_does_not_cover_says_why():
    layer = make_layer("none", metric_diagonal=np.ones((4, 4)))
    report = gauge_report(layer, np.random.default_rng(0).standard_normal((20, 5, 6)))
    assert report.predicted is None
    assert not report.agrees
    assert "metric" in report.unpredicted == why_unpredicted(layer)


def test_too_few_outputs_are_rejected():
    with rejects("x", hint="sequences"):
        gauge_report(make_layer("none"), np.ones((1, 5, 6)))
