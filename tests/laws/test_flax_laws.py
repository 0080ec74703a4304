"""What holds for every gate on a JAX layer: a new gate is a new row of the table."""

from dataclasses import asdict, replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from closeness import assert_close
from covers import axis, over
from jax_layers import COMBINED, GROUPED, every_combination, make, quick_jit, sample, side_by_side
from layers import GATES, TOGETHER, WITH_MATRICES
from torch_layers import OPTIONS, every_gate

from tidegate import Gates, HeadShape
from tidegate.flax import AttentionConfig, attention, init_attention
from tidegate.flax.gate import GateReads, gate_values, init_gate

T = 4
every_matrix = pytest.mark.parametrize("gate", list(map(str, WITH_MATRICES)))
PAIRS = sorted({f"{gate.site}:{gate.reads}" for gate in WITH_MATRICES})


# A gate that fails in company fails the layer; alone it would cost a compilation of its own.
in_company = pytest.mark.parametrize(
    "gate",
    [
        *TOGETHER,
        *(pytest.param(gate, marks=pytest.mark.full) for gate in (*map(str, GATES), *COMBINED) if gate not in TOGETHER),
    ],
)


@cache
def windowed(gate):
    """A compiled layer with a window of 3."""
    return quick_jit(make(gate, **GROUPED, bias=True, window=3))


@cache
def reach(gate):
    """(B, T, B, T) bool: whether the output at one position changes, in any bit, with the input at another."""
    x = sample(2, T, 24)
    changed = np.zeros((2, T, 2, T), bool)
    for row, t in np.ndindex(2, T):
        moved = x.copy()
        moved[row, t] += sample(24, seed=1)
        changed[:, :, row, t] = (windowed(gate)(moved) != windowed(gate)(x)).any(axis=-1)
    return changed


@in_company
def test_no_output_depends_on_a_later_input_nor_on_one_before_the_window(gate):
    distance = np.arange(T)[:, None] - np.arange(T)
    seen = (distance >= 0) & (distance < 3)
    for row in range(2):
        assert (reach(gate)[row, :, row] == seen).all()


@in_company
def test_rows_of_a_batch_do_not_see_each_other(gate):
    assert not reach(gate)[0, :, 1].any()
    assert not reach(gate)[1, :, 0].any()


@every_combination
def test_without_a_mask_or_positions_the_order_does_not_matter(gate):
    layer, x = make(gate, causal=False, num_kv_heads=2), sample(2, 6, 24)
    order, run = np.array([3, 0, 5, 1, 4, 2]), quick_jit(layer)
    assert_close(run(x[:, order]), run(x)[:, order])


@in_company
def test_a_single_position_is_no_special_case(gate):
    x = sample(2, T, 24)
    assert_close(windowed(gate)(x[:, :1]), windowed(gate)(x)[:, :1])


def seen_by_the_kernel(monkeypatch, layer, x):
    """What the layer gives and what it attends with, each with its gates and without.

    In one program, which computes once what is the same twice: equal is equal in every bit.
    """
    attend = attention.attend

    def both(x):
        seen = []

        def spy(q_BTHD, k_BSGD, v_BSGD, **options):
            seen.append((q_BTHD, k_BSGD))
            return attend(q_BTHD, k_BSGD, v_BSGD, **options)

        with monkeypatch.context() as patched:
            patched.setattr(attention, "attend", spy)
            outputs = layer(x), layer.ungated()(x)
        return outputs, *zip(*seen, strict=True)

    return quick_jit(both)(x)


@pytest.mark.parametrize("gate", side_by_side(gate for gate in GATES if gate.site in ("value", "output", "dense")))
def test_gates_after_the_scores_leave_the_weights_alone(gate, monkeypatch):
    layer, x = make(gate, **OPTIONS["everything"]), sample(2, T, 24)
    outputs, queries, keys = seen_by_the_kernel(monkeypatch, layer, x)
    assert np.array_equal(*queries)
    assert np.array_equal(*keys)
    assert abs(outputs[0] - outputs[1]).max() > 1e-3


@pytest.mark.parametrize(("gate", "site"), [("g3", "key"), ("g4", "query")])
def test_gates_before_the_scores_move_the_weights(gate, site, monkeypatch):
    _, queries, keys = seen_by_the_kernel(monkeypatch, make(gate, **OPTIONS["everything"]), sample(2, T, 24))
    moved = {name: abs(gated - plain).max() > 1e-3 for name, (gated, plain) in {"query": queries, "key": keys}.items()}
    assert moved == {"query": site == "query", "key": site == "key"}


