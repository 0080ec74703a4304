"""What holds for every gate on a PyTorch layer: a new gate is a new row of the table."""

import pytest
import torch
from closeness import assert_close
from covers import DTYPE, GATE, OPTION, axis, over
from layers import GATES, WITH_MATRICES
from torch.func import functional_call, grad, vmap
from torch_layers import OPTIONS, every_gate, make, sample, ungated

from tidegate import Gate, Gates
from tidegate.torch import GatedAttention, plain_kernel

CAUSAL = {name: options for name, options in OPTIONS.items() if options.get("causal", True)}
AFTER_THE_SCORES = [str(gate) for gate in GATES if gate.site in ("value", "output", "dense")]
PAIRS = sorted({f"{gate.site}:{gate.reads}" for gate in WITH_MATRICES})
ONE_AT_ZERO = [f"{pair}:{activation}:s0" for pair in PAIRS for activation in ("twosigmoid", "tanh1")]


@over(gate=GATE, options=axis(CAUSAL, "everything"))
def test_no_output_depends_on_a_later_input(gate, options):
    layer, x = make(gate, **options), sample(1, 5, 24, requires_grad=True)
    y = layer(x)
    for t in range(5):
        (by_x,) = torch.autograd.grad(y[:, t].square().sum(), x, retain_graph=True)
        assert (by_x[:, t + 1 :] == 0).all()
        reach = t + 1 if layer.window is None else layer.window
        seen = by_x[0, max(0, t + 1 - reach) : t + 1]
        assert (seen.abs().amax(dim=-1) > 0).all()


@every_gate
def test_a_window_hides_what_lies_before_it(gate):
    layer, x = make(gate, window=2), sample(1, 5, 24, requires_grad=True)
    (by_x,) = torch.autograd.grad(layer(x)[:, 4].square().sum(), x)
    assert (by_x[:, :3] == 0).all()
    assert (by_x[0, 3:].abs().amax(dim=-1) > 0).all()


@every_gate
def test_rows_of_a_batch_do_not_see_each_other(gate):
    layer, x = make(gate, **OPTIONS["everything"]), sample(3, 4, 24, requires_grad=True)
    y = layer(x)
    (by_x,) = torch.autograd.grad(y[1].square().sum(), x)
    assert (by_x[[0, 2]] == 0).all()
    assert_close(y, torch.cat([layer(row[None]) for row in x]))


@every_gate
def test_without_a_mask_or_positions_the_order_does_not_matter(gate):
    layer, x = make(gate, causal=False, num_kv_heads=2), sample(2, 6, 24)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    assert_close(layer(x[:, order]), layer(x)[:, order])


@over(gate=axis(AFTER_THE_SCORES, "bma", "g1", "dense:output"), options=OPTION)
def test_a_gate_after_the_scores_leaves_the_weights_alone(gate, options):
    layer, x = make(gate, **options), sample(2, 5, 24)
    y, gated = layer.trace(x)
    plain_y, plain = ungated(layer).trace(x)
    assert torch.equal(gated.query, plain.query)
    assert torch.equal(gated.key, plain.key)
    assert (gated.causal, gated.scale) == (plain.causal, plain.scale)
    assert (y - plain_y).abs().max() > 1e-3


@over(gate=axis(ONE_AT_ZERO), dtype=DTYPE)
def test_a_gate_that_is_one_at_zero_changes_no_bit_at_the_start(gate, dtype):
    layer = GatedAttention(24, 4, gate=gate, num_kv_heads=2, bias=True, dtype=dtype)
    x = sample(2, 5, 24, dtype=dtype)
    assert torch.equal(layer(x), ungated(layer)(x))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_low_rank_gate_that_starts_at_zero_still_learns(pair):
    torch.manual_seed(0)
    layer, x = GatedAttention(24, 4, gate=f"{pair}:twosigmoid:s0:r2"), sample(2, 5, 24, dtype=torch.float32)
    y = layer(x)
    assert torch.equal(y, ungated(layer)(x))
    site = layer.gates[0].site
    up = layer.attn_gate.get_parameter(f"{site}.weight_up")
    assert (torch.autograd.grad(y.square().sum(), up)[0] != 0).all()


