import copy

import pytest
import torch
from closeness import assert_close
from covers import axis, over
from errors import rejects
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from tidegate import PRESETS
from tidegate.config import TransformerConfig
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.generate import next_token_probabilities

EVERY_GATE = ["none", *PRESETS]
PLACES = {
    "rotary": {"positions": "rotary"},
    "learned": {"positions": "learned"},
    "rotary window": {"positions": "rotary", "window": 3},
    "learned window": {"positions": "learned", "window": 3, "num_kv_heads": 2},
    "none": {"positions": "none", "num_kv_heads": 1},
}
every_gate_and_place = over(gate=axis(EVERY_GATE, "bma", "g1"), options=axis(PLACES, "learned window"))


def make(**options):
    """Return a small model with large matrices, so that it does not repeat one token."""
    sizes = {"vocab_size": 31, "d_model": 24, "num_layers": 2, "max_length": 32}
    model = TransformerLM(TransformerConfig(**sizes | options), dtype=torch.float64)
    model.reset_parameters(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20 if parameter.ndim > 1 else 1)
    return model


def sample(batch, length, *, seed=1):
    return torch.randint(31, (batch, length), generator=torch.Generator().manual_seed(seed))


def recomputed(model, tokens, count):
    """Decode greedily, and recompute the whole sequence for each token."""
    for _ in range(count):
        tokens = torch.cat((tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)), dim=1)
    return tokens


def left_padded(prompts, *, filler=5):
    width = max(prompt.shape[1] for prompt in prompts)
    padded = [F.pad(prompt, (width - prompt.shape[1], 0), value=filler) for prompt in prompts]
    masks = [F.pad(torch.ones_like(prompt, dtype=torch.bool), (width - prompt.shape[1], 0)) for prompt in prompts]
    return torch.cat(padded), torch.cat(masks)


@every_gate_and_place
def test_cached_greedy_decoding_equals_recomputation(gate, options):
    model, prompt = make(gate=gate, **options), sample(3, 5)
    expected = recomputed(model, prompt, 8)
    assert len(expected[:, 5:].unique()) > 3
    assert torch.equal(model.generate(prompt, max_new_tokens=8, temperature=0), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_generation_rounds_as_the_model_does(dtype):
    model, prompt = make(gate="bma", qk_norm=True).to(dtype), sample(3, 5)
    tokens, caches = model.generate(prompt, max_new_tokens=6, temperature=0), model.new_caches(10)
    with torch.no_grad():
        logits = [model(chunk, caches=caches)[:, -1:] for chunk in tokens[:, :-1].split([5, *[1] * 5], dim=1)]
    assert torch.equal(torch.cat(logits, dim=1).argmax(-1), tokens[:, 5:])


def test_an_embedding_that_limits_its_norms_is_read_as_the_model_reads_it():
    model, prompt = make(max_length=64).float(), sample(2, 5)
    model.embedding.max_norm = 0.5
    expected = recomputed(copy.deepcopy(model), prompt, 50)
    assert torch.equal(model.generate(prompt, max_new_tokens=50, temperature=0), expected)


@every_gate_and_place
def test_left_padded_prompts_in_a_batch_equal_each_alone(gate, options):
    model = make(gate=gate, **options)
    prompts = [sample(1, length, seed=length) for length in (1, 4, 7)]
    padded, mask = left_padded(prompts)
    together = model.generate(padded, max_new_tokens=6, temperature=0, prompt_mask=mask)
    alone = torch.cat([model.generate(prompt, max_new_tokens=6, temperature=0)[:, -6:] for prompt in prompts])
    assert torch.equal(together[:, :7], padded)
    assert torch.equal(together[:, 7:], alone)


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-9}], ids=str)
def test_each_filter_has_greedy_decoding_as_its_limit(filters):
    model, prompt = make(), sample(3, 5)
    torch.manual_seed(0)
    assert torch.equal(
        model.generate(prompt, max_new_tokens=8, **filters), model.generate(prompt, max_new_tokens=8, temperature=0)
    )