def with_gates_at_zero(plain, gate):
    """The layer with gates whose matrices are zero."""
    config = replace(plain.config, gate=gate)
    dtype, sizes = plain.params["q_proj"]["kernel"].dtype, asdict(config.shape)
    zeros = {
        g.path: {name: np.zeros(shape, dtype) for name, shape in g.parameter_shapes(**sizes).items()}
        for g in config.gates
    }
    return replace(plain, params={**plain.params, "attn_gate": zeros}, config=config)


@over(gate=axis(side_by_side(f"{pair}:twosigmoid" for pair in PAIRS)), activation=axis(["twosigmoid", "tanh1"]))
def test_gates_that_are_one_at_zero_change_no_bit_at_the_start(gate, activation):
    plain, x = make(num_kv_heads=2, rope=True, dtype=jnp.float32), sample(2, T, 24, dtype=jnp.float32)
    centred = [replace(one, activation=activation) for one in Gates.parse(gate)]
    assert np.array_equal(with_gates_at_zero(plain, centred)(x), plain(x))


@pytest.mark.parametrize("activation", ["twosigmoid", "tanh1"])
def test_gates_that_are_one_at_zero_change_no_bit_at_the_start_in_half_precision(activation):
    plain, x = make(num_kv_heads=2, rope=True, dtype=jnp.bfloat16), sample(2, T, 24, dtype=jnp.bfloat16)
    centred = [replace(one, activation=activation) for one in Gates.parse("g1+g2+g3+g4+g5")]
    assert np.array_equal(with_gates_at_zero(plain, centred)(x), plain(x))


@pytest.mark.parametrize("gate", side_by_side(f"{pair}:twosigmoid:s0:r2" for pair in PAIRS))
def test_low_rank_gates_that_start_at_zero_still_learn(gate):
    layer, x = make(gate, num_kv_heads=2), sample(2, T, 24)
    for site in layer.params["attn_gate"]:
        layer.params["attn_gate"][site]["weight_up"] *= 0

    slopes = quick_jit(jax.grad(lambda params: (layer.under(params)(x) ** 2).sum()))(layer.params)
    assert all((slopes["attn_gate"][site]["weight_up"] != 0).all() for site in slopes["attn_gate"])


LARGE = HeadShape(d_model=64, num_heads=4, num_kv_heads=2, head_dim=16)
READS = GateReads(
    input=sample(2, 63, 64, seed=1, dtype=np.float32),
    context=sample(2, 63, 64, seed=1, dtype=np.float32),
    query=sample(2, 63, 4, 16, seed=2, dtype=np.float32),
    value=sample(2, 63, 2, 16, seed=3, dtype=np.float32),
    output=sample(2, 63, 4, 16, seed=4, dtype=np.float32),
)


@cache
def values():
    """The values of every gate as it starts, and with a matrix 1e30 times as large."""

    def compute(key):
        drawn = {str(gate): init_gate(key, gate, LARGE)["weight"] for gate in WITH_MATRICES}

        def of_size(size):
            return {str(gate): gate_values(gate, READS, {"weight": size * drawn[str(gate)]}) for gate in WITH_MATRICES}

        return jax.vmap(of_size)(np.asarray([1, 1e30], np.float32))

    return quick_jit(compute)(jax.random.key(0))


@every_matrix
def test_gates_start_near_one_half(gate):
    started, (own,) = values()[gate][0], Gates.parse(gate)
    widths = {"input": 64, "query": 32 if own.on_source else 16, "output": 64 if own.site == "dense" else 16}
    reads = getattr(READS, own.reads).reshape(2, 63, -1, widths.get(own.reads, 16))
    # A logit has deviation 0.02 |r|, and sigmoid's slope is at most 1/4.
    six_deviations = 6 * 0.02 * np.linalg.norm(reads, axis=-1).max() / 4
    assert six_deviations < 1 / 2
    assert 0 < abs(started - 0.5).max() < six_deviations


@every_matrix
def test_sigmoid_gates_lie_between_zero_and_one_however_large_the_logits(gate):
    huge = values()[gate][1]
    assert huge.min() == 0
    assert huge.max() == 1


@every_gate
def test_a_gate_adds_the_parameters_that_the_vocabulary_counts(gate):
    sizes = {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 5}
    config = AttentionConfig(**sizes, gate=gate)
    params = jax.eval_shape(lambda key: init_attention(key, config), jax.random.key(0))
    added = sum(array.size for array in jax.tree.leaves(params["attn_gate"]))
    assert added == Gates.parse(gate).num_parameters(**sizes)
