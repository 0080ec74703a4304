"""Run a model on a small synthetic input, to compare its outputs before and after a change.

Legend: B batch, T positions.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidegate.torch.retrofit.checks import cannot_gate

_POSITIONS = 8
_PADDED = 3
_INPUTS = ("input_ids", "pixel_values", "input_values", "input_features")
"""transformers' names of tokens, images and two kinds of audio."""


def probe_inputs(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a small synthetic input: images, audio, or tokens with left padding, right padding and none.

    An encoder with a decoder gets tokens for both. If a model may need several inputs at once, or several rows of
    tokens for each example, the first combination that it runs with is returned.

    Raises:
        InputError: If the model takes other inputs, or its configuration does not contain their size.
    """
    choices = list(_choices(model))
    for inputs in choices if len(choices) > 1 else []:
        # A model may raise any error for an input that it does not support.
        with suppress(Exception), torch.no_grad():
            model(**inputs)
            return inputs
    return choices[0]


def _choices(model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    config: Any = model.config
    main = model.main_input_name
    if main not in _INPUTS:
        raise cannot_gate(model, f"its input is {main!r}; supported are {', '.join(map(repr, _INPUTS))}")
    generator = torch.Generator().manual_seed(0)
    inputs = _make(main, model, generator)
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _tokens(model, generator, rows=len(inputs[main]), length=_POSITIONS - 2)
    yield inputs
    num_codebooks = getattr(config.get_text_config(), "num_codebooks", None)
    if main == "input_ids" and isinstance(num_codebooks, int):
        rows = len(inputs["attention_mask"]) * num_codebooks
        yield {**inputs, "input_ids": _tokens(model, generator, rows=rows, length=_POSITIONS)}
    wanted = [name for name in _INPUTS if name in inspect.signature(model.forward).parameters]
    parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    if len(wanted) > 1 and len(parts) > 1:
        for name in wanted:
            inputs = inputs if name == main else inputs | _make(name, model, generator)
        yield inputs


def _make(name: str, model: PreTrainedModel, generator: torch.Generator) -> dict[str, Tensor]:
    try:
        if name != "input_ids":
            numbers = torch.randn(_shape(name, model.config), generator=generator)
            return {name: numbers.to(model.device, model.dtype)}
        mask = torch.ones(3, _POSITIONS, dtype=torch.long)
        mask[0, :_PADDED] = 0
        mask[1, -_PADDED:] = 0
        tokens = _tokens(model, generator, rows=3, length=_POSITIONS)
        return {"input_ids": tokens, "attention_mask": mask.to(model.device)}
    except AttributeError as error:
        raise cannot_gate(model, f"its configuration does not contain the size of its {name}: {error}") from error


def _tokens(model: PreTrainedModel, generator: torch.Generator, *, rows: int, length: int) -> Tensor:
    config: Any = model.config
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(vocabulary, (rows, length), generator=generator).to(model.device)


def _shape(name: str, config: Any) -> tuple[int, ...]:
    """Return the shape of three images or three audio clips."""
    if name == "pixel_values":
        config = getattr(config, "vision_config", None) or config
        size = config.image_size
        return 3, config.num_channels, *((size, size) if isinstance(size, int) else size)
    if name == "input_features":
        if (width := getattr(config, "input_feat_per_channel", None)) is not None:
            return 3, 4 * _POSITIONS, width
        return 3, config.num_mel_bins, 2 * config.max_source_positions
    if (strides := getattr(config, "conv_stride", None)) is None:
        return 3, config.max_length, config.num_mel_bins
    # Samples for as many frames as a probe has positions.
    length = _POSITIONS
    for stride, kernel in zip(reversed(strides), reversed(config.conv_kernel), strict=True):
        length = (length - 1) * stride + kernel
    return 3, length


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Generator[None]:
    """Put the model into evaluation mode, and restore the mode of every module at the end."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def keep_random_state(model: torch.nn.Module) -> Generator[None]:
    """Restore the global random state at the end, of the CPU and of the GPUs with weights of the model."""
    gpus = {weight.device.index for weight in model.parameters() if weight.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(gpus)):
        yield


@torch.no_grad()
def run_probe(model: PreTrainedModel, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return all output tensors of one pass and, if the model has a cache, of two passes that share it.

    A cache that the configuration switches off is used too, because `generate` may use it.
    """
    whole = _run_with_cache(model, inputs)
    found = _tensors(whole)
    if getattr(whole, "past_key_values", None) is None:
        return found
    return [*found, *(tensor for part in run_in_two_passes(model, inputs) for tensor in _tensors(part))]


@torch.no_grad()
def has_cache(model: PreTrainedModel, inputs: dict[str, Tensor]) -> bool:
    """Return whether the model returns a cache with `use_cache=True`."""
    return getattr(_run_with_cache(model, inputs), "past_key_values", None) is not None


def _run_with_cache(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Any:
    """Run with a cache, even if the configuration switches it off; without one if there is none or it fails."""
    # Some models pass `use_cache` on without naming it.
    if inspect.signature(model.forward).parameters.keys().isdisjoint({"use_cache", "past_key_values"}):
        return model(**inputs)
    try:
        return model(**inputs, use_cache=True)
    except Exception:
        # A model may raise any error; if its cache is on by default, this raises it again.
        return model(**inputs)


@torch.no_grad()
def run_in_two_passes(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Iterator[Any]:
    """Yield the model's outputs for all tokens but the last, and for the last with the cache of the others."""
    if "decoder_input_ids" in inputs:
        tokens = inputs["decoder_input_ids"]
        encoded = {name: value for name, value in inputs.items() if name != "decoder_input_ids"}
        first = model(**encoded, decoder_input_ids=tokens[:, :-1], use_cache=True)
        yield first
        cache = first.past_key_values
        yield model(**encoded, decoder_input_ids=tokens[:, -1:], past_key_values=cache, use_cache=True)
    elif "input_ids" in inputs:
        tokens, mask = inputs["input_ids"], inputs["attention_mask"]
        first = model(input_ids=tokens[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
        yield first
        cache = first.past_key_values
        yield model(input_ids=tokens[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True)


def bitwise_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Return whether nan is in the same places, and all other elements are bitwise equal.

    Some attention functions return nan for a query that sees no key, and the bits of nan vary.
    """
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(*(_without_nan(x).contiguous().view(torch.uint8) for x in (a, b)))
        for a, b in zip(ours, theirs, strict=True)
    )


def largest_change(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Return the largest difference of two elements; infinite if only one of them is nan, 0 if both are."""
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        changes = (_without_nan(a).double() - _without_nan(b).double()).abs()
        largest = max(largest, float(changes.masked_fill(a.isnan() != b.isnan(), float("inf")).max()))
    return largest


def exceeds_rounding(ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Return whether outputs differ by more than the root of the dtype's epsilon, times the largest of theirs."""
    size = max(float(_without_nan(each).abs().max()) for each in theirs)
    return not largest_change(ours, theirs) <= size * torch.finfo(dtype).eps ** 0.5


def _without_nan(x: Tensor) -> Tensor:
    return x.masked_fill(x.isnan(), 0)


def _tensors(output: Any) -> list[Tensor]:
    return [value for value in output.to_tuple() if isinstance(value, Tensor)]
