"""Attention made of separate operators is recognized, and operators that only resemble it are left out."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from observed import assert_curves, assert_moments, plain_statistics, several_keys
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tidegate.torch.observing.watcher import observe

INF = float("inf")
CONTEXTS = [nullcontext, torch.no_grad, torch.inference_mode]
CAUSAL = torch.ones(9, 9, dtype=torch.bool).tril()
LEFT_PADDED = CAUSAL & (torch.arange(9) >= torch.tensor([0, 3])[:, None, None, None])


def matmul(q, k, mask):
    return (q @ k.mT / 2 + mask).softmax(-1)


def by_hand(q, k, mask):
    return F.softmax((q @ k.mT).div(2).add_(mask), dim=-1, dtype=torch.float32).to(q.dtype)


def einsum(q, k, mask):
    return F.softmax(torch.einsum("bhtd,bhsd->bhts", q, k) * 0.5 + mask, dim=3)


def heads_in_the_batch(q, k, mask):
    scores = torch.baddbmm(mask.expand(2, 4, 9, 9).flatten(0, 1), q.flatten(0, 1), k.flatten(0, 1).mT, alpha=0.5)
    return scores.softmax(-1)


WAYS = {way.__name__: way for way in (matmul, by_hand, einsum, heads_in_the_batch)}


class Decomposed(nn.Module):
    """Attention of four heads by its definition, with weights by one of the ways above."""

    def __init__(self, way=matmul, dropout=0.0, change=None, mask=CAUSAL, forbids=-INF):
        super().__init__()
        torch.manual_seed(0)
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.project.weight.data *= 6
        self.way, self.dropout, self.change = way, dropout, change
        self.mask = torch.zeros(mask.shape).masked_fill(~mask, forbids)

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        weights = self.way(q, k, self.mask.to(x.dtype))
        weights = weights if self.change is None else self.change(weights)
        weights = F.dropout(weights, self.dropout, self.training)
        output = torch.bmm(weights, v.flatten(0, 1)).view(v.shape) if weights.ndim == 3 else weights @ v
        return self.out(output.transpose(1, 2).reshape(x.shape))


def inputs(dtype=torch.float32):
    return torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(1)).to(dtype)


def expected_of(model, x):
    """Return every statistic by its definition, in float64."""
    q, k, v = model.project(x).double().detach().view(2, 9, 3, 4, 4).permute(2, 0, 3, 1, 4)
    forbidden = model.mask <= -1e4
    scores = (q @ k.mT / 2).masked_fill(forbidden, -INF)
    weights = scores.softmax(-1).nan_to_num(0.0)
    real = ~forbidden.expand(2, 1, 9, 9).flatten(1, 2).all(1)
    first = real & (real.cumsum(-1) == 1)
    statistics = plain_statistics(weights, scores.masked_fill(forbidden, 0), v.norm(dim=-1), first[:, None, None])
    return statistics, weights, real


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("way", WAYS)
def test_every_statistic_is_that_of_the_definition(way, context, monkeypatch):
    monkeypatch.setattr("observed.TOLERANCE", 1e-5)
    model = Decomposed(WAYS[way])
    with context():
        x = inputs()
        before = model(x)
        with observe(model, heat=True) as watcher:
            after = model(x)
    assert torch.equal(before, after)
    (layer,) = watcher.observation().layers
    statistics, weights, real = expected_of(model, inputs())
    for name, values in statistics.items():
        assert_moments(layer, name, values, real[:, None] & several_keys(weights))
        assert_curves(layer, name, values, real[:, None].expand(values.shape))
    assert "contribution" in layer.heads


@pytest.mark.parametrize("forbids", [-INF, -1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("way", ["by_hand", "heads_in_the_batch"])
@torch.no_grad()
def test_padding_is_read_from_the_scores(way, forbids, monkeypatch):
    monkeypatch.setattr("observed.TOLERANCE", 1e-5)
    # Rows that see nothing would be nan, and are replaced as in other models.
    model = Decomposed(WAYS[way], mask=LEFT_PADDED, forbids=forbids, change=partial(torch.nan_to_num, nan=0.0))
    with observe(model) as watcher:
        model(inputs())
    (layer,) = watcher.observation().layers
    statistics, weights, real = expected_of(model, inputs())
    for name in ("mass", "entropy", "impact", "mean_score"):
        assert_moments(layer, name, statistics[name], real[:, None] & several_keys(weights))


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_and_dropout_do_not_change(dropout):
    def gradients(context):
        model = Decomposed(dropout=dropout).train()
        with context(model) as watcher:
            torch.manual_seed(2)
            model(inputs()).square().sum().backward()
        return [parameter.grad for parameter in model.parameters()], watcher

    plain, _ = gradients(nullcontext)
    watched, watcher = gradients(observe)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(watched, plain, strict=True))
    found = watcher.observation()
    with observe(model := Decomposed()) as watcher:
        model(inputs())
    # Statistics are of the weights before dropout.
    assert found.layers[0].heads["entropy"] == watcher.observation().layers[0].heads["entropy"]


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.4}, {"change": lambda weights: torch.native_dropout(weights, 0.4, True)[0]}],
    ids=["two operators", "one operator"],
)
def test_dropout_is_recognized_by_its_operators(options, context):
    model = Decomposed(**options).train()
    with context():
        torch.manual_seed(2)
        before = model(inputs())
        with observe(model) as watcher:
            torch.manual_seed(2)
            after = model(inputs())
    assert torch.equal(before, after)
    assert watcher.observation().layers[0].heads["mass"][0].count == 2 * 8


def softmax_of_features(q, k, mask):
    """Linear attention: no matrix of scores, the softmax is over channels."""
    del mask
    return (q @ torch.eye(4)).softmax(-1) @ k.mT


def landmarks(q, k, mask):
    """Attention to three summaries of the keys, whose own weights spread it over all."""
    del mask
    short = k.unflatten(2, (3, 3)).mean(3)
    return (q @ short.mT).softmax(-1) @ (short @ k.mT)


def blocks(q, k, mask):
    """Queries in blocks of three, each with its own softmax."""
    return torch.cat([(q[:, :, at] @ k.mT + mask[at]).softmax(-1) for at in map(slice, (0, 3, 6), (3, 6, 9))], dim=2)


UNCERTAIN = {
    "features": {"way": softmax_of_features},
    "landmarks": {"way": landmarks},
    "blocks": {"way": blocks},
    "no product": {"way": lambda q, k, mask: (q.sum(-1, keepdim=True) + k.sum(-1)[:, :, None] + mask).softmax(-1)},
    "other axis": {"way": lambda q, k, mask: (q @ k.mT + mask.T).softmax(-2)},
    "renormalized": {"change": lambda weights: weights / weights.square().sum(-1, keepdim=True)},
    "doubled in place": {"change": lambda weights: weights.mul_(2)},
    "difference": {"change": lambda weights: weights - 0.3 * weights.flip(1)},
    "without a head": {"change": lambda weights: weights * torch.tensor([0.0, 1, 1, 1]).view(4, 1, 1)},
    "one row": {"change": lambda weights: torch.where(torch.arange(9)[:, None] == 3, weights.flip(-1), weights)},
}


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("kind", UNCERTAIN)
@torch.no_grad()
def test_operators_that_only_resemble_attention_are_left_out_and_named(kind, dropout):
    model = nn.Sequential(Decomposed(), Decomposed(**UNCERTAIN[kind], dropout=dropout)).train()
    with observe(model) as watcher:
        model(inputs())
    with pytest.warns(UserWarning, match="1 has a softmax"):
        found = watcher.observation()
    assert [layer.name for layer in found.layers] == ["0"]


def weights_second(scores, v):
    return (v.mT @ scores.softmax(-1).mT).mT


def heads_mixed_before(scores, v):
    return torch.einsum("bgts,gh->bhts", scores, MIXING).softmax(-1) @ v


def heads_mixed_after(scores, v):
    return torch.einsum("bgts,gh->bhts", scores.softmax(-1), MIXING) @ v


def sink_among_the_scores(scores, v):
    with_sink = torch.cat((scores, torch.zeros(*scores.shape[:-1], 1)), dim=-1)
    return with_sink.softmax(-1)[..., :-1] @ v


MIXING = torch.eye(4) + 0.1


class OtherForm(Decomposed):
    """Attention by some function of its scores and values."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return self.out(self.form(q @ k.mT / 2 + self.mask, v).transpose(1, 2).reshape(x.shape))


