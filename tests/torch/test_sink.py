"""A sink at the cost of the fused kernel: the same numbers as a softmax with one more column, gradients too."""

from functools import partial

import pytest
import torch
from closeness import assert_close
from covers import axis, over
from torch.nn.attention import SDPBackend
from torch_layers import gradients, make, sample

from tidegate.tensors import entropy_with_sink, sink_attention
from tidegate.torch import observe, plain_kernel, sink
from tidegate.torch.observing import attention_statistics
from tidegate.torch.observing.statistics import with_sink
from tidegate.torch.sink import attend_with_sink, log_partition

SCALE = 0.3
LENGTHS = [1, 63, 100]


def masks(T):
    """Return masks of every kind and number of axes; in the first, the second row may see nothing."""
    allowed = sample(2, 4, T, T, seed=5) > 0
    allowed[0, :, min(1, T - 1)] = False
    additive = torch.where(allowed, sample(2, 4, T, T, seed=6), -torch.inf)
    return {
        "none": None,
        "bool": allowed,
        "two axes": allowed[1, 0],
        "of keys": allowed[:1, :1, -1:],
        "added": additive,
    }


def inputs(T, num_kv_heads=2, dtype=torch.float64):
    shapes = (2, 4, T, 8), (2, num_kv_heads, T, 8), (2, num_kv_heads, T, 8), (4,)
    return [sample(*shape, seed=seed, dtype=dtype, requires_grad=True) for seed, shape in enumerate(shapes)]


