import math

import pytest
import torch
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.lab.models.language_models import language_model_of
from tidegate.lab.models.text import _whole_characters, continue_text, text_loss
from tidegate.torch import TransformerLM


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    decoder = TransformerLM(TransformerConfig(gate="g1", d_model=16, num_layers=2, num_heads=2, init=0.3))
    return language_model_of(decoder, name="m", derivatives=False)


def test_the_loss_is_the_mean_over_all_tokens_but_the_first_of_each_window(model):
    windows = torch.randint(256, (5, 9), generator=torch.Generator().manual_seed(1))
    found = text_loss(model, windows, batch_size=2)
    expected = F.cross_entropy(model.module(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    assert found.loss == pytest.approx(expected.item(), rel=1e-6)
    assert (found.num_tokens, found.num_bytes) == (40, 40)
    assert found.bits_per_byte == pytest.approx(found.loss / math.log(2))
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_the_text_is_that_of_the_models_own_generation(model):
    pieces = list(continue_text(model, b"abc", max_new_tokens=20, temperature=0.0))
    prompt = torch.tensor([list(b"abc")])
    expected = bytes(model.module.generate(prompt, max_new_tokens=20, temperature=0.0)[0, 3:].tolist())
    assert b"".join(pieces) == _whole_characters(expected)
    drawn = [b"".join(continue_text(model, b"abc", max_new_tokens=30, seed=seed)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("text", ["aé", "€", "𝄞", "plain"])
def test_a_character_is_shown_when_all_of_its_bytes_are_there(text):
    content = text.encode()
    for end in range(len(content) + 1):
        whole = _whole_characters(content[:end])
        assert content.startswith(whole)
        assert text.startswith(whole.decode())
    assert _whole_characters(content) == content


def test_a_model_whose_tokens_have_no_text_is_refused():
    decoder = TransformerLM(TransformerConfig(gate="none", d_model=16, num_layers=1, num_heads=2, vocab_size=300))
    other = language_model_of(decoder, name="m", derivatives=False)
    with pytest.raises(ValueError, match=r"300 tokens of which the text is not known.*tokenizer.json"):
        text_loss(other, torch.zeros(1, 4, dtype=torch.int64))