FORMS = (weights_second, heads_mixed_before, heads_mixed_after, sink_among_the_scores)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("form", FORMS)
def test_attention_in_another_form_is_named(form, context):
    model = nn.Sequential(Decomposed(), OtherForm(form))
    with context(), observe(model) as watcher:
        model(inputs())
    with pytest.warns(UserWarning, match="1 has a softmax"):
        found = watcher.observation()
    assert [layer.name for layer in found.layers] == ["0"]


@pytest.mark.parametrize("num_low", [0, 1, 9], ids=["none", "one query", "every query"])
@torch.no_grad()
def test_queries_whose_scores_all_look_masked_are_named(num_low):
    def low(scores, v):
        return (scores - 6000 * (torch.arange(9)[:, None] >= 9 - num_low)).softmax(-1) @ v

    model = OtherForm(low)
    model.mask = torch.zeros(9, 9)
    with observe(model) as watcher:
        model(inputs())
    with pytest.warns(UserWarning, match="-5,000") if num_low else nullcontext():
        (layer,) = watcher.observation().layers
    assert layer.heads["mass"][0].count == 2 * (9 - num_low)


@torch.no_grad()
def test_heads_that_a_linear_layer_mixes_before_the_softmax_are_observed():
    mixing = nn.Linear(4, 4)

    def mixed(scores, v):
        return (mixing(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + model.mask).softmax(-1) @ v

    def scores_of(model, x):
        q, k, _ = model.project(x).view(2, 9, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return q @ k.mT / 2

    model = OtherForm(mixed)
    model.mask = torch.zeros_like(model.mask).masked_fill(~CAUSAL, -1e9)
    with observe(model) as watcher:
        model(inputs())
    scores = mixing((scores_of(model, inputs()) + model.mask).permute(0, 2, 3, 1)).permute(0, 3, 1, 2) + model.mask
    expected = scores.softmax(-1)[:, :, 1:, 0].mean(dim=(0, 2))
    found = torch.tensor([moments.mean for moments in watcher.observation().layers[0].heads["mass"]])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_call_that_a_checkpoint_repeats_is_counted_once(reentrant):
    model = nn.Sequential(Decomposed())
    with observe(model) as watcher:
        x = inputs().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert watcher.observation().layers[0].heads["mass"][0].count == 2 * 8