@pytest.mark.parametrize("gate", list(map(str, WITH_MATRICES)))
def test_gates_start_near_one_half(gate):
    torch.manual_seed(0)
    layer, x = GatedAttention(64, 4, gate=gate, num_kv_heads=2), sample(2, 63, 64, dtype=torch.float32)
    _, trace = layer.trace(x)
    (values,) = trace.gates.values()
    reads = {
        "input": x,
        "query": layer.q_proj(x).unflatten(-1, (2, -1) if layer.gates[0].on_source else (4, -1)),
        "value": layer.v_proj(x).unflatten(-1, (2, -1)),
        "output": trace.output.flatten(-2) if layer.gates[0].site == "dense" else trace.output,
    }[layer.gates[0].reads]
    # A logit has deviation 0.02 |r|, and sigmoid's slope is at most 1/4.
    six_deviations = 6 * 0.02 * reads.norm(dim=-1).max() / 4
    assert six_deviations < 1 / 2
    assert 0 < (values - 0.5).abs().max() < six_deviations


@every_gate
def test_sigmoid_gates_lie_between_zero_and_one_however_large_the_logits(gate):
    layer = make(gate, num_kv_heads=2, dtype=torch.float32)
    with torch.no_grad():
        for parameter in layer.attn_gate.parameters():
            parameter.mul_(1e30)
    x = sample(2, 5, 24, dtype=torch.float32, requires_grad=True)
    y, trace = layer.trace(x)
    (values,) = trace.gates.values()
    assert values.min() >= 0
    assert values.max() <= 1
    assert y.isfinite().all()
    assert all(found.isfinite().all() for found in torch.autograd.grad(y.sum(), [x, *layer.parameters()]))


def central_differences(function, point, step=1e-5):
    """The derivative of every output by every entry of the point, (..., entries), in two calls."""
    steps = step * torch.eye(len(point), dtype=point.dtype)
    return ((vmap(function)(point + steps) - vmap(function)(point - steps)) / (2 * step)).movedim(0, -1)


@every_gate
def test_derivatives_of_both_orders_are_those_of_finite_differences(gate):
    layer = make(gate, d_model=4, num_heads=2, num_kv_heads=1)
    given = {"x": sample(1, 3, 4)} | {name: parameter.detach() for name, parameter in layer.named_parameters()}
    point = torch.cat([tensor.flatten() for tensor in given.values()]).requires_grad_()

    def forward(point):
        parts = point.split([tensor.numel() for tensor in given.values()])
        named = {name: part.reshape(given[name].shape) for name, part in zip(given, parts, strict=True)}
        return functional_call(layer, named, (named.pop("x"),)).flatten()

    weights = sample(12, seed=1)

    def combined(point):
        return forward(point) @ weights

    def derivatives(outputs):
        directions = torch.eye(len(outputs), dtype=outputs.dtype)
        return torch.autograd.grad(outputs, point, directions, is_grads_batched=True)[0]

    with plain_kernel():
        (slopes,) = torch.autograd.grad(combined(point), point, create_graph=True)
        first, second = derivatives(forward(point)), derivatives(slopes)
        expected = [central_differences(function, point.detach()) for function in (forward, grad(combined))]
    assert_close(first, expected[0], what="finite difference")
    assert_close(second, expected[1], what="finite difference")


@every_gate
def test_a_gate_adds_the_parameters_that_the_vocabulary_counts(gate):
    sizes = {"d_model": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 5}
    layer = GatedAttention(**sizes, gate=gate)
    added = layer.num_parameters() - ungated(layer).num_parameters()
    assert added == Gates.parse(gate).num_parameters(**sizes) == Gate.parse(gate).num_parameters(**sizes)
