"""What a language model of ours makes of text: it goes on with it, and it says how likely it is."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tidegate.lab.models.language_models import Decode, LanguageModel
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.generate import next_token_probabilities
from tidegate.torch.precision import widen


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLoss:
    """How likely a text is to a model."""

    loss: float
    """Nats for each token."""
    num_tokens: int
    """That were predicted."""
    num_bytes: int
    """That they stand for."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Of the text, whatever the tokens."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes


@torch.no_grad()
def continue_text(
    model: LanguageModel,
    prompt: bytes,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[bytes]:
    """Draw what follows a prompt, and yield it as it comes, whole characters at a time.

    A `ValueError` says what is no model of ours, or has no tokens of text. The options are those of
    `tidegate.torch.generate`; the same seed draws the same text.
    """
    decoder, decode = _require_ours(model)
    tokens = model.encode(prompt)
    if not tokens:
        raise ValueError("--prompt must not be empty: there must be a first token to go on from.")
    caches = decoder.new_caches()
    generator = torch.Generator().manual_seed(seed)
    new, drawn, sent = torch.tensor([tokens]), list[int](), b""
    for _ in range(max_new_tokens):
        logits = decoder(new, caches=caches, num_logits=1)[:, 0]
        chances = next_token_probabilities(logits, temperature=temperature, top_k=top_k, top_p=top_p)
        new = torch.multinomial(chances, 1, generator=generator)
        drawn.append(int(new))
        # Decoded together: a character may take several tokens.
        text = _whole_characters(decode(drawn))
        if len(text) > len(sent):
            yield text[len(sent) :]
            sent = text


@torch.no_grad()
def text_loss(model: LanguageModel, windows: Tensor, *, batch_size: int = 4, tell: Tell = ignore) -> TextLoss:
    """The loss of a model on windows of tokens (count, length): of every token but the first of each window."""
    decoder, _ = _require_ours(model)
    assert model.token_bytes is not None
    total, num_bytes, batches = 0.0, 0, windows.split(batch_size)
    for batch in report_parts(batches, tell, work="evaluating", describe=lambda _: "", unit="batches"):
        logits, targets = decoder(batch[:, :-1]), batch[:, 1:]
        total += F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), reduction="sum").item()
        num_bytes += int(model.token_bytes[targets.numpy()].sum())
    count = windows[:, 1:].numel()
    return TextLoss(loss=total / count, num_tokens=count, num_bytes=num_bytes)


def require_decoder(model: LanguageModel) -> TransformerLM:
    """Return a model's module; a `ValueError` if it is not one of ours."""
    if not isinstance(model.module, TransformerLM):
        raise ValueError(
            f"MODEL {model.name} is a {type(model.module).__name__} of transformers, whose own tools do this. Give a "
            "model of tidegate train or save_model."
        )
    return model.module


def _require_ours(model: LanguageModel) -> tuple[TransformerLM, Decode]:
    decoder = require_decoder(model)
    if model.decode is None:
        raise ValueError(
            f"MODEL {model.name} has {model.vocab_size:,} tokens of which the text is not known. Put the "
            "tokenizer.json that it was trained with beside its model.safetensors."
        )
    if decoder.config.gates.read_other_sequences:
        raise ValueError(f"MODEL {model.name} has a gate that reads other sequences, and says nothing of one alone.")
    return decoder, model.decode


def _whole_characters(text: bytes) -> bytes:
    """The text without a character at its end of which bytes are missing."""
    for missing in range(1, 4):
        if len(text) >= missing and text[-missing] >= 0b1100_0000:
            needed = 2 if text[-missing] < 0b1110_0000 else 3 if text[-missing] < 0b1111_0000 else 4
            return text[:-missing] if needed > missing else text
    # A tokenizer shows what is no character, or not a whole one yet, by this sign.
    return text.removesuffix("�".encode())
