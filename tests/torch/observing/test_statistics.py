from dataclasses import fields

import pytest
import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects
from observed import LargestTensor

from tidegate.torch.observing import statistics
from tidegate.torch.observing.statistics import (
    AttentionCall,
    AttentionStatistics,
    attention_statistics,
    statistics_of_call,
)

INF = float("inf")


def tensors(B=2, H=4, G=2, T=7, S=7, D=5, value_width=5, dtype=torch.float64, seed=0):
    rng = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, value_width))
    return tuple(torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes)


def random_bool(*shape, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.6


def padding(B, H, T, S):
    return (torch.arange(S) < torch.linspace(1, S, B).long()[:, None])[:, None, None, :]


def arbitrary(B, H, T, S):
    allowed = random_bool(B, H, T, S)
    allowed[0, 0, 0] = allowed[-1, :, -1] = False
    return allowed


def window(B, H, T, S):
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    return (distance >= 0) & (distance < 3)


def forbidding(B, H, T, S):
    return torch.zeros(B, 1, T, S, dtype=torch.float64).masked_fill(~arbitrary(B, 1, T, S), -INF)


def alibi(B, H, T, S):
    slopes = 2.0 ** -torch.arange(1, H + 1, dtype=torch.float64)
    return slopes[None, :, None, None] * -(torch.arange(S - T, S)[:, None] - torch.arange(S)).abs()


def alibi_and_forbidding(B, H, T, S):
    return alibi(B, H, T, S) + forbidding(B, H, T, S)


def nothing(B, H, T, S):
    return None


MASKS = {
    "none": (nothing, False),
    "causal": (nothing, True),
    "padding": (padding, False),
    "causal and padding": (padding, True),
    "left padding and causal": (lambda *shape: padding(*shape).flip(-1), True),
    "arbitrary": (arbitrary, False),
    "arbitrary and causal": (arbitrary, True),
    "window": (window, False),
    "forbidding": (forbidding, False),
    "forbidding and causal": (forbidding, True),
    "alibi": (alibi, False),
    "alibi and causal": (alibi, True),
    "alibi and forbidding": (alibi_and_forbidding, False),
    "queries alone": (lambda B, H, T, S: random_bool(T, 1), False),
    "one number": (lambda B, H, T, S: torch.full((1, 1), 0.5), False),
    "nothing at all": (lambda B, H, T, S: torch.zeros(1, S, dtype=torch.bool), False),
}
SHAPES = {
    "square": {},
    "one position": {"T": 1, "S": 1},
    "one group a head": {"H": 3, "G": 3, "T": 63, "S": 63},
    "one group": {"H": 3, "G": 1, "B": 1, "D": 8, "value_width": 3},
    "two blocks of queries": {"B": 1, "T": 100, "S": 100, "D": 4, "value_width": 9},
    "decoding": {"T": 1, "S": 9},
    "chunk after a cache": {"T": 70, "S": 100, "B": 1, "H": 2, "G": 1},
}
ROUTES = ["fused", "plain"]


@pytest.fixture(params=ROUTES)
def route(request, monkeypatch):
    if request.param == "plain":
        monkeypatch.setattr(statistics, "_fits_fused_kernel", lambda call, heat: False)
    return request.param


def reference_scores(q, k, mask, causal, scale):
    """(B, H, T, S) in float64, -inf where a query may not attend."""
    q, k = q.double(), k.double()
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF) if mask.dtype == torch.bool else scores + mask
    if causal:
        T, S = scores.shape[2:]
        scores = scores.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(S - T), -INF)
    return scores


