"""What holds for every gate on a JAX layer: a new gate is a new row of the table."""

from dataclasses import asdict, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from jax_layers import every_combination, every_precision, make, quick_jit, sample, side_by_side
from layers import GATES
from torch_layers import OPTIONS, every_gate

from tidegate import Gate, Gates, HeadShape
from tidegate.flax import AttentionConfig, attention, attention_arrays, init_attention
from tidegate.flax.gate import GateReads, gate_values, init_gate

T = 4
PAIRS = sorted({f"{gate.site}:{gate.reads}" for gate in GATES})


@cache
def reach(gate):
    """(B, T, B, T): the largest derivative of any output at one position by any input at another.

    The layer is causal, with every option and a window of 3.
    """
    layer = make(gate, **OPTIONS["everything"])
    return abs(quick_jit(jax.jacrev(layer))(sample(2, T, 24))).max(axis=(2, 5))


@every_gate
def test_no_output_depends_on_a_later_input_nor_on_one_before_the_window(gate):
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = (distance >= 0) & (distance < 3)
    for row in range(2):
        assert ((reach(gate)[row, :, row] > 0) == seen).all()


@every_gate
def test_rows_of_a_batch_do_not_see_each_other(gate):
    assert (reach(gate)[0, :, 1] == 0).all()
    assert (reach(gate)[1, :, 0] == 0).all()


@every_combination
def test_without_a_mask_or_positions_the_order_does_not_matter(gate):
    layer, x = make(gate, causal=False, num_kv_heads=2), sample(2, 6, 24)
    order, run = np.array([3, 0, 5, 1, 4, 2]), quick_jit(layer)
    assert_close(run(x[:, order]), run(x)[:, order])


@every_combination
def test_a_single_position_is_no_special_case(gate):
    layer, x = make(gate, num_kv_heads=2, bias=True, dtype=jnp.float32), sample(2, 1, 24, dtype=jnp.float32)
    arrays = attention_arrays(layer.params, layer.config)
    plain = arrays.with_parameters({name: np.asarray(array) for name, array in arrays.parameters().items()})
    assert_close(quick_jit(layer)(x), plain(x))


def seen_by_the_kernel(monkeypatch, layer, x):
    """The layer's output, and what it attends with; operation by operation, so that equal is equal in every bit."""
    seen, attend = {}, attention.attend

    def spy(q_BTHD, k_BSGD, v_BSGD, **options):
        seen.update(query=np.asarray(q_BTHD), key=np.asarray(k_BSGD), options=options)
        return attend(q_BTHD, k_BSGD, v_BSGD, **options)

    with monkeypatch.context() as patched:
        patched.setattr(attention, "attend", spy)
        return np.asarray(layer(x)), seen


@pytest.mark.parametrize("gate", side_by_side(gate for gate in GATES if gate.site in ("value", "output", "dense")))
def test_gates_after_the_scores_leave_the_weights_alone(gate, monkeypatch):
    layer, x = make(gate, num_kv_heads=2, rope=True, dtype=jnp.float32), sample(2, T, 24, dtype=jnp.float32)
    y, gated = seen_by_the_kernel(monkeypatch, layer, x)
    plain_y, plain = seen_by_the_kernel(monkeypatch, layer.ungated(), x)
    assert np.array_equal(gated["query"], plain["query"])
    assert np.array_equal(gated["key"], plain["key"])
    assert gated["options"] == plain["options"]
    assert abs(y - plain_y).max() > 1e-3


@pytest.mark.parametrize("gate", [str(gate) for gate in GATES if gate.site in ("query", "key")][:2])
def test_gates_before_the_scores_do_not(gate, monkeypatch):
    layer, x = make(gate, num_kv_heads=2, rope=True, dtype=jnp.float32), sample(2, T, 24, dtype=jnp.float32)
    site = layer.config.gates[0].site
    _, gated = seen_by_the_kernel(monkeypatch, layer, x)
    _, plain = seen_by_the_kernel(monkeypatch, layer.ungated(), x)
    assert abs(gated[site] - plain[site]).max() > 1e-3


