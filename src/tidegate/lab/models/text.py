"""What a language model of ours makes of text: it goes on with it, and it says how likely it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from tidegate.lab.models.language_models import Decode, LanguageModel
from tidegate.lab.tasks.streams import TokenStream
from tidegate.lab.tasks.task import DataError
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
    num_text_tokens: int
    """Of the whole text, but for the first, which has nothing before it."""

    @property
    def perplexity(self) -> float:
        """The exponential of the loss."""
        return math.exp(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Of the text, whatever the tokens."""
        return self.loss * self.num_tokens / math.log(2) / self.num_bytes

    def to_dict(self) -> dict[str, float]:
        """As plain JSON values, what follows from the others included."""
        return {**asdict(self), "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


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
    _require_ours(model)
    tokens = model.encode(prompt)
    if not tokens:
        raise ValueError("--prompt must not be empty: there must be a first token to go on from.")
    yield from continue_tokens(
        model,
        tokens,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )


@torch.no_grad()
def continue_tokens(
    model: LanguageModel,
    tokens: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[bytes]:
    """Draw what follows at least one token, as `continue_text` does."""
    decoder, decode = _require_ours(model)
    caches = decoder.new_caches()
    generator = torch.Generator().manual_seed(seed)
    new, drawn, sent = torch.tensor([list(tokens)]), list[int](), b""
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
    """The loss of a model on a text: in blocks, each token after those before it in its block.

    A block reads `length` tokens and predicts the one after each of them; the next block begins where it ends. So every
    token of the text but the first is predicted once. The last block may be shorter.

    tokens : (n,), at least two
    count  : blocks to take, evenly spread over the text; None takes all
    """
    decoder, _ = _require_ours(model)
    assert model.token_bytes is not None
    if len(tokens) < 2:
        raise DataError(
            f"--data must hold at least two tokens, one to predict the other from; got {len(tokens)}. Give more text."
        )
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
    """Where the blocks of each batch start; a block that is shorter than the others is a batch of its own."""
    starts = np.arange(0, num_targets, length)
    if count is not None and count < len(starts):
        starts = starts[np.arange(count) * len(starts) // count]
    num_whole = int((starts + length <= num_targets).sum())
    cuts = [*range(batch_size, num_whole, batch_size), num_whole]
    return [batch for batch in np.split(starts, cuts) if len(batch)]


class Continuation(NamedTuple):
    """How likely tokens are after others."""

    log_likelihood: float
    """Nats, summed over the tokens."""
    is_greedy: bool
    """Whether each of them is the likeliest."""


@torch.no_grad()
def continuations(
    model: LanguageModel,
    requests: Sequence[tuple[list[int], list[int]]],
    *,
    length: int,
    batch_size: int = 4,
    tell: Tell = ignore,
) -> list[Continuation]:
    """Say how likely each continuation is after its context, both as tokens, with windows of a length.

    A continuation is predicted in blocks of `length` tokens, each after as much of what is before it as fits: `length`
    tokens in all are read at a time. A context must have at least one token.
    """
    decoder, _ = _require_ours(model)
    windows = [
        (number, inputs, targets)
        for number, (context, continuation) in enumerate(requests)
        for inputs, targets in prediction_windows(context, continuation, length)
    ]
    # Windows of about one length fill a batch with little padding.
    windows.sort(key=lambda window: len(window[1]))
    totals, greedy = [0.0] * len(requests), [True] * len(requests)
    batches = [windows[start : start + batch_size] for start in range(0, len(windows), batch_size)]
    for batch in report_parts(batches, tell, work="evaluating", describe=lambda _: "", unit="batch"):
        # Padding stands behind, where no token that counts sees it.
        padded = pad_sequence([torch.tensor(inputs) for _, inputs, _ in batch], batch_first=True)
        for (number, inputs, targets), logits in zip(batch, decoder(padded), strict=True):
            own = widen(logits[len(inputs) - len(targets) : len(inputs)])
            wanted = torch.tensor(targets)
            totals[number] -= F.cross_entropy(own, wanted, reduction="sum").item()
            greedy[number] &= bool((own.argmax(dim=-1) == wanted).all())
    return [Continuation(total, likeliest) for total, likeliest in zip(totals, greedy, strict=True)]


def prediction_windows(
    context: list[int], continuation: list[int], length: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the inputs, at most `length`, and the targets of each block; the last targets of the inputs are meant."""
    tokens = [*context, *continuation]
    for start in range(len(context), len(tokens), length):
        end = min(start + length, len(tokens))
        yield tokens[max(0, end - 1 - length) : end - 1], tokens[start:end]


def require_decoder(model: LanguageModel) -> TransformerLM:
    """Return a model's module; a `ValueError` if it is not one of ours."""
    if not isinstance(model.module, TransformerLM):
        raise ValueError(
            f"MODEL {model.place} is a {type(model.module).__name__} of transformers, whose own tools do this. Give a "
            "model of tidegate train or save_model; for an exported one, what it was exported from."
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