def reference(q, k, v, *, mask=None, causal=False, scale=None, keys=(0,), heat=False):
    """Every statistic from its definition and the whole matrix of weights."""
    scores = reference_scores(q, k, mask, causal, scale)
    empty = (scores == -INF).all(-1)
    weights = torch.where(empty[..., None], 0.0, scores.softmax(-1))
    finite = scores.masked_fill(scores == -INF, 0.0)
    norms = v.double().norm(dim=-1).repeat_interleave(q.shape[1] // v.shape[1], dim=1)[:, :, None]
    if isinstance(keys, torch.Tensor):
        in_set = keys.double().reshape(-1, 1, 1, scores.shape[-1])
    else:
        in_set = torch.tensor([j in keys for j in range(scores.shape[-1])], dtype=torch.float64)
    entropy = -torch.xlogy(weights, weights).sum(-1)
    mean = (weights * finite).sum(-1)
    received = (weights * norms).sum(-1)
    return AttentionStatistics(
        log_partition=scores.logsumexp(-1),
        mean_score=mean,
        entropy=entropy,
        effective_keys=torch.where(empty, 0.0, entropy.exp()),
        mass=(weights * in_set).sum(-1),
        impact=torch.where(received == 0, 0.0, (weights * in_set * norms).sum(-1) / received),
        num_keys=(scores > -INF).sum(-1),
        heat_capacity=(weights * (finite - mean[..., None]) ** 2).sum(-1) if heat else None,
        max_score=scores.amax(-1) if heat else None,
    )


def assert_same(actual, expected, **closeness):
    for field in fields(AttentionStatistics):
        mine, theirs = getattr(actual, field.name), getattr(expected, field.name)
        if theirs is None or not theirs.is_floating_point():
            assert mine is theirs is None or torch.equal(mine, theirs), field.name
        else:
            assert_close(mine, theirs, **closeness)


def problem(mask, shape, **options):
    q, k, v = tensors(**SHAPES[shape], **options)
    build, causal = MASKS[mask]
    return (q, k, v), {"mask": build(*q.shape[:3], k.shape[2]), "causal": causal}


@over(
    mask=axis(list(MASKS), "causal and padding", "arbitrary and causal", "alibi and forbidding"),
    shape=axis(list(SHAPES), "two blocks of queries", "chunk after a cache"),
    heat=axis([False, True], False, True),
)
def test_equal_to_the_definition_on_every_mask(mask, shape, heat, route):
    qkv, options = problem(mask, shape)
    options |= {"heat": heat, "keys": {0, qkv[1].shape[2] // 2}}
    assert_same(attention_statistics(*qkv, **options), reference(*qkv, **options))


@over(
    mask=axis(list(MASKS), "causal and padding", "alibi and causal"),
    dtype=axis([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16),
)
def test_float32_or_better_whatever_comes_in(mask, dtype, route):
    qkv, options = problem(mask, "two blocks of queries", dtype=dtype)
    actual = attention_statistics(*qkv, **options)
    assert actual.entropy.dtype == torch.float32
    assert_same(actual, reference(*qkv, **options))


@pytest.mark.parametrize(
    "keys",
    [(), (3,), (0, 1, 2), (6, 6, 0), range(7), random_bool(7), random_bool(2, 7)],
    ids=["none", "one", "several", "twice", "all", "bool", "bool by batch"],
)
@pytest.mark.parametrize("mask", ["none", "causal", "arbitrary", "alibi"])
def test_mass_and_impact_of_any_key_set(mask, keys, route):
    qkv, options = problem(mask, "square")
    assert_same(attention_statistics(*qkv, keys=keys, **options), reference(*qkv, keys=keys, **options))


@pytest.mark.parametrize("scale", [0.0, -0.7, 3.0])
def test_any_scale(scale, route):
    qkv = tensors()
    assert_same(attention_statistics(*qkv, scale=scale), reference(*qkv, scale=scale))


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_a_soft_cap_applies_before_the_mask(softcap):
    (q, k, v), options = problem("arbitrary", "two blocks of queries")
    capped = softcap * (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5 / softcap).tanh()
    found = attention_statistics(q, k, v, **options, softcap=softcap, heat=True)
    by_mask = {"mask": capped.masked_fill(~options["mask"], -INF), "scale": 0.0, "heat": True}
    assert_same(found, reference(q, k, v, **by_mask))


def scored(q, k, v, scores):
    return AttentionCall(q, k, v, scores, causal=False, scale=None, scored=True)


@pytest.mark.parametrize("forbidding_score", [-1e4, -1e30, -INF])
def test_given_scores_give_the_same_and_are_not_changed(forbidding_score):
    (q, k, v), options = problem("arbitrary", "two blocks of queries")
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~options["mask"], forbidding_score)
    before = scores.clone()
    found = statistics_of_call(scored(q, k, v, scores), keys=(0, 2), heat=True)
    assert torch.equal(scores, before)
    assert_same(found, reference(q, k, v, **options, keys=(0, 2), heat=True))


def test_a_query_without_keys_has_the_documented_values(route):
    q, k, v = tensors()
    rows = attention_statistics(q, k, v, mask=torch.arange(7)[:, None] != 2, heat=True)
    assert rows.empty[:, :, 2].all()
    assert rows.empty.sum() == rows.empty[:, :, 2].numel()
    names = [field.name for field in fields(rows) if field.name != "sink"]
    nothing = {name: getattr(rows, name)[:, :, 2].unique().tolist() for name in names}
    assert nothing == {name: [0.0] for name in names} | {"log_partition": [-INF], "max_score": [-INF]}


def test_scaling_the_values_changes_nothing_and_zero_values_have_no_impact(route):
    q, k, v = tensors()
    assert_same(attention_statistics(q, k, 1e3 * v), attention_statistics(q, k, v))
    assert not attention_statistics(q, k, 0 * v).impact.any()


def test_the_heat_capacity_is_the_slope_of_the_mean_score():
    q, k, v = tensors()
    # With q scaled by a, the mean score is that of the original scores times a.
    step = 1e-5
    above, below = (attention_statistics((1 + s) * q, k, v).mean_score / (1 + s) for s in (step, -step))
    slope = (above - below) / (2 * step)
    assert_close(attention_statistics(q, k, v, heat=True).heat_capacity, slope, what="finite difference")


@pytest.mark.parametrize("route_of_mask", [None, "alibi"])
def test_large_scores_stay_finite(route_of_mask, route):
    q, k, v = tensors(dtype=torch.float32, T=33, S=33)
    mask = None if route_of_mask is None else alibi(2, 4, 33, 33)
    rows = attention_statistics(300 * q, 300 * k, v, mask=mask)
    for field in fields(AttentionStatistics)[:6]:
        assert getattr(rows, field.name).isfinite().all(), field.name
    assert (rows.entropy >= 0).all()
    assert (rows.effective_keys >= 1).all()


def test_a_large_negative_number_is_a_score_and_hides_nothing(route):
    q, k, v = tensors(dtype=torch.float32)
    mask = torch.zeros(7, 7).masked_fill(~window(1, 1, 7, 7), torch.finfo(torch.float32).min)
    mask[3] = torch.finfo(torch.float32).min
    rows = attention_statistics(q, k, v, mask=mask)
    assert not rows.empty.any()
    assert_close(rows.effective_keys[:, :, 3], torch.full((2, 4), 7.0))
    seen = torch.arange(7) != 3
    allowed = attention_statistics(q, k, v, mask=window(1, 1, 7, 7))
    assert_close(rows.entropy[:, :, seen], allowed.entropy[:, :, seen])


@pytest.mark.parametrize("mask", ["none", "causal", "arbitrary", "alibi"])
def test_strided_inputs_are_supported_and_not_changed(mask, route):
    qkv, options = problem(mask, "square")
    strided = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv)
    before = [x.clone() for x in (*strided, options["mask"]) if x is not None]
    assert_same(attention_statistics(*strided, **options), reference(*qkv, **options))
    after = [x for x in (*strided, options["mask"]) if x is not None]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def test_no_gradient_flows_and_autocast_costs_no_precision(route):
    q, k, v = (x.requires_grad_() for x in tensors(dtype=torch.float32))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rows = attention_statistics(q, k, v)
    assert not rows.entropy.requires_grad
    assert_same(rows, reference(q.detach(), k.detach(), v.detach()))


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
def test_equal_to_the_definition_on_a_gpu(mask):
    qkv, options = problem(mask, "two blocks of queries")
    expected = reference(*qkv, **options)
    if options["mask"] is not None:
        options["mask"] = options["mask"].cuda()
    assert_same(attention_statistics(*(x.cuda() for x in qkv), **options), expected)


LONG = {"B": 1, "H": 2, "G": 1, "T": 512, "S": 512, "D": 16}


def largest_made(compute, **options):
    qkv = tensors(**LONG)
    with LargestTensor() as largest:
        compute(*qkv, **options)
    return largest.num_elements


@pytest.mark.parametrize("mask", ["padding", "arbitrary", "forbidding", "alibi"])
@pytest.mark.parametrize("causal", [False, True])
def test_neither_a_mask_nor_given_scores_are_copied_whole(mask, causal, route):
    given = MASKS[mask][0](1, 2, 512, 512)
    assert largest_made(attention_statistics, mask=given, causal=causal) < 512 * 512
    q, k, v = tensors(**LONG | {"G": 2})
    call = scored(q, k, v, q @ k.mT)
    assert largest_made(lambda *_: statistics_of_call(call, keys=(0,), heat=True)) < 512 * 512
    # The attention matrix would be noticed.
    assert largest_made(reference) >= 2 * 512 * 512


Q, K, V = tensors()


@pytest.mark.parametrize(
    ("arguments", "options", "error"),
    [
        ((Q[0], K, V), {}, rejects("q")),
        ((Q, K.float(), V), {}, pytest.raises(TypeError)),
        ((Q, K, V[:, :, :6]), {}, rejects("v")),
        ((Q[:, :3], K, V), {}, rejects("k")),
        ((Q, K, V), {"mask": torch.ones(2, 7, dtype=torch.bool)}, rejects("mask")),
        ((Q, K[:, :, :6], V[:, :, :6]), {"causal": True}, rejects("causal", hint="mask")),
        ((Q, K, V), {"scale": INF}, rejects("scale")),
        ((Q, K, V), {"softcap": 0.0}, rejects("softcap")),
        ((Q, K, V), {"keys": (0, 7)}, rejects("keys")),
    ],
)
def test_invalid_arguments_are_named(arguments, options, error):
    with error:
        attention_statistics(*arguments, **options)
