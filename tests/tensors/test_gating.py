import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from closeness import assert_close, naming, to_numpy
from errors import rejects
from layers import EXOTIC, GATES, gate_parameters
from libraries import JAX_JIT
from slow import slow_gate

from tidegate import Gate
from tidegate.tensors.attention import scaled_dot_product_attention
from tidegate.tensors.gating import (
    GateSources,
    apply_gate,
    bilinearly_modulated_attention,
    gate_logits,
    gate_reads,
    gate_values,
    init_gate_parameters,
    naive_query_modulated_attention,
)

ALL = (*GATES, *map(Gate.parse, EXOTIC))
B, H, G, T, S, h, d = 2, 4, 2, 3, 5, 4, 6
FEW = tuple(map(Gate.parse, ("bma", "g1-head", "output:value", EXOTIC[0], "dense:output:r3:b1", "sink")))


def sample(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def heads_at(gate):
    return 1 if gate.site == "dense" else G if gate.site in ("key", "value") else H


def raw(*, cross=False):
    """Everything that a gate may read, for a batch."""
    return {
        "input": sample(B, T, d, seed=1),
        "context": sample(B, S, d, seed=2) if cross else None,
        "query": sample(B, H, T, h, seed=3),
        "value": sample(B, G, S if cross else T, h, seed=4),
        "output": sample(B, H, T, h, seed=5),
        "partition": sample(B, H, T, seed=8),
    }


def case(gate, *, cross=False):
    positions = S if cross and gate.site in ("key", "value") else T
    target = (
        sample(B, positions, d, seed=6) if gate.site == "dense" else sample(B, heads_at(gate), positions, h, seed=6)
    )
    return target, raw(cross=cross), gate_parameters([gate], np.random.default_rng(7))[gate.path]


def call_all(library, dtype):
    """What each of a few gates gives, in one call, which JAX compiles once; and what it should give."""
    cases = [case(gate) for gate in FEW]
    parts = [jax.tree.map(lambda array: array.astype(dtype), case) for case in cases]
    flat, tree = jax.tree.flatten(parts)

    def function(*arrays):
        return [
            apply_gate(gate, target, GateSources(**sources), parameters)
            for gate, (target, sources, parameters) in zip(FEW, jax.tree.unflatten(tree, arrays), strict=True)
        ]

    wanted = [expected(gate, *case) for gate, case in zip(FEW, cases, strict=True)]
    return list(zip(FEW, library.call(function, *flat), wanted, strict=True))


def expected(gate, target, sources, parameters):
    each = [{name: None if a is None else a[b] for name, a in sources.items()} for b in range(B)]
    return np.stack([slow_gate(gate, target[b], parameters, **each[b]) for b in range(B)])


@pytest.mark.parametrize("gate", ALL, ids=str)
def test_a_gate_is_what_plain_loops_say(gate):
    target, sources, parameters = case(gate)
    assert_close(
        apply_gate(gate, target, GateSources(**sources), parameters), expected(gate, target, sources, parameters)
    )


@pytest.mark.parametrize("gate", [gate for gate in ALL if not gate.needs_self_attention], ids=str)
def test_a_gate_in_cross_attention_is_what_plain_loops_say(gate):
    target, sources, parameters = case(gate, cross=True)
    assert_close(
        apply_gate(gate, target, GateSources(**sources), parameters), expected(gate, target, sources, parameters)
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_gate_keeps_the_kind_and_dtype_of_its_target(library, dtype):
    for gate, gated, wanted in call_all(library, dtype):
        with naming(gate):
            assert isinstance(gated, library.kind)
            assert to_numpy(gated).dtype == dtype
            assert_close(gated, wanted)


def test_no_two_sizes_need_be_equal():
    gate, target, x = Gate.parse("output:input:b1"), sample(2, 5, 3, 7), sample(2, 3, 4)
    parameters = {"weight": sample(5, 4, 7), "bias": sample(5, 7)}
    gated = apply_gate(gate, target, GateSources(input=x), parameters)
    for b in range(2):
        assert_close(gated[b], slow_gate(gate, target[b], parameters, input=x[b]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_computes_logits_in_float32(dtype):
    gate = Gate.parse("dense:input:b0")
    # 2048 ones and one more: a sum that half precision cannot hold.
    reads, weight = torch.ones(1, 1, 2049, dtype=dtype), torch.ones(1, 2049, 1, dtype=dtype)
    logits = gate_logits(gate, reads, {"weight": weight, "bias": torch.zeros(1, 1, dtype=dtype)}, num_heads=1)
    assert logits.dtype == torch.float32
    assert logits.item() == 2049
    values = gate_values(gate, reads, {"weight": weight, "bias": torch.zeros(1, 1, dtype=dtype)}, num_heads=1)
    assert values.dtype == torch.float32


def test_a_half_precision_target_stays_one():
    for gate, gated, wanted in call_all(JAX_JIT, jnp.bfloat16):
        with naming(gate):
            assert gated.dtype == jnp.bfloat16
            assert abs(np.asarray(gated, np.float64) - wanted).max() < 0.2


class TestReads:
    @pytest.mark.parametrize("gate", [gate for gate in GATES if gate.needs_self_attention], ids=str)
    def test_cross_attention_is_rejected_where_it_makes_no_sense(self, gate):
        with rejects("gate", hint="Use a gate such as 'bma-query' or 'g1'"):
            gate_reads(gate, GateSources(**raw(cross=True)))

    @pytest.mark.parametrize(
        ("gate", "missing"),
        [("g1", "input"), ("bma", "query"), ("bma", "value"), ("output:value", "query"), ("dense:output", "output")],
    )
    def test_a_source_that_is_not_there_is_named(self, gate, missing):
        sources = raw() | {missing: None}
        with rejects(f"GateSources.{missing}"):
            gate_reads(Gate.parse(gate), GateSources(**sources))


def weight(*shape):
    return np.ones(shape)


BAD = {
    "a missing parameter": ("g1", {}, "parameters"),
    "a whole matrix for a rank": ("output:input:r2:b1", {"weight": weight(H, d, h)}, "parameters"),
    "a weight of another read width": ("g1", {"weight": weight(H, d + 1, h)}, "weight"),
    "factors of different ranks": (
        "output:input:r2",
        {"weight_down": weight(H, d, 2), "weight_up": weight(H, 3, h)},
        "weight_up",
    ),
    "one matrix for heads that do not share": ("g1", {"weight": weight(1, d, h)}, "weight"),
    "groups that do not divide the heads": ("output:input:shared-group", {"weight": weight(3, d, h)}, "weight"),
    "a bias without heads": ("output:input:b1", {"weight": weight(H, d, h), "bias": weight(h)}, "bias"),
    "a bias of another width": ("output:input:b1", {"weight": weight(H, d, h), "bias": weight(H, 1)}, "bias"),
    "features where there should be one number for each head": ("g1-head", {"weight": weight(H, d, h)}, "parameters"),
}


@pytest.mark.parametrize(("gate", "parameters", "field"), BAD.values(), ids=BAD)
def test_parameters_that_do_not_fit_are_rejected(gate, parameters, field):
    with rejects(field):
        apply_gate(Gate.parse(gate), sample(B, H, T, h), GateSources(**raw()), parameters)


@pytest.mark.parametrize(("gate", "shape"), [("g1", (B, H, T + 1, h)), ("g1", (T, h)), ("g5", (d,))])
def test_a_target_that_does_not_fit_is_rejected(gate, shape):
    gate = Gate.parse(gate)
    parameters = gate_parameters([gate], np.random.default_rng(0))[gate.path]
    with rejects("target"):
        apply_gate(gate, sample(*shape), GateSources(**raw()), parameters)


class TestStart:
    SIZES = {"d_model": 40, "num_heads": 8, "num_kv_heads": 4, "head_dim": 10}  # noqa: RUF012

    @pytest.mark.parametrize("init_std", [0.02, 0.5])
    def test_the_matrix_has_the_deviation_and_the_bias_its_value(self, init_std):
        gate = Gate(init_std=init_std, bias=-1.5)
        parameters = init_gate_parameters(np.random.default_rng(0), gate, **self.SIZES)
        assert abs(parameters["weight"].std() / init_std - 1) < 0.05
        assert abs(parameters["weight"].mean()) < init_std * 0.1
        assert (parameters["bias"] == -1.5).all()

    @pytest.mark.parametrize("rank", [1, 4, 16])
    def test_the_product_of_two_factors_has_the_deviation(self, rank):
        parameters = init_gate_parameters(np.random.default_rng(0), Gate(rank=rank, init_std=0.1), **self.SIZES)
        assert abs(parameters["weight_down"].std() * rank**0.5 - 1) < 0.15
        assert abs(parameters["weight_up"].std() / 0.1 - 1) < 0.25
        assert abs((parameters["weight_down"] @ parameters["weight_up"]).std() / 0.1 - 1) < 0.25

    @pytest.mark.parametrize(
        ("key", "kind"),
        [
            (lambda: np.random.default_rng(3), np.ndarray),
            (lambda: torch.Generator().manual_seed(3), torch.Tensor),
            (lambda: jax.random.key(3), jax.Array),
        ],
        ids=["numpy", "torch", "jax"],
    )
    def test_parameters_are_of_the_keys_kind_and_repeat_with_it(self, key, kind):
        gate = Gate(rank=3, bias=2.0)
        first, again = (init_gate_parameters(key(), gate, **self.SIZES) for _ in range(2))
        for name, array in first.items():
            assert isinstance(array, kind)
            assert (to_numpy(array) == to_numpy(again[name])).all()
        down, up = to_numpy(first["weight_down"]).ravel(), to_numpy(first["weight_up"]).ravel()
        assert not set(down.tolist()) & set((up / 0.02 * 3**-0.5).tolist())


class TestBilinearlyModulatedAttention:
    Q, K, V, W = sample(B, H, T, h), sample(B, H, T, h, seed=1), sample(B, H, T, 5, seed=2), sample(H, h, 5, seed=3)
    MASK = np.array([[True, False, False], [False, False, False], [True, True, True]])

    @staticmethod
    def slow(Q, K, V, W_g, index, mask):
        gate = 1 / (1 + np.exp(-(Q @ W_g)))
        out = np.zeros((len(Q), V.shape[-1]))
        for i in range(len(Q)):
            seen = [j for j in range(len(K)) if mask is None or mask[i, j]]
            factors = [np.exp(Q[i] @ K[j] / np.sqrt(Q.shape[-1])) for j in seen]
            for factor, j in zip(factors, seen, strict=True):
                out[i] += factor / sum(factors) * (gate[j] if index == "source" else gate[i]) * V[j]
        return out

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_both_readings_are_their_sums(self, library, dtype):
        rows = [(index, mask) for index in ("source", "query") for mask in (None, self.MASK)]

        def all_of_them(*arrays):
            return [bilinearly_modulated_attention(*arrays, index=index, mask=mask) for index, mask in rows]

        arrays = [array.astype(dtype) for array in (self.Q, self.K, self.V, self.W)]
        for (index, mask), output in zip(rows, library.call(all_of_them, *arrays), strict=True):
            with naming((index, mask)):
                assert isinstance(output, library.kind)
                assert to_numpy(output).dtype == dtype
                for b, n in np.ndindex(B, H):
                    slow = self.slow(self.Q[b, n], self.K[b, n], self.V[b, n], self.W[n], index, mask)
                    assert_close(to_numpy(output)[b, n], slow)
                if mask is not None:
                    assert (to_numpy(output)[..., 1, :] == 0).all()

    def test_the_naive_form_equals_the_factored_one(self, library):
        arrays = (self.Q, self.K, self.V, self.W)

        def both(*arrays):
            return [naive_query_modulated_attention(*arrays, mask=mask) for mask in (None, self.MASK)]

        for mask, naive in zip((None, self.MASK), library.call(both, *arrays), strict=True):
            assert isinstance(naive, library.kind)
            assert_close(naive, bilinearly_modulated_attention(*arrays, index="query", mask=mask))
        cross = (self.Q, sample(B, H, S, h), sample(B, H, S, 5), self.W)
        assert_close(naive_query_modulated_attention(*cross), bilinearly_modulated_attention(*cross, index="query"))

    @pytest.mark.parametrize("index", ["source", "query"])
    def test_a_zero_matrix_halves_attention_and_the_output_is_linear_in_the_values(self, index):
        gated = bilinearly_modulated_attention(self.Q, self.K, self.V, self.W * 0, index=index, mask=self.MASK)
        assert_close(gated, scaled_dot_product_attention(self.Q, self.K, self.V, self.MASK) / 2)
        other = sample(B, H, T, 5, seed=9)

        def attend(V):
            return bilinearly_modulated_attention(self.Q, self.K, V, self.W, index=index)

        assert_close(attend(2 * self.V - 3 * other), 2 * attend(self.V) - 3 * attend(other))

    def test_the_index_is_source_or_query(self):
        with rejects("index"):
            bilinearly_modulated_attention(self.Q, self.K, self.V, self.W, index="target")

    def test_half_precision_keeps_its_dtype_and_takes_logits_in_float32(self):
        # Near -6 half precision has steps of 1/256: it would round the second entry away.
        Q, V = torch.ones(1, 2, dtype=torch.float16), torch.ones(1, 1, dtype=torch.float16)
        W_g = torch.tensor([[-6.0], [0.0019]], dtype=torch.float16)
        wanted = torch.sigmoid(W_g.double().sum()).half()
        assert wanted != torch.sigmoid(W_g.sum().double()).half()
        for index in ("source", "query"):
            output = bilinearly_modulated_attention(Q, Q, V, W_g, index=index)
            assert output.dtype == torch.float16
            assert output.item() == wanted.item()
