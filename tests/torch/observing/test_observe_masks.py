"""Every statistic of an observation, for every kind of mask, compared with the attention matrix in float64."""

import pytest
import torch
from covers import axis, over
from observed import (
    INF,
    Attention,
    assert_curves,
    assert_moments,
    plain_statistics,
    qkv,
    several_keys,
    weights_and_scores,
)
from torch import nn

from tidegate.torch.observing import statistics
from tidegate.torch.observing.watcher import observe

LENGTHS = torch.tensor([4, 7])
RIGHT = torch.arange(7) < LENGTHS[:, None]
LEFT = RIGHT.flip(-1)
CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
DISTANCE = torch.arange(7)[:, None] - torch.arange(7)
ALIBI = -0.3 * DISTANCE.abs().double() * torch.arange(1, 5)[:, None, None]
LEAST = torch.finfo(torch.float64).min


def by_key(real):
    return real[:, None, None, :]


def additive(allowed, forbidding=-INF):
    return torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, forbidding)


def somewhere(seed=3):
    return torch.rand(2, 4, 7, 7, generator=torch.Generator().manual_seed(seed)) < 0.6


def written(num_written, num_keys, num_queries):
    """A partly written static cache, whose last written keys are those of the queries."""
    queries = torch.arange(num_written - num_queries, num_written)
    return torch.arange(num_keys) <= queries[:, None]


