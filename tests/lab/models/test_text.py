import math

import numpy as np
import pytest
import torch
from errors import rejects
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.lab.models.language_models import make_language_model
from tidegate.lab.models.text import _whole_characters, continue_text, text_loss
from tidegate.torch import TransformerLM


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    decoder = TransformerLM(TransformerConfig(gate="g1", d_model=16, num_layers=2, num_heads=2, init=0.3))
    return make_language_model(decoder, name="m", derivatives=False)


TOKENS = np.random.default_rng(1).integers(0, 256, 48).astype(np.uint8)


def nats_of_each(model, length):
    """What each token but the first costs after those before it in its block."""
    tokens = torch.from_numpy(TOKENS.astype(np.int64))
    places = range(1, len(tokens))
    rows = [model.module(tokens[None, (place - 1) // length * length : place])[0, -1] for place in places]
    return F.cross_entropy(torch.stack(rows), tokens[1:], reduction="none")


@pytest.mark.parametrize("length", [1, 9, 47, 100])
def test_every_token_of_a_text_but_the_first_is_predicted_once_after_its_block(model, length):
    found = text_loss(model, TOKENS, length=length, batch_size=2)
    assert (found.num_tokens, found.num_bytes, found.num_text_tokens) == (47, 47, 47)
    assert found.loss == pytest.approx(nats_of_each(model, length).mean().item(), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_a_sample_is_of_whole_blocks_spread_over_the_text_and_says_how_long_the_text_is(model):
    found = text_loss(model, TOKENS, length=9, count=2)
    each = nats_of_each(model, 9)
    assert (found.num_tokens, found.num_text_tokens) == (18, 47)
    assert found.loss == pytest.approx(torch.cat([each[:9], each[27:36]]).mean().item(), rel=1e-5)
    assert text_loss(model, TOKENS, length=9, count=6) == text_loss(model, TOKENS, length=9)


def test_a_text_of_one_token_is_rejected(model):
    with rejects("data", hint="more text"):
        text_loss(model, TOKENS[:1], length=9)


def test_the_text_is_the_one_that_the_model_generates(model):
    pieces = list(continue_text(model, b"abc", max_new_tokens=20, temperature=0.0))
    prompt = torch.tensor([list(b"abc")])
    expected = bytes(model.module.generate(prompt, max_new_tokens=20, temperature=0.0)[0, 3:].tolist())
    assert b"".join(pieces) == _whole_characters(expected)
    samples = [b"".join(continue_text(model, b"abc", max_new_tokens=30, seed=seed)) for seed in (1, 1, 2)]
    assert samples[0] == samples[1] != samples[2]


@pytest.mark.parametrize("text", ["aé", "€", "𝄞", "plain"])
def test_a_character_is_returned_when_all_of_its_bytes_are_there(text):
    content = text.encode()
    for end in range(len(content) + 1):
        whole = _whole_characters(content[:end])
        assert content.startswith(whole)
        assert text.startswith(whole.decode())
    assert _whole_characters(content) == content
    # Byte-pair tokenizers decode an incomplete character to the replacement character.
    assert _whole_characters(content + "\N{REPLACEMENT CHARACTER}".encode()) == content
    assert _whole_characters(b"\xff" + content) == b"\xff" + content


def test_a_model_with_an_unknown_tokenizer_is_rejected():
    decoder = TransformerLM(TransformerConfig(gate="none", d_model=16, num_layers=1, num_heads=2, vocab_size=300))
    other = make_language_model(decoder, name="m", derivatives=False)
    with rejects("model", hint="tokenizer.json"):
        text_loss(other, np.zeros(4, dtype=np.int64), length=4)
