import jax
import numpy as np
import pytest
import torch
from closeness import assert_close, to_numpy
from covers import axis, over
from errors import rejects
from layers import EXOTIC, GATES, TOGETHER, make_layer
from slow import slow_layer

from tidegate import Gates
from tidegate.tensors.layer import AttentionArrays, rms_norm
from tidegate.tensors.rotary import Rotary

B, H, T, S, h, d = 2, 4, 5, 7, 4, 6


def sample(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


X, CONTEXT = sample(B, T, d), sample(B, S, d, seed=1)
MASK = sample(B, H, T, T, seed=2) > 0
MASK[0, :, 2] = False


def assert_is_slow(layer, x=X, *, context=None, mask=None, positions=None, library=None):
    """The layer equals the one in plain loops, sequence by sequence."""
    kept = {"context": context, "mask": mask, "positions": positions}

    def run(x, **options):
        trace = layer.trace(x, **options)
        return trace.output, trace.weights

    output, weights = run(x, **kept) if library is None else library.call(run, x, **kept)
    if library is not None:
        assert isinstance(output, library.kind)
    scores = (B, H, T, x.shape[1] if context is None else context.shape[1])
    for b in range(B):
        own = {
            "context": None if context is None else context[b],
            "mask": None if mask is None else np.broadcast_to(mask, scores)[b],
            "positions": None if positions is None else np.broadcast_to(positions, (B, T))[b],
        }
        y, A = slow_layer(layer, x[b], **own)
        assert_close(to_numpy(output)[b], y)
        assert_close(to_numpy(weights)[b], A)


LAYERS = {
    "plain": {},
    "grouped heads": {"G": 2},
    "ungrouped heads": {"G": 4},
    "one key head": {"G": 1},
    "rotary": {"rotary": Rotary(base=30.0)},
    "part of it turns": {"rotary": Rotary(base=30.0, fraction=0.5, scale=3.0, offset=2)},
    "query norm": {"q_norm": sample(h, seed=5)},
    "key norm": {"k_norm": sample(h, seed=6)},
    "both norms, large epsilon": {"q_norm": sample(h, seed=5), "k_norm": sample(h, seed=6), "norm_epsilon": 0.5},
    "diagonal metric": {"metric_diagonal": sample(H, h, seed=7)},
    "learned metric": {"metric_factor": sample(H, 3, h, seed=8)},
    "cold": {"temperature": 0.3},
    "no causality": {"causal": False},
    "window": {"window": 3},
    "window to both sides": {"window": 2, "causal": False},
    "window of one, to both sides": {"window": 1, "causal": False},
    "biases": {
        "b_Q": sample(H, h, seed=9),
        "b_K": sample(2, h, seed=10),
        "b_V": sample(2, h, seed=11),
        "b_O": sample(d, seed=12),
    },
    "everything": {"full": True},
    "everything, both sides": {"full": True, "causal": False, "window": 3},
}


class TestForward:
    @pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
    @pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
    def test_a_layer_is_what_plain_loops_say(self, options, mask):
        assert_is_slow(make_layer(**options), mask=mask)

    @pytest.mark.parametrize("gates", [*map(str, GATES), *EXOTIC, *TOGETHER, "bma+dense:output+query:query+g3+g1-head"])
    def test_a_gated_layer_is_what_plain_loops_say(self, gates):
        assert_is_slow(make_layer(gates, full=True))

    def test_a_layer_is_the_same_on_every_library(self, library):
        assert_is_slow(make_layer("bma+g1", full=True), mask=MASK, library=library)

    @pytest.mark.parametrize(
        "gates", ["none", "g1+g2", "g3+g4+g5", "bma-query+vga", "output:output+key:value+query:query"]
    )
    def test_cross_attention_is_what_plain_loops_say(self, gates):
        layer = make_layer(gates, full=True, causal=False)
        mask = sample(B, 1, T, S, seed=3) > 0
        mask[1, 0, 0] = False
        assert_is_slow(layer, context=CONTEXT)
        assert_is_slow(layer, context=CONTEXT, mask=mask, positions=np.arange(T) + 3)

    @pytest.mark.parametrize(
        "positions", [np.arange(T) + 10, np.array([3, 1, 4, 1, 5]), np.arange(B * T).reshape(B, T)]
    )
    def test_positions_are_the_callers(self, library, positions):
        assert_is_slow(make_layer(full=True), positions=positions, library=library)

    @pytest.mark.parametrize(
        "mask",
        [MASK[0, 0], MASK[:, :1], MASK[:1, :, :, :1], np.zeros((1, T), bool), MASK[:1]],
        ids=lambda m: str(m.shape),
    )
    def test_a_mask_broadcasts(self, mask):
        assert_is_slow(make_layer(), mask=mask)

    def test_leading_axes_are_batch_axes(self):
        layer = make_layer("bma+g1", full=True)
        whole = layer(X)
        assert_close(layer(X[0]), whole[0])
        assert_close(layer(X[:, None]), whole[:, None])

    def test_float32_stays_float32(self, library):
        layer = make_layer("bma+g1", rotary=Rotary(), q_norm=np.ones(h))
        narrow = layer.with_parameters({name: array.astype(np.float32) for name, array in layer.parameters().items()})
        output = library.call(narrow, X.astype(np.float32))
        assert to_numpy(output).dtype == np.float32
        assert abs(to_numpy(output) - layer(X)).max() < 1e-3 * abs(layer(X)).max()

    @pytest.mark.parametrize("gates", ["none", "bma+g1+g5"])
    def test_half_precision_stays_half_precision(self, gates):
        layer = make_layer(gates, full=True)
        half = layer.with_parameters(
            {name: torch.from_numpy(array).bfloat16() for name, array in layer.parameters().items()}
        )
        output = half(torch.from_numpy(X).bfloat16())
        assert output.dtype == torch.bfloat16
        assert torch.isfinite(output).all()


class TestTrace:
    def test_gates_read_raw_projections(self):
        layer = make_layer(TOGETHER[2], full=True)
        plain = make_layer(full=True)
        sources, raw = layer.trace(X).sources, plain.trace(X).sources
        assert (sources.query == np.einsum("btd,hdk->bhtk", X, layer.W_Q) + layer.b_Q[:, None]).all()
        assert (sources.value == raw.value).all()
        assert (plain.trace(X).query != raw.query).all()

    def test_the_parts_make_the_whole(self):
        layer = make_layer("g1+g2+g5", full=True)
        trace = layer.trace(X)
        output = trace.weights @ np.repeat(trace.value, 2, axis=1)
        assert_close(trace.sources.output, output)
        assert_close(trace.projected, np.einsum("bhtk,hkd->btd", trace.heads, layer.W_O) + layer.b_O)
        assert (layer(X) == trace.output).all()

    def test_all_restrictions_are_in_the_mask(self):
        trace = make_layer(window=2).trace(X, mask=MASK)
        offset = np.arange(T)[:, None] - np.arange(T)
        assert (trace.mask == (MASK & (offset >= 0) & (offset < 2))).all()
        assert (make_layer().trace(X).mask == (offset >= 0)).all()
        assert make_layer(causal=False).trace(X).mask is None
        assert (make_layer(causal=False).trace(X, mask=MASK).mask == MASK).all()


class TestEmptyRows:
    MASK = np.array([[True] * T, [False] * T, [True] * T, [True] * T, [True] * T])

    @over(gates=axis(["bma", "none", "g1", "output:output"]), bias=axis([True, False]))
    def test_a_row_that_may_see_nothing_gives_zero_and_the_output_bias(self, library, gates, bias):
        layer = make_layer(gates, b_O=sample(d, seed=4) if bias else None)
        output = to_numpy(library.call(lambda x: layer(x, mask=self.MASK), X))
        assert (output[:, 1] == (layer.b_O if bias else 0)).all()
        assert np.isfinite(output).all()
        assert (abs(output[:, [0, 2, 3, 4]]).max(-1) > 0).all()

    @pytest.mark.parametrize("gates", ["none", "bma+g1"])
    def test_an_empty_row_passes_no_gradient(self, gates):
        layer = make_layer(gates, full=True)
        x = torch.from_numpy(X).requires_grad_()
        layer(x, mask=self.MASK)[:, 1].sum().backward()
        assert (x.grad == 0).all()
        slope = jax.jit(jax.grad(lambda x: layer(x, mask=self.MASK)[:, 1].sum()))(X)
        assert (slope == 0).all()

    def test_a_layer_that_may_see_nothing_at_all_has_zero_gradient_for_every_parameter(self):
        layer = make_layer("bma")
        named = {name: torch.from_numpy(array).requires_grad_() for name, array in layer.parameters().items()}
        output = layer.with_parameters(named)(torch.from_numpy(X), mask=np.zeros((T, T), bool))
        output.sum().backward()
        assert all((array.grad == 0).all() for array in named.values())


class TestParameters:
    def test_parameters_are_named_flat(self):
        layer = make_layer("bma+output:input:r2:b1", full=True)
        assert list(layer.parameters()) == [
            *("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "q_norm", "k_norm", "metric_factor"),
            *("gate.value.weight", "gate.output.weight_down", "gate.output.weight_up", "gate.output.bias"),
        ]
        assert list(make_layer().parameters()) == ["W_Q", "W_K", "W_V", "W_O"]
        assert "metric_diagonal" in make_layer(metric_diagonal=np.ones((H, h))).parameters()
        assert layer.parameters()["gate.value.weight"] is layer.gate_parameters["value"]["weight"]

    def test_some_parameters_may_be_replaced(self):
        layer = make_layer("bma+g1", full=True)
        moved = layer.with_parameters(
            {"W_O": layer.W_O * 2, "gate.value.weight": layer.W_V[:, :1, :] * np.ones((2, 8, 4))}
        )
        assert (moved.W_O == layer.W_O * 2).all()
        assert (moved.gate_parameters["value"]["weight"] == layer.W_V[:, :1, :]).all()
        assert moved.gate_parameters["output"]["weight"] is layer.gate_parameters["output"]["weight"]
        assert moved.W_Q is layer.W_Q
        assert (moved.rotary, moved.temperature, moved.gates) == (layer.rotary, layer.temperature, layer.gates)

    def test_an_unknown_parameter_is_rejected(self):
        with rejects("parameters"):
            make_layer().with_parameters(
                {"W_X": np.ones(2), "gate.value.weight": np.ones(2), "W_Q": np.ones((H, d, h))}
            )

    def test_parameters_of_another_library_serve_numpy_inputs(self):
        layer = make_layer("bma")
        for array, kind in ((torch.from_numpy, torch.Tensor), (jax.device_put, jax.Array)):
            own = layer.with_parameters({name: array(value) for name, value in layer.parameters().items()})
            assert isinstance(own(X), kind)
            assert_close(own(X), layer(X))


ONE_GATE = {"gates": Gates.parse("bma"), "gate_parameters": {"value": {"weight": np.ones((2, 8, 4))}}}
WRONG_SHAPES = {"W_K": (2, d + 1, h), "W_O": (H, d, h), "W_Q": (d, h), "b_K": (H, h), "q_norm": (1,)}
BAD_LAYERS = [
    *[({name: np.ones(shape)}, name) for name, shape in WRONG_SHAPES.items()],
    ({"metric_factor": np.ones((2, 3, h))}, "metric_factor"),
    ({"metric_diagonal": np.ones((H, h)), "metric_factor": np.ones((H, 3, h))}, "metric_factor"),
    ({"temperature": 0.0}, "temperature"),
    ({"norm_epsilon": -1.0}, "norm_epsilon"),
    ({"causal": "no"}, "causal"),
    ({"window": 0}, "window"),
    ({"rotary": Rotary(fraction=0.25)}, "Rotary.fraction"),
    ({"gates": Gates.parse("g1+bma")}, "gate_parameters"),
    ({"gate_parameters": {"value": {}}}, "gate_parameters"),
    ({**ONE_GATE, "gate_parameters": {"value": {"weight": np.ones((4, 4, 4))}}}, "gate_parameters['value']"),
    ({**ONE_GATE, "gate_parameters": {"value": {"W": np.ones((2, 8, 4))}}}, "gate_parameters['value']"),
    ({"W_K": np.ones((3, d, h)), "W_V": np.ones((3, d, h)), **ONE_GATE}, "num_kv_heads"),
]


@pytest.mark.parametrize(("change", "field"), BAD_LAYERS)
def test_a_layer_whose_parts_do_not_fit_is_rejected(change, field):
    plain = make_layer()
    arrays = {name: getattr(plain, name) for name in ("W_Q", "W_K", "W_V", "W_O")}
    with rejects(field):
        AttentionArrays(**{**arrays, **change})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"x": sample(T, d + 1)}, "x"),
        ({"mask": np.ones((T, 3), bool)}, "mask"),
        ({"positions": np.arange(3)}, "positions"),
        ({"positions": np.ones((3, T))}, "angles"),
        ({"context": CONTEXT}, "context"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_inputs_that_do_not_fit_are_rejected(library, change, field):
    layer = make_layer(full=True)
    with rejects(field):
        library.call(lambda **inputs: layer(**inputs), **{"x": X, **change})


def test_inputs_of_wrong_types_are_rejected():
    arrays = {name: getattr(make_layer(), name) for name in ("W_Q", "W_K", "W_V", "W_O")}
    for call, name in (
        (lambda: AttentionArrays(**{**arrays, "W_Q": np.ones((H, d, h), int)}), "W_Q"),
        (lambda: make_layer()(np.ones((T, d), int)), "x"),
        (lambda: make_layer()(X.tolist()), "x"),
        (lambda: make_layer()(X, mask=np.ones((T, T))), "mask"),
        (lambda: make_layer(full=True)(X, positions=[0, 1, 2, 3, 4]), "positions"),
    ):
        with pytest.raises(TypeError, match=f"^{name} must"):
            call()


class TestCrossAttentionInputs:
    def test_a_context_that_does_not_fit_is_rejected(self):
        for options, context in (({}, sample(B, S, d + 1)), ({}, sample(3, S, d)), ({"window": 2}, CONTEXT)):
            with rejects("context"):
                make_layer(causal=False, **options)(X, context=context)

    def test_a_gate_that_needs_self_attention_rejects_a_context(self):
        with rejects("gate"):
            make_layer("bma", causal=False)(X, context=CONTEXT)

    def test_one_context_serves_a_batch(self):
        layer = make_layer("g1+g2", full=True, causal=False)
        whole = layer(X, context=CONTEXT[0])
        for b in range(B):
            assert_close(whole[b], layer(X[b], context=CONTEXT[0]))


class TestNorm:
    def test_the_scale_multiplies_and_epsilon_damps(self):
        scale = sample(d, seed=3)
        square = (X * X).mean(-1, keepdims=True)
        assert_close(rms_norm(X, scale), X / np.sqrt(square + 1e-6) * scale)
        assert_close(rms_norm(X, scale, epsilon=0.5), X / np.sqrt(square + 0.5) * scale)
        assert (rms_norm(np.zeros((2, d)), scale) == 0).all()

    def test_half_precision_is_normed_in_float32(self):
        x = torch.full((4,), 300.0, dtype=torch.float16)
        assert (rms_norm(x, torch.ones(4, dtype=torch.float16)) == 1).all()