CALLS = {
    "none": ({}, {}, None),
    "causal": ({}, {"is_causal": True}, None),
    "scaled": ({}, {"is_causal": True, "scale": 0.8}, None),
    "bool": ({}, {"attn_mask": somewhere() | torch.eye(7, dtype=torch.bool)}, None),
    "additive": ({}, {"attn_mask": ALIBI}, None),
    "additive and causal": ({}, {"attn_mask": ALIBI.masked_fill(~CAUSAL, -INF)}, None),
    "additive with the least number": ({}, {"attn_mask": ALIBI.masked_fill(~CAUSAL, LEAST)}, None),
    "window": ({}, {"attn_mask": CAUSAL & (DISTANCE < 3)}, None),
    "two documents": ({}, {"attn_mask": CAUSAL & (torch.arange(7) // 4 == torch.arange(7)[:, None] // 4)}, None),
    "padding on the right": ({}, {"attn_mask": by_key(RIGHT)}, RIGHT),
    "padding on the left": ({}, {"attn_mask": by_key(LEFT)}, LEFT),
    "causal, padding on the right": ({}, {"attn_mask": by_key(RIGHT) & CAUSAL}, RIGHT),
    "causal, padding on the left": ({}, {"attn_mask": by_key(LEFT) & CAUSAL}, LEFT),
    "additive padding on the left": ({}, {"attn_mask": additive(by_key(LEFT) & CAUSAL)}, LEFT),
    "padding by the least number": ({}, {"attn_mask": additive(by_key(LEFT) & CAUSAL, LEAST)}, LEFT),
    "additive and padding by -10,000": ({}, {"attn_mask": ALIBI.masked_fill(~(by_key(LEFT) & CAUSAL), -1e4)}, LEFT),
    "grouped heads": ({"G": 2}, {"is_causal": True, "enable_gqa": True}, None),
    "grouped heads, padding": ({"G": 2}, {"attn_mask": by_key(LEFT) & CAUSAL, "enable_gqa": True}, LEFT),
    "one query after a cache": ({"T": 1, "S": 9}, {}, None),
    "queries after a cache": ({"T": 3, "S": 9}, {"attn_mask": torch.ones(3, 9, dtype=torch.bool).tril(6)}, None),
    "causal, more keys": ({"T": 3, "S": 9}, {"is_causal": True}, None),
    "causal, more queries": ({"T": 9, "S": 3}, {"is_causal": True}, None),
    "across, fewer keys": ({"T": 9, "S": 3}, {}, None),
    "an unwritten cache": ({"T": 2, "S": 9}, {"attn_mask": written(5, 9, 2)}, None),
}


@pytest.fixture(params=["fused", "blocked"], autouse=True)
def route(request, monkeypatch):
    if request.param == "blocked":
        monkeypatch.setattr(statistics, "_fits_fused_kernel", lambda call, heat: False)


def first_real(real, num):
    return real & (real.cumsum(-1) <= num)


def position_of_first(name, T, S):
    return {"an unwritten cache": 3, "causal, more keys": 0}.get(name, max(S - T, 0))


@over(
    name=axis(list(CALLS), "causal", "causal, padding on the left", "queries after a cache"),
    num_keys=axis([1, 2], 2),
    heat=axis([False, True], False, True),
)
def test_every_statistic_on_every_mask(name, num_keys, heat):
    shape, options, real = CALLS[name]
    q, k, v = qkv(**shape)
    B, H, T, _ = q.shape
    S = k.shape[2]
    model = Attention()
    with observe(model, keys=num_keys, heat=heat) as watcher:
        model(q, k, v, **options)
    (layer,) = watcher.observation().layers

    weights, scores = weights_and_scores(q, k, v, **options)
    real_keys = torch.ones(B, S, dtype=torch.bool) if real is None else real
    norms = v.norm(dim=-1).repeat_interleave(H // v.shape[1], 1)
    expected = plain_statistics(weights, scores, norms, first_real(real_keys, num_keys)[:, None, None].double())
    counted = weights.sum(-1) > 0.5
    if real is not None:
        counted = counted & real[:, None]
    assert (
        set(layer.heads)
        == set(layer.by_position)
        == set(expected) - (set() if heat else {"max_score", "heat_capacity"})
    )
    for statistic in layer.heads:
        assert_moments(layer, statistic, expected[statistic], counted & several_keys(weights))
        assert_curves(layer, statistic, expected[statistic], counted, position_of_first(name, T, S))


def test_given_padding_overrides_the_mask():
    q, k, v = qkv(T=2, S=9)
    # A window hides the first keys, which are not padding; the first row's last token is.
    window = torch.arange(9) >= 4
    padding = torch.ones(2, 9, dtype=torch.bool)
    padding[0, -1] = False
    model = Attention()
    with observe(model, padding=padding) as watcher:
        model(q, k, v, attn_mask=window[None])
    (layer,) = watcher.observation().layers
    assert all(moments.count == 3 for moments in layer.heads["mass"])
    assert all(moments.high == 0 for moments in layer.heads["mass"])


def test_a_query_without_keys_is_left_out():
    q, k, v = qkv()
    mask = CAUSAL.clone()
    mask[2] = False
    model = Attention()
    with observe(model) as watcher:
        model(q, k, v, attn_mask=mask)
    (layer,) = watcher.observation().layers
    assert layer.positions == (0, 1, 3, 4, 5, 6)
    assert {moments.count for moments in layer.heads["entropy"]} == {10}


class Sparse(nn.Module):
    """Causal attention in which nobody looks at the keys 2 and 6."""

    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x, attention_mask=None, **_others):
        allowed = torch.ones(7, 7, dtype=torch.bool).tril() & (torch.arange(7) % 4 != 2)
        if attention_mask is not None:
            allowed = allowed & attention_mask.bool()[:, None, None]
        return self.attention(x, x, x, attn_mask=allowed)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        # The first query sees a single key in each row, and is in no mean.
        ({}, 2 * 5 - 2),
        ({"attention_mask": torch.ones(2, 7)}, 2 * 7 - 2),
        ({"attention_mask": torch.arange(7) >= torch.tensor([[0], [3]])}, 7 - 1 + 4 - 1),
        ({"attention_mask": 3 * (torch.arange(7) >= torch.tensor([[0], [3]])).long()}, 7 - 1 + 4 - 1),
        # A mask of another length does not apply.
        ({"attention_mask": torch.ones(2, 1)}, 2 * 5 - 2),
    ],
    ids=["inferred from the masks", "without padding", "with padding", "with document numbers", "of another length"],
)
def test_padding_is_taken_from_the_attention_mask(options, count):
    model, (x, _, _) = Sparse(), qkv()
    with observe(model) as watcher:
        model(x, **options)
    assert {moments.count for moments in watcher.observation().layers[0].heads["mass"]} == {count}


class Part(nn.Module):
    """A model with the given forward, which gets the parts and the arguments."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.parts, self.run = nn.ModuleDict(parts), forward

    def forward(self, x, attention_mask=None):
        return self.run(self.parts, x, attention_mask)


LATE = torch.arange(7) >= torch.tensor([[0], [3]])


def counts(model, mask):
    with observe(model) as watcher:
        model(qkv()[0], attention_mask=mask)
    return {
        layer.name.removesuffix(".attention"): layer.heads["mass"][0].count for layer in watcher.observation().layers
    }


class OtherName(nn.Module):
    """A layer whose mask has another name."""

    def forward(self, x, seen):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=seen)


@pytest.mark.parametrize(("honors", "count"), [(True, 7 + 4), (False, 2 * 7)])
def test_a_mask_with_another_name_applies_if_no_real_query_sees_the_padding(honors, count):
    def forward(parts, x, mask):
        # Padding sees itself, as in XLNet.
        seen = mask.bool()[:, None, None] | torch.eye(7, dtype=torch.bool)
        return parts["layer"](x, seen if honors else torch.ones(2, 1, 7, 7, dtype=torch.bool))

    assert counts(Part(forward, layer=OtherName()), LATE) == {"parts.layer": count}


@pytest.mark.parametrize("forbidding", [-INF, -1e9, LEAST])
def test_an_additive_mask_is_not_read_as_ones_and_zeros(forbidding):
    model = Part(lambda parts, x, mask: parts["a"](x, x, x, attn_mask=mask[:, None, None]), a=Attention())
    assert counts(model, additive(RIGHT, forbidding)) == {"parts.a": int(RIGHT.sum())}


@pytest.mark.parametrize(("masks", "count"), [({}, 2 * 5 - 2), ({"attention_mask": torch.ones(2, 7)}, 2 * 7 - 2)])
def test_the_padding_of_a_text_does_not_apply_to_the_image_beside_it(masks, count):
    class Tower(nn.Module):
        """A part with its own tokens, and its own mask if one is passed."""

        def __init__(self):
            super().__init__()
            self.inner = Sparse()

        def forward(self, pixels, **options):
            return self.inner(pixels, **options)

    def forward(parts, x, mask):
        return parts["text"](x, mask), parts["image"](x, **masks)

    found = counts(Part(forward, text=Sparse(), image=Tower()), LATE)
    assert found == {"parts.text": 7 - 1 + 4 - 1, "parts.image.inner": count}


def test_the_padding_of_an_encoder_does_not_apply_to_its_decoder():
    class Decoder(Part):
        def forward(self, x, encoder_hidden_states):
            return self.parts["inner"](x)

    decoder = Decoder(None, inner=Sparse())
    model = Part(lambda parts, x, mask: parts["decoder"](x, encoder_hidden_states=x), decoder=decoder)
    assert counts(model, torch.arange(7)[None] < torch.tensor([[7], [2]])) == {"parts.decoder.parts.inner": 2 * 5 - 2}
