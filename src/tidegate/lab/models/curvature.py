"""Measure the distribution of slice curvature for each layer of a trained model.

A layer is treated as a map from the input at one position, with all others fixed, to the outputs at that and all later
positions. Planes are random in the input space. Curvature is relative, K times the mean squared norm of an output: a
sphere around the origin has 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tidegate._validation import InputError
from tidegate.geometry import GeometryError, sectional_curvature
from tidegate.lab.models.language_models import LanguageModel
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.lab.training.measurements import QUANTILES, LayerCurvature, ModelCurvature, Sampling
from tidegate.torch import plain_kernel


class _Call(NamedTuple):
    """One call of a layer: its input (1, T, d), and a function that repeats it with another input."""

    input: Tensor
    repeat: Callable[[Tensor], Tensor]


def model_curvature(
    model: LanguageModel, windows: Tensor, sampling: Sampling | None = None, *, tell: Tell = ignore
) -> ModelCurvature:
    """Measure the curvature of every layer on windows of tokens.

    Args:
        model: The model, loaded with `derivatives=True`.
        windows: (sequences, positions) tokens.
        sampling: The layers, and the number of positions and planes; None takes the defaults.
        tell: Receives a `PartsDone` for each sequence.

    Raises:
        InputError: The windows have one position, or a block has no known attention.
        GeometryError: A layer cannot be differentiated in forward mode, or a slice is degenerate.
    """
    sampling = sampling or Sampling()
    layers = model.blocks if sampling.part == "block" else model.attentions()
    if windows.shape[1] < 2:
        raise InputError("windows", expected="(sequences, at least two positions)", got=tuple(windows.shape))
    found: list[list[NDArray[np.float64]]] = [[] for _ in layers]
    rng = np.random.default_rng(sampling.seed)
    last = windows.shape[1] - 1
    positions = sorted({int(place) for place in np.linspace(1, last, min(sampling.num_positions, last)).round()})
    for window in report_parts(windows.unbind(), tell, work="measuring", unit="sequence", describe=lambda _: ""):
        for layer, call in enumerate(_layer_calls(model, layers, window)):
            for position in positions:
                found[layer].append(_curvatures(call, position, sampling.num_planes, rng, layer))
    return ModelCurvature(
        model=model.name,
        sampling=sampling,
        num_sequences=len(windows),
        length=windows.shape[1],
        layers=tuple(_summary(layer, np.concatenate(parts)) for layer, parts in enumerate(found)),
    )


def _curvatures(
    call: _Call, position: int, num_planes: int, rng: np.random.Generator, layer: int
) -> NDArray[np.float64]:
    x = call.input.detach()

    def output(moved: Tensor) -> Tensor:
        inputs = torch.cat([x[:, :position], moved[None, None], x[:, position + 1 :]], dim=1)
        return call.repeat(inputs)[0, position:]

    with torch.no_grad(), plain_kernel():
        size = float((output(x[0, position]) ** 2).sum(dim=-1).mean())
    u, v = rng.standard_normal((2, num_planes, x.shape[-1]))
    try:
        with _TwiceDifferentiable():
            found = sectional_curvature(output, x[0, position], u, v, covariance=size, tangent="plane")
    except GeometryError as problem:
        raise GeometryError(f"Layer {layer}, position {position}: {problem}") from problem
    except (RuntimeError, NotImplementedError) as problem:
        reason = str(problem).splitlines()[0]
        raise GeometryError(f"Layer {layer} cannot be differentiated in forward mode: {reason}") from problem
    return found.numpy()


def _summary(layer: int, values: NDArray[np.float64]) -> LayerCurvature:
    return LayerCurvature(
        layer=layer,
        count=len(values),
        quantiles=tuple(np.quantile(values, QUANTILES).tolist()),
        magnitude=float(np.median(np.abs(values))),
        positive=float((values > 0).mean()),
    )


def _layer_calls(model: LanguageModel, layers: Sequence[nn.Module], window: Tensor) -> list[_Call]:
    """Run the model on a window, and return each layer's call."""
    calls: dict[int, _Call] = {}

    def keep(number: int, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        def repeat(x: Tensor) -> Tensor:
            result = module(x, *arguments[1:], **options) if arguments else module(**{**options, "hidden_states": x})
            return cast("Tensor", result[0] if isinstance(result, tuple) else result)

        calls[number] = _Call(arguments[0] if arguments else options["hidden_states"], repeat)

    with ExitStack() as hooks, torch.no_grad(), plain_kernel():
        for number, layer in enumerate(layers):
            hooks.callback(layer.register_forward_pre_hook(partial(keep, number), with_kwargs=True).remove)
        model.run(window[None])
    return [calls[number] for number in range(len(layers))]


class _TwiceDifferentiable(TorchFunctionMode):
    """Compute SiLU by its formula: PyTorch's own has no second derivative in forward mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.silu:
            return args[0] * torch.sigmoid(args[0])
        return func(*args, **(kwargs or {}))
