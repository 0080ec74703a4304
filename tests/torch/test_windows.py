"""Attention by blocks equals attention under a mask: values, gradients, lengths, and the cases that need a mask."""

from itertools import pairwise

import pytest
import torch
from closeness import assert_close
from torch.nn import functional as F
from torch_layers import gradients, largest_gap, make, rounding, sample

from tidegate.tensors.attention import scaled_dot_product_attention
from tidegate.torch import KVCache, plain_kernel, windows
from tidegate.torch.windows import attend_in_blocks, document_boundaries

CUTS = {
    "one row": [0, 700],
    "equal": [0, 100, 200, 300, 400, 500, 600, 700],
    "unequal": [0, 1, 64, 65, 264, 265, 266, 650, 700],
    "alike but uneven": [0, 63, 126, 130, 193, 700],
    "ones": list(range(701)),
}
"""Boundaries of documents in 700 positions."""


@pytest.fixture
def blocks_at_every_length(monkeypatch):
    monkeypatch.setattr(windows, "_LEAST_QUERIES", 2)
    monkeypatch.setattr(windows, "_WORK_OF_CALLS", 0)
    monkeypatch.setattr(windows, "_MOST_WORK", float("inf"))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks so small that short rows have every kind of block and run."""
    monkeypatch.setattr(windows, "_BLOCK_SIZES", ((3, 2), (8, 4)))
    monkeypatch.setattr(windows, "_LARGEST_BLOCK", 8)
    monkeypatch.setattr(windows, "_LEAST_KEYS", 9)
    monkeypatch.setattr(windows, "_LEAST_FLIP", 3)
    windows._cached_plan.cache_clear()
    yield
    windows._cached_plan.cache_clear()


@pytest.fixture
def calls(monkeypatch):
    """Record the arguments of all attention calls by blocks."""
    made = []

    def attend(*given, **sink):
        made.append(given)
        return attend_in_blocks(*given, **sink)

    monkeypatch.setattr(windows, "attend_in_blocks", attend)
    return made


def heads(*, B=1, T=700, S=None, H=4, G=2, D=8, dtype=torch.float64):
    shapes = ((B, T, H, D), (B, S or T, G, D), (B, S or T, G, D))
    return [sample(*shape, seed=seed, dtype=dtype, requires_grad=True) for seed, shape in enumerate(shapes)]


def by_mask(q, k, v, boundaries, causal, window, scale):
    """Return the same attention under a mask, the mask and the causality."""
    arguments = windows.whole_call(q, k, v, boundaries, causal, window, scale)
    o = F.scaled_dot_product_attention(**arguments, enable_gqa=True).transpose(1, 2)
    return o, arguments["attn_mask"], arguments["is_causal"]


def both(q, k, v, *, boundaries=None, causal=True, window=None, scale=0.3):
    """Output and gradients by blocks, then under a mask."""
    found, expected = (attend(q, k, v, boundaries, causal, window, scale)[0] for attend in (attend_in_blocks, by_mask))
    weights = sample(*found.shape, seed=9, dtype=q.dtype)
    return [(o, *torch.autograd.grad((o * weights).sum(), (q, k, v))) for o in (found, expected)]


def assert_alike(found, expected):
    for name, one, other in zip(("output", "q", "k", "v"), found, expected, strict=True):
        assert_close(one, other, what="forward" if name == "output" else "gradient")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 2, 63, 128, 300, 600, 699, 2000])
def test_a_window_by_blocks_is_that_of_a_mask(window, causal):
    assert_alike(*both(*heads(), causal=causal, window=window))


@pytest.mark.full
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [1, 16, 100, 129, 512, 1024, 2048, 2300])
@pytest.mark.parametrize(("B", "T", "S", "G"), [(1, 2500, 2500, 1), (3, 333, 2500, 4), (2, 2400, 2407, 2)])
def test_windows_of_long_rows_are_those_of_a_mask(B, T, S, G, window, causal):
    assert_alike(*both(*heads(B=B, T=T, S=S, G=G), causal=causal, window=window))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("G", [4, 1])
@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 9), (2, 2), (63, 63), (100, 100), (30, 75), (3, 100)])
def test_every_length_with_every_kind_of_block(T, S, G, causal):
    for window in (1, 2, 3, 4, 9, 12, 20, 99, 100, 101):
        assert_alike(*both(*heads(B=2, T=T, S=S, G=G), causal=causal, window=window))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 50, 160])
@pytest.mark.parametrize("boundaries", CUTS.values(), ids=CUTS)
def test_documents_by_blocks_are_those_of_a_mask(boundaries, window, causal):
    assert_alike(*both(*heads(), boundaries=boundaries, causal=causal, window=window))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("boundaries", [None, [0, 1, 20, 41, 63]])
def test_blocks_are_the_attention_of_the_tensors(boundaries, causal):
    q, k, v = heads(T=63, H=4, G=2)
    _, mask, _ = by_mask(q, k, v, boundaries, causal, 13, 0.3)
    q_BHTD, *rest = (x.transpose(1, 2) for x in (q, k, v))
    repeated = [x.repeat_interleave(2, dim=1) for x in rest]
    expected = scaled_dot_product_attention(q_BHTD * (0.3 * 8**0.5), *repeated, mask)
    found, log_partition = attend_in_blocks(q, k, v, boundaries, causal, 13, 0.3)
    assert_close(found.transpose(1, 2), expected)
    scores = (0.3 * q_BHTD @ repeated[0].mT).masked_fill(~mask, float("-inf"))
    assert_close(log_partition.transpose(1, 2), scores.logsumexp(dim=-1))
    assert not log_partition.requires_grad
    for by in (q, k, v):
        expected_gradient, found_gradient = (
            torch.autograd.grad(o.square().sum(), by, retain_graph=True)[0] for o in (expected, found)
        )
        assert_close(found_gradient, expected_gradient, what="gradient")


@pytest.mark.usefixtures("small_blocks")
def test_gradients_are_those_of_finite_differences():
    q, k, v = heads(T=13, S=17, H=2, G=1, D=3)
    torch.autograd.gradcheck(lambda *given: attend_in_blocks(*given, None, True, 10, 0.7)[0], (q, k, v))


def test_a_second_backward_is_refused():
    q, k, v = heads(T=20)
    o, _ = attend_in_blocks(q, k, v, None, True, 5, 0.3)
    (first,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("window", "boundaries"), [(40, None), (600, None), (None, CUTS["unequal"])])
def test_half_precision_is_as_close_as_under_a_mask(dtype, window, boundaries):
    exact = both(*heads(), window=window, boundaries=boundaries)[1]
    by_blocks, under_mask = both(*heads(dtype=dtype), window=window, boundaries=boundaries)
    for found, masked, expected in zip(by_blocks, under_mask, exact, strict=True):
        assert found.dtype == dtype
        assert largest_gap(found, expected) <= largest_gap(masked, expected) + rounding(dtype, expected, times=1)


def test_strided_heads_are_taken_as_they_are():
    q, k, v = (sample(2, 300, 3, 4, 8, seed=7).unbind(2)[i] for i in range(3))
    cached = [F.pad(x, (0, 0, 0, 0, 0, 5)).transpose(1, 2).contiguous().transpose(1, 2)[:, :-5] for x in (k, v)]
    expected, _ = attend_in_blocks(q.contiguous(), k.contiguous(), v.contiguous(), None, True, 20, 0.3)
    across = [x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (q, k, v)]
    for given in ((q, k, v), (q, *cached), across):
        assert torch.equal(attend_in_blocks(*given, None, True, 20, 0.3)[0], expected)


def test_a_gradient_that_is_one_number_for_all_is_taken_as_it_is():
    q, k, v = heads(T=300)
    o, _ = attend_in_blocks(q, k, v, None, True, 20, 0.3)
    expanded = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    for found, expected in zip(expanded, torch.autograd.grad(o, (q, k, v), torch.ones_like(o)), strict=True):
        assert torch.equal(found, expected)


def test_the_layer_takes_blocks_where_they_save_work(calls):
    layer = make("none", d_model=512, num_heads=8, window=20, dtype=torch.float32)
    layer(sample(1, 255, 512, dtype=torch.float32))
    layer(sample(4, 64, 512, dtype=torch.float32))
    assert not calls, "few queries"
    layer(sample(1, 256, 512, dtype=torch.float32))
    assert len(calls) == 1
    layer.window = 400
    layer(sample(1, 512, 512, dtype=torch.float32))
    assert len(calls) == 1, "a window over nearly all"
    layer(sample(1, 1024, 512, dtype=torch.float32))
    assert len(calls) == 2
    layer.window = None
    cuts = torch.tensor([start * (start + 1) // 2 for start in range(23)] + [256])
    layer(sample(1, 256, 512, dtype=torch.float32), documents=cuts)
    assert len(calls) == 2, "more lengths of documents than the calls are worth"
    layer(sample(1, 256, 512, dtype=torch.float32), documents=torch.arange(0, 257, 32))
    assert len(calls) == 3


@pytest.mark.usefixtures("blocks_at_every_length")
@pytest.mark.parametrize(
    "options", [{"window": 20, "rope": True}, {"window": 20, "causal": False}, {"num_kv_heads": 2}]
)
def test_a_layer_by_blocks_is_that_under_a_mask(options, calls):
    layer, x = make("g1+bma", **options), sample(2, 300, 24, requires_grad=True)
    ids = (sample(2, 300, seed=5) > 2).cumsum(dim=1)
    for documents in (None, ids) if "window" in options else (ids,):
        found = layer(x, documents=documents)
        assert len(calls) == 1
        calls.clear()
        expected = layer(x, documents=documents, mask=torch.ones(1, 300, dtype=torch.bool))
        assert not calls
        assert_close(found, expected)
        wanted = gradients(layer, expected, x)
        for name, gradient in gradients(layer, found, x).items():
            assert_close(gradient, wanted[name], what="gradient")


@pytest.mark.usefixtures("blocks_at_every_length")
@pytest.mark.parametrize("max_length", [None, 700])
def test_queries_after_a_cache_are_those_of_the_whole(max_length, calls):
    layer, x = make("g1+bma", window=150, num_kv_heads=2), sample(2, 700, 24)
    cache = KVCache(max_length)
    with torch.no_grad():
        parts = [layer(x[:, start:stop], cache=cache) for start, stop in pairwise([0, 100, 400, 401, 700])]
        assert [given[1].shape[1] for given in calls] == [400, 700]
        assert_close(torch.cat(parts, dim=1), layer(x))


@pytest.mark.usefixtures("blocks_at_every_length")
def test_autocast_gives_blocks_what_it_gives_the_kernel(calls):
    layer, x = make("bma", dtype=torch.float32, window=20, qk_norm=True), sample(1, 300, 24, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
        assert calls[0][0].dtype == torch.bfloat16
        expected = layer(x, mask=torch.ones(1, 300, dtype=torch.bool))
    assert found.dtype == expected.dtype
    assert largest_gap(found, expected) <= rounding(torch.bfloat16, expected)


@pytest.mark.usefixtures("small_blocks")
def test_runs_are_joined_under_autocast_as_without():
    q, k, v = heads(T=63, dtype=torch.bfloat16)
    found = both(q, k, v, window=30)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for one, other in zip(both(q, k, v, window=30)[0], found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.usefixtures("blocks_at_every_length")
def test_where_blocks_may_not_be_used_the_mask_serves(calls):
    layer, x = make("bma", window=3, dropout=0.5), sample(1, 9, 24)
    layer(x)
    assert not calls, "dropout of the weights"
    layer.eval()
    layer(x, mask=torch.ones(1, 9, dtype=torch.bool))
    assert not calls, "a mask"
    layer.trace(x)
    assert not calls, "a trace"
    with plain_kernel():
        layer(x)
    assert not calls, "the plain kernel"
    torch.func.vmap(layer)(x[None])
    torch.func.jvp(layer, (x,), (x,))
    assert not calls, "a transform"
    layer.to("meta")(x.to("meta"))
    assert not calls, "another device"
    layer = make("bma", window=3)
    layer(x[:0])
    assert not calls, "nothing to attend to"
    layer(x)
    assert len(calls) == 1


@pytest.mark.usefixtures("blocks_at_every_length")
def test_documents_that_come_in_pieces_are_under_a_mask(calls):
    layer, x = make("bma"), sample(2, 6, 24)
    in_pieces = torch.tensor([[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2]])
    found = layer(x, documents=in_pieces)
    assert not calls
    assert_close(found[:1], layer(x[:1], mask=(in_pieces[0][:, None] == in_pieces[0])[None, None]))
    layer(x, documents=in_pieces[1:].expand(2, -1))
    assert len(calls) == 1


def test_boundaries_are_those_of_every_row():
    ids = torch.tensor([[4, 4, 2, 2, 2], [2, 2, 2, 2, 2], [0, 1, 2, 3, 4]])
    assert document_boundaries(ids) == [0, 2, 5, 10, 11, 12, 13, 14, 15]
    assert document_boundaries(torch.tensor([0, 2, 2, 5])) == [0, 2, 5]
    assert document_boundaries(torch.tensor([[1, 2, 1]])) is None


@pytest.mark.usefixtures("blocks_at_every_length")
def test_nothing_of_the_size_of_the_scores_is_kept_or_made():
    layer, x = make("none", d_model=16, num_heads=2, window=32), sample(1, 4096, 16)
    with torch.profiler.profile(profile_memory=True) as profile:
        layer(x).sum().backward()
    largest = max(abs(event.cpu_memory_usage) for event in profile.events())
    assert 4096 * 16 * 8 <= largest < 4096 * 4096


@pytest.mark.parametrize("documents", [None, torch.tensor([0, 7, 130, 131, 300])], ids=["window", "documents"])
def test_a_sink_is_counted_in_by_blocks_too(documents, calls, blocks_at_every_length):
    layer, x = make("sink+g1", num_kv_heads=2, window=33), sample(1, 300, 24, requires_grad=True)
    y = layer(x, documents=documents)
    with plain_kernel():
        expected = layer(x, documents=documents)
    assert len(calls) == 1
    assert_close(y, expected)
    theirs = gradients(layer, expected, x)
    for name, found in gradients(layer, y, x).items():
        assert_close(found, theirs[name], what="gradient")
