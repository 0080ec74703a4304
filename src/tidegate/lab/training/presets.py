"""Sizes of models to train, with a length, a budget and a learning rate by one rule.

Twenty tokens for each parameter. The learning rate is 3e-3 up to a width of 144, as in the comparisons of small models;
from there on it falls with one over the width. That is the rule for matrices that read the width. One rate serves all
parameters: the embedding is also the head, which reads the width too.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.lab.training.machine import num_cores

TOKENS_PER_PARAMETER = 20
_LARGEST_LR = 3e-3
_WIDTH_OF_LARGEST_LR = 144
_WIDTH_OF_SEVERAL_THREADS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """A decoder's sizes, and those of a batch."""

    d_model: int
    num_layers: int
    num_heads: int
    length: int
    """Tokens of a sequence."""
    batch_size: int
    """Sequences of an update."""
    tokenizer: str = "bytes"
    """What text becomes tokens by, unless told otherwise."""

    @property
    def num_threads(self) -> int:
        """Threads on the CPU: one for each core; one alone below a width of 256, where several would mostly wait."""
        return num_cores() if self.d_model >= _WIDTH_OF_SEVERAL_THREADS else 1


SIZES: dict[str, ModelSize] = {
    # About 0.18, 1.0 and 14 million parameters: the models that `tidegate compare` trains.
    "tiny": ModelSize(d_model=80, num_layers=2, num_heads=4, length=128, batch_size=16),
    "small": ModelSize(d_model=144, num_layers=4, num_heads=6, length=256, batch_size=16),
    "base": ModelSize(d_model=384, num_layers=8, num_heads=6, length=512, batch_size=32),
    # About 34, 124 and 1,311 million with that many tokens; the second has the sizes of GPT-2 small, the third the
    # width, the depth and the batch of a million tokens of GPT-3 XL.
    "35m": ModelSize(d_model=512, num_layers=8, num_heads=8, length=1024, batch_size=128, tokenizer="bpe:16384"),
    "124m": ModelSize(d_model=768, num_layers=12, num_heads=12, length=1024, batch_size=256, tokenizer="bpe:50257"),
    "1.3b": ModelSize(d_model=2048, num_layers=24, num_heads=16, length=2048, batch_size=512, tokenizer="bpe:50257"),
}


def learning_rate(d_model: int) -> float:
    """The largest learning rate for a width: 3e-3, less in proportion where the width is more than 144."""
    return _LARGEST_LR * min(1.0, _WIDTH_OF_LARGEST_LR / d_model)


def token_budget(num_parameters: int) -> int:
    """Twenty tokens for each parameter."""
    return TOKENS_PER_PARAMETER * num_parameters
