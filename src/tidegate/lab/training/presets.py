"""Model sizes, each with a length and a batch size; the budget and the learning rate follow one rule.

The budget is twenty tokens per parameter. The learning rate is 3e-3 up to a width of 144, as in the comparisons of
small models, and falls with one over the width above. This is the rule for matrices that read the width; one rate
serves all parameters, since the embedding is also the head, which reads the width too.
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
    """The sizes of a decoder and of a batch."""

    d_model: int
    num_layers: int
    num_heads: int
    length: int
    """Sequence length in tokens."""
    batch_size: int
    """In sequences."""
    tokenizer: str = "bytes"
    """Default tokenizer for text."""

    @property
    def num_threads(self) -> int:
        """CPU threads: one per core, or a single one below a width of 256, where several would mostly wait."""
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
    """Return the peak learning rate for a width: 3e-3 up to 144, then inversely proportional to the width."""
    return _LARGEST_LR * min(1.0, _WIDTH_OF_LARGEST_LR / d_model)


def token_budget(num_parameters: int) -> int:
    """Return twenty tokens per parameter."""
    return TOKENS_PER_PARAMETER * num_parameters