def with_gates_at_zero(plain, gate):
    """The layer with gates whose matrices are zero."""
    config = replace(plain.config, gate=gate)
    dtype, sizes = plain.params["q_proj"]["kernel"].dtype, asdict(config.shape)
    zeros = {
        g.site: {name: np.zeros(shape, dtype) for name, shape in g.parameter_shapes(**sizes).items()}
        for g in config.gates
    }
    return replace(plain, params={**plain.params, "attn_gate": zeros}, config=config)


@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
@pytest.mark.parametrize("gate", side_by_side(f"{pair}:twosigmoid" for pair in PAIRS))
def test_gates_that_are_one_at_zero_change_no_bit_at_the_start(gate, activation):
    plain, x = make(num_kv_heads=2, rope=True, dtype=jnp.float32), sample(2, T, 24, dtype=jnp.float32)
    centred = [replace(one, activation=activation) for one in Gates.parse(gate)]
    assert np.array_equal(with_gates_at_zero(plain, centred)(x), plain(x))


@every_precision
@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
def test_gates_that_are_one_at_zero_change_no_bit_at_the_start_in_any_dtype(activation, dtype):
    plain, x = make(num_kv_heads=2, rope=True, dtype=dtype), sample(2, T, 24, dtype=dtype)
    centred = [replace(one, activation=activation) for one in Gates.parse("g1+g2+g3+g4+g5")]
    assert np.array_equal(with_gates_at_zero(plain, centred)(x), plain(x))


@pytest.mark.parametrize("gate", side_by_side(f"{pair}:twosigmoid:s0:r2" for pair in PAIRS))
def test_low_rank_gates_that_start_at_zero_still_learn(gate):
    layer, x = make(gate, num_kv_heads=2), sample(2, T, 24)
    for site in layer.params["attn_gate"]:
        layer.params["attn_gate"][site]["weight_up"] *= 0

    def value(params):
        return (layer.under(params)(x) ** 2).sum()

    y, slopes = quick_jit(jax.value_and_grad(value))(layer.params)
    assert_close(y, quick_jit(lambda: (layer.ungated()(x) ** 2).sum())())
    assert all((slopes["attn_gate"][site]["weight_up"] != 0).all() for site in slopes["attn_gate"])


LARGE = HeadShape(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16)
READS = GateReads(
    input=sample(2, 63, 64, seed=1, dtype=np.float32),
    context=sample(2, 63, 64, seed=1, dtype=np.float32),
    query=sample(2, 63, 4, 16, seed=2, dtype=np.float32),
    value=sample(2, 63, 2, 16, seed=3, dtype=np.float32),
    output=sample(2, 63, 4, 16, seed=4, dtype=np.float32),
)


@every_gate
def test_gates_start_near_one_half_and_stay_between_zero_and_one(gate):
    gate = Gate.parse(gate)

    def started_and_huge(key):
        drawn = init_gate(key, gate, LARGE)
        return [gate_values(gate, READS, {"weight": size * drawn["weight"]}) for size in (1, 1e30)]

    started, huge = quick_jit(started_and_huge)(jax.random.key(0))
    widths = {
        "input": 64,
        "query": 32 if gate.on_source else 16,
        "value": 16,
        "output": 64 if gate.site == "dense" else 16,
    }
    reads = getattr(READS, gate.reads).reshape(2, 63, -1, widths[gate.reads])
    # A logit has deviation 0.02 |r|, and sigmoid's slope is at most 1/4.
    six_deviations = 6 * 0.02 * np.linalg.norm(reads, axis=-1).max() / 4
    assert six_deviations < 1 / 2
    assert 0 < abs(started - 0.5).max() < six_deviations
    assert huge.min() == 0
    assert huge.max() == 1


@every_gate
def test_a_gate_adds_the_parameters_that_the_vocabulary_counts(gate):
    sizes = {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 5}
    config = AttentionConfig(**sizes, gate=gate)
    params = jax.eval_shape(lambda key: init_attention(key, config), jax.random.key(0))
    added = sum(array.size for array in jax.tree.leaves(params["attn_gate"]))
    assert added == Gates.parse(gate).num_parameters(**sizes)