def reference(q, k, v, logits, *, mask=None, causal=False):
    """A softmax with one more column, on all heads."""
    k, v = (x.repeat_interleave(4 // k.shape[1], dim=1) for x in (k, v))
    allowed = None
    if mask is not None:
        allowed = mask if mask.dtype == torch.bool else mask != -torch.inf
    if causal:
        allowed = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    scaled = q * SCALE * q.shape[-1] ** 0.5
    if mask is None or mask.dtype == torch.bool:
        return sink_attention(scaled, k, v, logits, allowed)
    scores = torch.cat((q @ k.mT * SCALE + mask, logits[:, None, None].expand(2, 4, q.shape[2], 1)), dim=-1)
    return scores.softmax(dim=-1)[..., :-1] @ v


def values_and_gradients(attend, tensors):
    y = attend(*tensors)
    return y, torch.autograd.grad((y * sample(*y.shape, seed=9, dtype=y.dtype)).sum(), tensors)


@pytest.fixture
def fused(monkeypatch):
    """Check that the test calls the fused kernel, forward and backward."""
    called = []
    for name in ("_cpu_forward", "_cpu_backward"):
        kernel = getattr(sink, name)
        monkeypatch.setattr(sink, name, lambda *a, n=name, k=kernel, **o: called.append(n) or k(*a, **o))
    yield
    assert set(called) == {"_cpu_forward", "_cpu_backward"}


@over(T=axis(LENGTHS), groups=axis([1, 2, 4]), mask=axis(list(masks(1))), causal=axis([False, True]))
def test_the_fused_kernel_gives_a_softmax_with_one_more_column(T, groups, mask, causal, fused):
    if causal and mask != "none":
        causal = False
    tensors, given = inputs(T, groups), masks(T)[mask]
    attend = partial(attend_with_sink, mask=given, causal=causal, scale=SCALE)
    found = values_and_gradients(lambda q, k, v, s: attend(q, k, v, sink_H=s), tensors)
    expected = values_and_gradients(partial(reference, mask=given, causal=causal), tensors)
    assert_close(found[0], expected[0])
    for one, other in zip(found[1], expected[1], strict=True):
        assert_close(one, other, what="gradient")


@pytest.mark.parametrize("mask", ["none", "bool", "added"])
def test_the_plain_kernel_gives_the_same(mask):
    tensors, given = inputs(5), masks(5)[mask]
    attend = partial(attend_with_sink, mask=given, scale=SCALE)
    with plain_kernel():
        found = values_and_gradients(lambda q, k, v, s: attend(q, k, v, sink_H=s), tensors)
    expected = values_and_gradients(partial(reference, mask=given), tensors)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert_close(one, other, what="gradient")


def test_the_plain_kernel_has_second_derivatives():
    shapes = (1, 2, 2, 2), (1, 1, 2, 2), (1, 1, 2, 2), (2,)
    tensors = [sample(*shape, seed=seed, requires_grad=True) for seed, shape in enumerate(shapes)]
    mask = torch.tensor([[True, False], [False, False]])
    with plain_kernel():
        assert torch.autograd.gradgradcheck(
            lambda q, k, v, s: attend_with_sink(q, k, v, sink_H=s, mask=mask, scale=SCALE), tensors
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_lower_precision_is_as_close_as_the_plain_kernel_of_attention(dtype):
    tensors = inputs(63, dtype=dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    attend = partial(attend_with_sink, causal=True, scale=SCALE)
    found = values_and_gradients(lambda q, k, v, s: attend(q, k, v, sink_H=s), tensors)
    expected = values_and_gradients(partial(reference, causal=True), exact)
    for one, other in zip((found[0], *found[1]), (expected[0], *expected[1]), strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= 4 * torch.finfo(dtype).eps * other.norm()


def test_a_row_that_may_see_nothing_gives_zero_and_has_all_its_weight_on_the_sink():
    tensors, mask = inputs(6), masks(6)["bool"]
    y, grads = values_and_gradients(
        lambda q, k, v, s: attend_with_sink(q, k, v, sink_H=s, mask=mask, scale=SCALE), tensors
    )
    assert (y[0, :, 1] == 0).all()
    assert (grads[0][0, :, 1] == 0).all()
    partition = log_partition(*tensors[:2], mask=mask, scale=SCALE)
    assert (partition[0, :, 1] == -torch.inf).all()
    assert torch.autograd.grad(partition[1].sum(), tensors[0])[0].isfinite().all()


def test_channels_that_do_not_lie_side_by_side_are_read_right():
    tensors = inputs(9)
    strided = [*(x.detach().mT.contiguous().mT.requires_grad_() for x in tensors[:3]), tensors[3]]
    assert all(x.stride(-1) != 1 for x in strided[:3])
    results = []
    for given in (strided, tensors):
        y = attend_with_sink(*given[:3], sink_H=given[3], causal=True, scale=SCALE)
        # Its gradient is strided too.
        weights = sample(2, 4, 8, 9, seed=9).mT
        results.append((y, *torch.autograd.grad((y * weights).sum(), given)))
    for one, other in zip(*results, strict=True):
        assert_close(one, other, what="gradient")


def test_a_call_without_queries_is_empty():
    q, k, v, s = inputs(3)
    assert attend_with_sink(q[:, :, :0], k, v, sink_H=s, scale=SCALE).shape == (2, 4, 0, 8)


def test_the_trace_has_the_share_that_the_sink_leaves():
    layer, x = make("sink+g1"), sample(2, 9, 24, requires_grad=True)
    y, trace = layer.trace(x)
    assert set(trace.gates) == {"partition", "output"}
    arrays = layer.arrays().trace(x)
    kept = trace.gates["partition"]
    expected = torch.sigmoid(arrays.sources.partition + layer.attn_gate.get_parameter("partition.bias"))
    assert_close(kept[..., 0].transpose(1, 2), expected)
    assert torch.autograd.grad(kept.sum(), x)[0].abs().max() > 0
    assert_close(y, layer(x))


def test_dropout_drops_weights_on_keys_and_leaves_the_sink_its_share():
    layer, x = make("sink", dropout=0.5), sample(1, 5, 24)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dropped = layer(x.expand(3000, -1, -1))
    layer.eval()
    spread = dropped.std(dim=0) / len(dropped) ** 0.5
    assert ((dropped.mean(dim=0) - layer(x)[0]).abs() <= 6 * spread).all()
    assert (spread > 0).all()


def test_a_second_backward_is_refused_in_words_and_the_plain_kernel_has_one():
    layer, x = make("sink"), sample(1, 4, 24, requires_grad=True)
    (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
    with plain_kernel():
        (first,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    first.sum().backward()


def test_it_compiles_whole_and_exports():
    layer, x = make("sink+g1"), sample(2, 9, 24, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected = gradients(layer, layer(x), x)
    for name, found in gradients(layer, compiled(x), x).items():
        assert_close(found, expected[name], what="gradient")
    program = torch.export.export(layer, (x,))
    assert_close(program.module()(x), layer(x))
    assert any("flash_attention" in str(node.target) for node in program.graph.nodes)


def test_under_autocast_the_kernel_works_in_half_precision(monkeypatch):
    layer, x = make("sink", dtype=torch.float32), sample(2, 9, 24, dtype=torch.float32)
    seen, kernel = [], sink._cpu_forward
    monkeypatch.setattr(sink, "_cpu_forward", lambda q, *a, **o: seen.append(q.dtype) or kernel(q, *a, **o))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert seen == [torch.bfloat16]
    assert (y - layer(x)).norm() < 0.05 * layer(x).norm()


@pytest.mark.parametrize("kernel", [None, SDPBackend.MATH], ids=["fused", "plain"])
def test_observe_counts_the_sink_as_a_state_of_its_own(kernel):
    layer, x = make("sink+g1"), sample(2, 9, 24)
    with observe(layer) as watcher, torch.no_grad():
        if kernel is None:
            layer(x)
        else:
            with plain_kernel():
                layer(x)
    (seen,) = watcher.observation().layers
    trace = layer.arrays().trace(x)
    kept = torch.sigmoid(trace.sources.partition + layer.attn_gate.get_parameter("partition.bias"))[:, :, 1:]
    weights = trace.weights[:, :, 1:]
    entropy = entropy_with_sink(torch.special.entr(weights).sum(dim=-1), 1 - kept)
    first = kept * weights[..., 0]
    for name, expected in {"sink": 1 - kept, "mass": first, "entropy": entropy}.items():
        assert_close(torch.tensor(seen.head_means(name)), expected.mean(dim=(0, 2)).detach())
    # The input of the output projection is recognized, with the sink in the softmax.
    assert "contribution" in seen.heads
    assert "sink-logit mass" in watcher.observation().table()


def test_statistics_with_a_sink_are_those_of_one_more_state():
    q, k, v, s = (tensor.detach() for tensor in inputs(7, 4))
    found = with_sink(attention_statistics(q, k, v, causal=True, scale=SCALE, heat=True), s)
    scores = (q @ k.mT * SCALE).masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -torch.inf)
    states = torch.cat((scores, s[:, None, None].expand(2, 4, 7, 1)), dim=-1)
    weights = states.softmax(dim=-1)
    energy = torch.where(weights > 0, states, 0)
    mean = (weights * energy).sum(dim=-1)
    assert_close(found.log_partition, states.logsumexp(dim=-1))
    assert_close(found.mean_score, mean)
    assert_close(found.entropy, torch.special.entr(weights).sum(dim=-1))
    assert_close(found.heat_capacity, (weights * (energy - mean[..., None]) ** 2).sum(dim=-1))
    assert_close(found.sink, weights[..., -1])
    assert_close(found.mass, weights[..., 0])


@pytest.mark.gpu
def test_a_gpus_kernel_gives_the_same():
    tensors = [tensor.detach().to("cuda", torch.bfloat16).requires_grad_() for tensor in inputs(64)]
    exact = [tensor.detach().double().cpu().requires_grad_() for tensor in tensors]
    attend = partial(attend_with_sink, causal=True, scale=SCALE)
    y = attend(*tensors[:3], sink_H=tensors[3])
    weights = sample(*y.shape, seed=9, dtype=y.dtype)
    found = torch.autograd.grad((y * weights.cuda()).sum(), tensors)
    expected = values_and_gradients(partial(reference, causal=True), exact)
    for one, other in zip((y, *found), (expected[0], *expected[1]), strict=True):
        assert (one.double().cpu() - other).norm() <= 4 * torch.finfo(torch.bfloat16).eps * other.norm()
