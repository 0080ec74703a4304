"""Generate text, and compute likelihoods of text, with our language models."""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tidegate._validation import InputError
from tidegate.lab.models.language_models import Decode, LanguageModel
from tidegate.lab.tasks.streams import TokenStream
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.generate import next_token_probabilities
from tidegate.torch.precision import widen


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLoss:
    """The loss of a model on a text."""

    loss: float
    """Nats per token."""
    num_tokens: int
    """Number of predicted tokens."""
    num_bytes: int
    """Number of their bytes."""
    num_text_tokens: int
    """Number of tokens of the whole text, without the first."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Loss in bits per byte of text, comparable between tokenizers."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes

    def to_dict(self) -> dict[str, float]:
        """Return all numbers as JSON values."""
        return {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


@torch.no_grad()
def continue_text(
    model: LanguageModel,
    prompt: bytes | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[bytes]:
    """Generate text after a prompt, given as text or tokens, and yield it in pieces of whole characters.

    The options are those of `tidegate.torch.generate`; the same seed gives the same text.

    Raises:
        InputError: The prompt is empty, or the model is not one of ours or has an unknown tokenizer.
    """
    decoder, decode = _require_text_model(model)
    tokens = model.encode(prompt) if isinstance(prompt, bytes) else list(prompt)
    if not tokens:
        raise InputError("prompt", expected="at least one token", got=prompt)
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
def text_loss(
    model: LanguageModel,
    tokens: TokenStream,
    *,
    length: int,
    count: int | None = None,
    batch_size: int = 4,
    tell: Tell = ignore,
) -> TextLoss:
    """Return the loss of a model on tokens (n,) of a text, in blocks.

    A block reads `length` tokens and predicts the one after each of them; the next block starts where it ends. So every
    token except the first is predicted once, from the tokens before it in its block. The last block may be shorter.
    `count` blocks are evenly spread over the text; None takes all. A `PartsDone` is reported for each batch.

    Raises:
        InputError: The text is too short, or the model is not one of ours or has an unknown tokenizer.
    """
    decoder, _ = _require_text_model(model)
    assert model.token_bytes is not None
    if len(tokens) < 2:
        raise InputError("data", expected="at least two tokens", got=len(tokens), hint="Give more text.")
    total, num_tokens, num_bytes = 0.0, 0, 0
    batches = _batches_of_blocks(len(tokens) - 1, length, count, batch_size)
    for starts in report_parts(batches, tell, work="evaluating", describe=lambda _: "", unit="batch"):
        size = min(length, len(tokens) - 1 - int(starts[-1]))
        windows = torch.from_numpy(tokens[starts[:, None] + np.arange(size + 1)].astype(np.int64))
        logits, targets = decoder(windows[:, :-1]), windows[:, 1:]
        total += F.cross_entropy(widen(logits).flatten(0, 1), targets.flatten(), reduction="sum").item()
        num_tokens += targets.numel()
        num_bytes += int(model.token_bytes[targets.numpy()].sum())
    return TextLoss(
        loss=total / num_tokens, num_tokens=num_tokens, num_bytes=num_bytes, num_text_tokens=len(tokens) - 1
    )


def _batches_of_blocks(num_targets: int, length: int, count: int | None, batch_size: int) -> list[NDArray[np.int64]]:
    """Return the starts of the blocks of each batch; a shorter last block gets a separate batch."""
    starts = np.arange(0, num_targets, length)
    if count is not None and count < len(starts):
        starts = starts[np.arange(count) * len(starts) // count]
    num_whole = int((starts + length <= num_targets).sum())
    cuts = [*range(batch_size, num_whole, batch_size), num_whole]
    return [batch for batch in np.split(starts, cuts) if len(batch)]


class Continuation(NamedTuple):
    """The likelihood of a continuation."""

    log_likelihood: float
    """Nats, summed over the tokens."""
    is_greedy: bool
    """Whether every token is the most likely one."""


@torch.no_grad()
def continuations(
    model: LanguageModel,
    requests: Sequence[tuple[list[int], list[int]]],
    *,
    length: int,
    batch_size: int = 4,
    tell: Tell = ignore,
) -> list[Continuation]:
    """Return the likelihood of each continuation after its context, both as tokens.

    A continuation is predicted in blocks of at most `length` tokens. Each block reads at most `length` tokens, with as
    much preceding context as fits. A context must have at least one token.
    """
    decoder, _ = _require_text_model(model)
    windows: list[tuple[int, list[int], list[int]]] = []
    for number, (context, continuation) in enumerate(requests):
        tokens = [*context, *continuation]
        for start in range(len(context), len(tokens), length):
            end = min(start + length, len(tokens))
            # The targets of a block belong to its last inputs.
            windows.append((number, tokens[max(0, end - 1 - length) : end - 1], tokens[start:end]))
    # Windows of similar length need little padding.
    windows.sort(key=lambda window: len(window[1]))
    totals, greedy = [0.0] * len(requests), [True] * len(requests)
    batches = [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]
    for batch in report_parts(batches, tell, work="evaluating", describe=lambda _: "", unit="batch"):
        # The scored tokens cannot see the padding at the end.
        padded = pad_sequence([torch.tensor(inputs) for _, inputs, _ in batch], batch_first=True)
        for (number, inputs, targets), logits in zip(batch, decoder(padded), strict=True):
            own = widen(logits[len(inputs) - len(targets) : len(inputs)])
            wanted = torch.tensor(targets)
            totals[number] -= F.cross_entropy(own, wanted, reduction="sum").item()
            greedy[number] &= bool((own.argmax(dim=-1) == wanted).all())
    return [Continuation(total, likeliest) for total, likeliest in zip(totals, greedy, strict=True)]


def require_decoder(model: LanguageModel) -> TransformerLM:
    """Return a model's module; raise InputError if it is not one of ours."""
    if not isinstance(model.module, TransformerLM):
        hint = "Use transformers, or the model that it was exported from."
        expected = "a model of tidegate train or save_model"
        raise InputError("model", expected=expected, got=f"a {type(model.module).__name__} in {model.place}", hint=hint)
    return model.module


def _require_text_model(model: LanguageModel) -> tuple[TransformerLM, Decode]:
    """Return a model's module and the decoder of its tokenizer; raise InputError if it cannot process text."""
    decoder = require_decoder(model)
    if model.decode is None:
        expected = f"one with a known tokenizer for its {model.vocab_size:,} tokens"
        hint = "Put the tokenizer.json of the training beside its model.safetensors."
        raise InputError("model", expected=expected, got=model.name, hint=hint)
    if decoder.config.gates.read_other_sequences:
        raise InputError("model", expected="one without a gate that reads other sequences", got=model.name)
    return decoder, model.decode


def _whole_characters(text: bytes) -> bytes:
    """Return the text without an incomplete character at its end; other invalid bytes stay."""
    # The incremental decoder holds back the bytes of an incomplete character.
    whole = codecs.getincrementaldecoder("utf-8")("surrogateescape").decode(text)
    # A tokenizer decodes an incomplete character to this one.
    return whole.removesuffix("\N{REPLACEMENT CHARACTER}").encode("utf-8", "surrogateescape")
