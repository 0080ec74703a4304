"""Run a model on a small made-up input, to compare its answers before and after a change.

Legend: B batch, T positions.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

_POSITIONS = 8
_PADDED = 3


def probe_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Make random tokens with padding on the left, on the right and nowhere, or random images.

    A model whose main input is neither `input_ids` nor `pixel_values` is refused.
    """
    generator = torch.Generator().manual_seed(0)
    config: Any = model.config
    match model.main_input_name:
        case "input_ids":
            vocabulary = config.get_text_config().vocab_size
            tokens = torch.randint(vocabulary, (3, _POSITIONS), generator=generator)
            mask = torch.ones(3, _POSITIONS, dtype=torch.long)
            mask[0, :_PADDED] = 0
            mask[1, -_PADDED:] = 0
            return {"input_ids": tokens.to(model.device), "attention_mask": mask.to(model.device)}
        case "pixel_values":
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            images = torch.randn(2, config.num_channels, height, width, generator=generator)
            return {"pixel_values": images.to(model.device, model.dtype)}
        case other:
            raise ValueError(f"its input is {other!r}, and only 'input_ids' and 'pixel_values' can be made up")


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Generator[None]:
    """Hold the model in evaluation mode, then give every module back the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def keep_random_state(model: torch.nn.Module) -> Generator[None]:
    """Set the global random state back at the end: that of the CPU, and of the GPUs that hold weights."""
    gpus = {weight.device.index for weight in model.parameters() if weight.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(gpus)):
        yield


@torch.no_grad()
def answers(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return all tensors of the model's answer to one pass and, if it has a cache, to two that share it."""
    whole = model(**inputs)
    found = _tensors(whole)
    if getattr(whole, "past_key_values", None) is None or "input_ids" not in inputs:
        return found
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    first = model(input_ids=tokens[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
    second = model(input_ids=tokens[:, -1:], attention_mask=mask, past_key_values=first.past_key_values)
    return [*found, *_tensors(first), *_tensors(second)]


def bitwise_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Tell whether nan stands in the same places, and all bits are equal elsewhere.

    Some attention functions answer nan where a query may see nothing, and the bits of nan are not always the same.
    """
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan()) and torch.equal(_bits(a), _bits(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def largest_change(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of two numbers; infinite if only one of them is nan, 0 if both are."""
    return max(float(_changes(a, b).max()) for a, b in zip(ours, theirs, strict=True))


def largest_number(found: Sequence[Tensor]) -> float:
    """Return the largest absolute value, nan left out."""
    return max(float(_without_nan(each).abs().max()) for each in found)


def exceeds_rounding(change: float, size: float, dtype: torch.dtype) -> bool:
    """Tell whether numbers of this size changed by more than the root of the dtype's epsilon, or to nan."""
    return not change <= size * torch.finfo(dtype).eps ** 0.5


def _tensors(output: Any) -> list[Tensor]:
    return [value for value in output.to_tuple() if isinstance(value, Tensor)]


def _changes(ours: Tensor, theirs: Tensor) -> Tensor:
    changes = (_without_nan(ours).double() - _without_nan(theirs).double()).abs()
    return changes.masked_fill(ours.isnan() != theirs.isnan(), float("inf"))


def _without_nan(x: Tensor) -> Tensor:
    return x.masked_fill(x.isnan(), 0)


def _bits(x: Tensor) -> Tensor:
    return _without_nan(x).contiguous().view(torch.uint8)