def test_a_generator_decides_what_is_drawn():
    model, prompt = make(), sample(3, 5)
    first, again, other = (
        model.generate(prompt, max_new_tokens=8, temperature=3.0, generator=torch.Generator().manual_seed(seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_rows_that_have_stopped_go_on_with_padding():
    model, prompt = make(), sample(3, 5)
    free = model.generate(prompt, max_new_tokens=8, temperature=0)[:, 5:]
    stop = free[0, 2].item()
    stopped = model.generate(prompt, max_new_tokens=8, temperature=0, stop_tokens=[stop], pad_token=30)[:, 5:]
    assert free[1, 0] != stop
    for row, wanted in zip(stopped, free, strict=True):
        ends = (wanted == stop).nonzero().flatten().tolist()
        length = ends[0] + 1 if ends else 8
        assert torch.equal(row[:length], wanted[:length])
        assert (row[length:] == 30).all()


def test_generation_ends_once_every_row_has_stopped():
    model, prompt = make(), sample(3, 5)
    free = model.generate(prompt, max_new_tokens=8, temperature=0)
    stops = free[:, 6].tolist()
    stopped = model.generate(prompt, max_new_tokens=8, temperature=0, stop_tokens=torch.tensor(stops))
    assert stopped.shape[1] <= 7
    assert model.generate(prompt, max_new_tokens=8, stop_tokens=range(31)).shape == (3, 6)


def test_an_empty_batch_stays_empty():
    empty = sample(0, 3)
    mask = torch.ones_like(empty, dtype=torch.bool)
    for options in ({}, {"prompt_mask": mask}, {"temperature": 0}, {"stop_tokens": [1]}):
        assert make().generate(empty, max_new_tokens=2, **options).shape[0] == 0


def test_tokens_may_be_trained_on_and_written_to():
    model = make(num_layers=1)
    tokens = model.generate(sample(1, 3), max_new_tokens=2)
    assert not tokens.requires_grad
    tokens[0, 0] = 1
    model(tokens).sum().backward()
    assert model.embedding.weight.grad is not None


def test_learned_positions_are_used_to_the_last():
    model = make(positions="learned", max_length=8)
    assert model.generate(sample(1, 5), max_new_tokens=4).shape == (1, 9)
    padded, mask = left_padded([sample(1, 2), sample(1, 5)])
    wider, wider_mask = F.pad(padded, (3, 0)), F.pad(mask, (3, 0))
    assert model.generate(wider, max_new_tokens=4, prompt_mask=wider_mask).shape == (2, 12)


logits_of = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=9).map(
    lambda row: torch.tensor(row, dtype=torch.float64)
)


@given(logits=logits_of, temperature=st.floats(0.1, 5))
def test_without_filters_tokens_follow_the_gibbs_distribution(logits, temperature):
    assert_close(next_token_probabilities(logits, temperature=temperature), (logits / temperature).softmax(-1))


@given(logits=logits_of, top_k=st.integers(1, 12))
def test_top_k_keeps_the_k_likeliest_in_their_proportions(logits, top_k):
    kept, plain = next_token_probabilities(logits, top_k=top_k), logits.softmax(-1)
    chosen = kept > 0
    assert chosen.sum() == min(top_k, len(logits))
    assert_close(kept[chosen], plain[chosen] / plain[chosen].sum())
    assert chosen.all() or plain[chosen].min() >= plain[~chosen].max()


@given(logits=logits_of, top_p=st.floats(1e-6, 1))
def test_the_nucleus_is_the_smallest_set_with_its_probability(logits, top_p):
    kept, plain = next_token_probabilities(logits, top_p=top_p), logits.softmax(-1)
    chosen = kept > 0
    assert_close(kept[chosen], plain[chosen] / plain[chosen].sum())
    assert chosen.all() or plain[chosen].min() >= plain[~chosen].max()
    assert plain[chosen].sum() >= top_p - 1e-12
    assert plain[chosen].sum() - plain[chosen].min() < top_p + 1e-12


@given(logits=logits_of)
def test_temperature_zero_is_certain_of_the_likeliest(logits):
    certain = next_token_probabilities(logits, temperature=0)
    assert torch.equal(certain, F.one_hot(logits.argmax(), len(logits)).double())


def test_both_filters_together_are_the_nucleus_of_the_k_likeliest():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    # Among the first three the probabilities are 4/9, 3/9, 2/9: 0.75 needs two of them.
    both = next_token_probabilities(logits, top_k=3, top_p=0.75)
    assert_close(both, torch.tensor([4 / 7, 3 / 7, 0, 0], dtype=torch.float64))


@pytest.mark.parametrize("filters", [{"top_p": 0.6}, {"top_k": 3}, {"top_k": 9, "top_p": 0.5}], ids=str)
def test_tokens_outside_the_filters_are_never_drawn(filters):
    model, prompt = make(), sample(1, 4)
    options = filters | {"temperature": 20.0}
    allowed = next_token_probabilities(model(prompt)[0, -1], **options).nonzero().flatten().tolist()
    generator = torch.Generator().manual_seed(0)
    drawn = model.generate(prompt.expand(200, 4), max_new_tokens=1, generator=generator, **options)[:, -1].tolist()
    assert 1 < len(set(drawn)) <= len(allowed) < 31
    assert set(drawn) <= set(allowed)


def test_logits_of_any_size_and_bans_are_borne():
    logits = torch.tensor([3e38, -3e38, float("-inf"), 3e38])
    assert next_token_probabilities(logits, temperature=1e-3).tolist() == [0.5, 0, 0, 0.5]


PROMPT = sample(2, 3)
REJECTED = [
    ({"prompt": PROMPT[0]}, "prompt", ""),
    ({"prompt": PROMPT.double()}, "tokens", ""),
    ({"max_new_tokens": 0}, "max_new_tokens", ""),
    ({"max_new_tokens": 31}, "max_new_tokens", ""),
    ({"prompt": sample(1, 40)}, "prompt", "Shorten prompt"),
    ({"prompt": PROMPT + 31}, "prompt", "tokenizer"),
    ({"temperature": -1.0}, "temperature", ""),
    ({"top_k": 2.5}, "top_k", ""),
    ({"top_p": 0.0}, "top_p", ""),
    ({"stop_tokens": [3, 31]}, "stop_tokens and pad_token", ""),
    ({"pad_token": -1}, "stop_tokens and pad_token", ""),
    ({"prompt_mask": torch.ones(2, 3)}, "prompt_mask", ""),
    ({"prompt_mask": torch.ones(2, 2, dtype=torch.bool)}, "prompt_mask", ""),
    ({"prompt_mask": torch.tensor([[True, True, False], [True] * 3])}, "prompt_mask", "Pad left"),
    ({"prompt_mask": torch.tensor([[False] * 3, [True] * 3])}, "prompt_mask", "Pad left"),
]


@pytest.mark.parametrize(("arguments", "field", "hint"), REJECTED)
def test_an_argument_that_does_not_fit_is_rejected_by_name(arguments, field, hint):
    with rejects(field, hint=hint):
        make(positions="learned").generate(**{"prompt": PROMPT, "max_new_tokens": 2} | arguments)


@pytest.mark.parametrize("options", [{"dropout": 0.1}, {"attention_dropout": 0.1}], ids=str)
def test_a_model_that_would_drop_out_is_refused_in_training(options):
    model = make(**options)
    with rejects("model", hint="Call model.eval() first"):
        model.generate(PROMPT, max_new_tokens=2)
    assert model.eval().generate(PROMPT, max_new_tokens=2).shape == (2, 5)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused_at_any_temperature(temperature, broken):
    model = make(tie_embeddings=False)
    prompt = torch.tensor([[1, 2], [1, 3], [3, 1]])
    with torch.no_grad():
        model.embedding.weight[3] = broken
    with rejects("logits", hint="row 1, 2 of prompt. Look for nan"):
        model.generate(prompt, max_new_tokens=2, temperature=temperature)
    # The logits of a row that has stopped are not checked.
    stop = model.generate(prompt[:1], max_new_tokens=1, temperature=0)[0, -1].item()
    with torch.no_grad():
        model.embedding.weight[stop] = broken
    stopped = model.generate(prompt[:1], max_new_tokens=3, temperature=0, stop_tokens=[stop])
    assert stopped[0, -1] == stop


def test_a_row_that_has_stopped_may_break():
    model = make(tie_embeddings=False)
    prompt = torch.tensor([[1, 2], [4, 5]])
    free = model.generate(prompt, max_new_tokens=3, temperature=0)
    stop = free[0, 2].item()
    assert stop not in (*prompt.flatten().tolist(), *free[1, 2:].tolist(), 0)
    with torch.no_grad():
        model.embedding.weight[0] = float("nan")
    # The first row continues with the padding token 0, whose logits are nan.
    found = model.generate(prompt, max_new_tokens=3, temperature=0, stop_tokens=[stop])
    assert found[0].tolist() == [*prompt[0].tolist(), stop, 0, 0]
    assert torch.equal(found[1], free[1])


@pytest.mark.parametrize("stop_tokens", [5, None, 2.5])
def test_stop_tokens_that_are_not_several_are_refused(stop_tokens):
    model, prompt = make(), sample(1, 3)
    with pytest.raises(TypeError, match=r"^stop_tokens must be"):
        model.generate(prompt, max_new_tokens=2, stop_tokens=stop_tokens)
