"""Decoding with a cache, which may drop keys or have unwritten slots, gives the same as one pass over the tokens."""

from functools import partial

import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects
from observed import Attention, qkv
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, StaticCache

from tidegate.config import TransformerConfig
from tidegate.torch import TransformerLM
from tidegate.torch.hf import TidegateConfig, TidegateForCausalLM
from tidegate.torch.observing.watcher import observe

TOKENS = torch.randint(3, 50, (3, 10), generator=torch.Generator().manual_seed(0))
LEFT = torch.arange(10) >= torch.tensor([[4], [0], [2]])
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": None,
}
OURS = {"gate": "g1", "vocab_size": 50, "d_model": 32, "num_layers": 2, "num_heads": 4, "window": 4}
BUILD = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)),
    "ours": lambda: TidegateForCausalLM(TidegateConfig(**OURS, pad_token_id=0)),
}
STATIC = {"cache_implementation": "static", "disable_compile": True}
KIND = axis(list(BUILD), "mistral")
KEYS = {"one": 1, "three": 3, "places": (0, 5), "tensor": torch.arange(8) % 3 == 1}
CHUNKS = [(6, 1, 1, 1, 1), (3, 4, 3), (1,) * 10]


def built(make):
    torch.manual_seed(0)
    model = make().double().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            parameter.data.mul_(6)
    return model


def assert_same(found, expected):
    """Both have the same statistics for every head and position."""
    for one, other in zip(found.layers, expected.layers, strict=True):
        assert one.positions == other.positions
        for statistic in one.heads:
            assert [each.count for each in one.heads[statistic]] == [each.count for each in other.heads[statistic]]
            for field in ("mean", "std", "low", "high"):
                mine, theirs = ([getattr(each, field) for each in layer.heads[statistic]] for layer in (one, other))
                assert_close(mine, theirs, what="finite difference")
            assert_close(one.by_position[statistic], other.by_position[statistic], what="finite difference")


@over(
    kind=KIND,
    options=axis({"dynamic": {}, "static": STATIC}, "dynamic", "static"),
    keys=axis(KEYS, "three"),
)
@torch.no_grad()
def test_generation_gives_the_same_as_one_pass(kind, options, keys):
    model = built(BUILD[kind])
    with observe(model, keys=keys) as watcher:
        tokens = model.generate(TOKENS, max_new_tokens=8, do_sample=False, **options)
    with observe(model, keys=keys) as whole:
        model(tokens[:, :-1], use_cache=False)
    assert_same(watcher.observation(), whole.observation())


@over(
    kind=KIND,
    options=axis({"dynamic": {}, "static": STATIC, "beams": {"num_beams": 2}}, "dynamic", "static", "beams"),
    given=axis({"from the masks": False, "given": True}),
)
@torch.no_grad()
def test_generation_after_padding_gives_the_same_as_one_pass(kind, options, given):
    model = built(BUILD[kind])
    mask = LEFT.repeat_interleave(options.get("num_beams", 1), 0)
    with observe(model, padding=mask if given else None) as watcher:
        tokens = model.generate(TOKENS, attention_mask=LEFT.long(), max_new_tokens=6, do_sample=False, **options)
    if "num_beams" in options:
        # Discarded beams are not in any returned sequence.
        found = watcher.observation().layers[0]
        assert found.positions == tuple(range(15))
        assert found.heads["mass"][0].count == int(mask.sum()) + 4 * len(mask)
        return
    mask = F.pad(mask, (0, 5), value=True)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with observe(model) as whole:
        model(tokens[:, :-1], attention_mask=mask.long(), position_ids=positions, use_cache=False)
    assert_same(watcher.observation(), whole.observation())


@over(window=axis([None, 1, 4], 1, 4), chunks=axis(CHUNKS))
@torch.no_grad()
def test_our_cache_in_chunks_gives_the_same_as_one_pass(window, chunks):
    model = built(lambda: TransformerLM(TransformerConfig(**{**OURS, "window": window})))
    caches = model.new_caches(10)
    with observe(model, keys=2) as watcher:
        for chunk in TOKENS.split(chunks, dim=1):
            model(chunk, caches=caches)
    with observe(model, keys=2) as whole:
        model(TOKENS)
    if window == 1 and 1 in chunks:
        # One query with one key starts a sequence: it looks like the first token.
        assert watcher.observation().layers[0].positions == tuple(range(chunks[0]))
        return
    assert_same(watcher.observation(), whole.observation())


@torch.no_grad()
def test_a_static_cache_that_rolls_over_gives_the_same_as_one_pass():
    model = built(BUILD["ours"])
    cache = StaticCache(config=model.config, max_cache_len=16)
    with observe(model) as watcher:
        for chunk in TOKENS.split((1, 1, 3, 4, 1), dim=1):
            model(chunk, past_key_values=cache)
    with observe(model) as whole:
        model(TOKENS, use_cache=False)
    assert_same(watcher.observation(), whole.observation())


@torch.no_grad()
def test_generation_does_not_change_and_each_sequence_starts_at_0():
    model = built(BUILD["mistral"])
    generate = partial(model.generate, max_new_tokens=6, do_sample=False)
    expected = generate(TOKENS)
    with observe(model) as watcher:
        assert torch.equal(generate(TOKENS), expected)
        generate(TOKENS[:2])
    found = watcher.observation()
    assert found.layers[0].positions == tuple(range(15))
    assert found.layers[0].heads["mass"][0].count == 5 * 14


def calls(*shapes, rows=2):
    """The positions of attention calls on one sequence, each by its first key, first query and end."""
    q, k, v = qkv(B=rows, T=12, S=12)
    model = Attention()
    with observe(model) as watcher:
        for start, first, end in shapes:
            model(q[:, :, first:end], k[:, :, start:end], v[:, :, start:end])
    return watcher.observation().layers[0].positions


def test_a_cropped_cache_continues_where_its_keys_end():
    assert calls((0, 0, 4), (0, 4, 6), (0, 4, 5)) == tuple(range(6))
    assert calls((0, 0, 4), (0, 8, 9)) == (*range(4), 8)


def test_a_sequence_whose_start_was_not_observed_counts_from_its_first_key():
    assert calls((3, 8, 9), (4, 9, 10)) == (5, 6)


def test_given_padding_longer_than_the_keys_determines_positions():
    q, k, v = qkv(T=1, S=4)
    padding = torch.arange(9) >= torch.tensor([[2], [6]])
    model = Attention()
    with observe(model, padding=padding) as watcher:
        model(q, k, v)
    (layer,) = watcher.observation().layers
    assert layer.positions == (8,)
    # The first real key is gone in the first row, and the second key in the other.
    weights = (q @ k.mT / 8**0.5).softmax(-1)
    assert_close(layer.heads["mass"][0].mean, float(weights[1, 0, 0, 1]) / 2)


def test_rows_of_given_padding_are_checked_after_a_cache_too():
    model = Attention()
    with (
        rejects("padding", hint="of this batch"),
        observe(model, padding=torch.ones(3, 4, dtype=torch.bool)),
    ):
        model(*qkv(T=1, S=4))
