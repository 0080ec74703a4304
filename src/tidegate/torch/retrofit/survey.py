"""Find the attention modules of a loaded model by running a small input through it.

A module calls transformers' attention function, or its attention is decomposed: a softmax over keys that multiplies
values, or PyTorch's own attention, followed by a matrix whose input is bitwise equal to the concatenated heads.

Legend: B batch, T query positions, S key positions, W width of a projection, H query heads, D head width.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from tidegate.torch.retrofit.checks import require_attention
from tidegate.torch.retrofit.flow import Trace, Watch, gradient_to
from tidegate.torch.retrofit.interface import (
    calls_interface,
    gated_implementation,
    implementation_in,
    keeps_to_stock,
    remember_functions,
    stock_implementation,
)
from tidegate.torch.retrofit.layer import gated_layers
from tidegate.torch.retrofit.layout import AttentionLayout, weight_of
from tidegate.torch.retrofit.probe import (
    bitwise_equal,
    evaluation_mode,
    has_cache,
    keep_random_state,
    run_in_two_passes,
    run_probe,
)

NOT_REACHED = "a plain input does not reach it, or the model runs it without gradients"
UNFIT = "its attention is decomposed, and its heads are not the input of an output projection unchanged"

_ATTENTION = "scaled_dot_product_attention"
_OPERANDS = {
    "softmax": ("input",),
    "matmul": ("input", "other"),
    "__matmul__": ("input", "other"),
    "bmm": ("input", "mat2"),
    _ATTENTION: ("query", "key", "value"),
}
"""The operators that are recorded, and the names of their operands, in order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The attention modules of a model."""

    layers: tuple[AttentionLayout, ...]
    """Those that a small input reaches, in the order in which they run."""
    left_out: dict[str, str] = field(default_factory=dict[str, str])
    """Why the others cannot take gates, by their paths."""


def survey_attention(model: PreTrainedModel, inputs: dict[str, Tensor]) -> Survey:
    """Find the attention modules of a model by running it on an input.

    Raises:
        InputError: If the input reaches none of them.
    """
    with evaluation_mode(model), keep_random_state(model):
        calling: dict[nn.Module, str] = {
            module: name for name, module in model.named_modules() if calls_interface(type(module))
        }
        found = _find_on_interface(model, inputs, calling) if calling else []
        known = {layer.module for layer in found}
        decomposed, unfit = _find_decomposed(model, inputs, known)
        found += [replace(layer, in_function=False) for layer in decomposed]
        require_attention(model, found)
        layers = _note_cache(model, inputs, found)
    reached = {layer.module for layer in layers}
    left_out = {name: NOT_REACHED for module, name in calling.items() if module not in reached}
    return Survey(layers=layers, left_out=left_out | dict.fromkeys(unfit, UNFIT))


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Generator[None]:
    """Switch the model temporarily to another attention implementation."""
    before = implementation_in(model)
    if name == before:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _find_on_interface(
    model: PreTrainedModel, inputs: dict[str, Tensor], calling: dict[nn.Module, str]
) -> list[AttentionLayout]:
    """Return the layouts of the modules that call the attention interface, in the order in which they run."""
    watch = Watch(model, calling)
    gated = gated_implementation(stock_implementation(implementation_in(model)))
    with implementation(model, gated), watch.recording(keyword="attn_seen"), torch.enable_grad():
        model(**inputs)
    found = [layout for trace in watch.traces.values() if (layout := trace.layout()) is not None]
    for layer in found:
        remember_functions(type(layer.module))
    in_function = _supports_gated_twin(model, inputs)
    return [replace(layer, in_function=in_function) for layer in found]


def _supports_gated_twin(model: PreTrainedModel, inputs: dict[str, Tensor]) -> bool:
    """Return whether the gated implementation without gates is bitwise equal to the stock one.

    Some modules depend on the implementation's name.
    """
    if any(layer.acts_in_function for layer in gated_layers(model)):
        return True
    if any(keeps_to_stock(type(module)) for module in model.modules()):
        return False
    stock = stock_implementation(implementation_in(model))
    with implementation(model, stock):
        before = run_probe(model, inputs)
    with implementation(model, gated_implementation(stock)):
        return bitwise_equal(run_probe(model, inputs), before)


def _note_cache(
    model: PreTrainedModel, inputs: dict[str, Tensor], layers: list[AttentionLayout]
) -> tuple[AttentionLayout, ...]:
    """Set `spans_cache` of projections that receive all positions of a cache when only one is new."""
    inner = {part.slot.module for layer in layers for part in layer.parts.values() if part.source == "inner"}
    if not inner or not has_cache(model, inputs):
        return tuple(layers)
    lengths: dict[nn.Module, int] = {}

    def note(module: nn.Module, _args: Any, output: Tensor) -> None:
        lengths[module] = output.shape[-2]

    with ExitStack() as stack:
        for projection in inner:
            stack.enter_context(projection.register_forward_hook(note))
        # The last length counts, from the pass over one new position.
        list(run_in_two_passes(model, inputs))
    noted: list[AttentionLayout] = []
    for layer in layers:
        spans = {kind: lengths.get(part.slot.module, 0) > 1 for kind, part in layer.parts.items()}
        parts = {kind: replace(part, spans_cache=spans[kind]) for kind, part in layer.parts.items()}
        noted.append(replace(layer, parts=parts))
    return tuple(noted)


def _find_decomposed(
    model: PreTrainedModel, inputs: dict[str, Tensor], known: set[nn.Module]
) -> tuple[list[AttentionLayout], list[str]]:
    """Return the layouts of modules with decomposed attention, in the order in which they run.

    The second list has the paths of modules whose heads are not the unchanged input of a matrix.
    """
    # Candidates have a matrix as a child, or a convolution, which cannot be gated.
    names: dict[nn.Module, str] = {
        module: name
        for name, module in model.named_modules()
        if module not in known
        and any((weight := weight_of(child)) is not None and weight.ndim >= 2 for child in module.children())
    }
    watch = Watch(model, names)
    operators = _Operators(watch)
    with watch.recording(), torch.enable_grad(), ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(module.register_forward_pre_hook(operators.enter))
            stack.enter_context(module.register_forward_hook(operators.leave, always_call=True))
        stack.enter_context(operators)
        model(**inputs)
    found = (trace.layout() for trace in watch.traces.values())
    layouts = [layout for layout in found if layout is not None and layout.output is not None]
    fitting = {layout.name for layout in layouts}
    return layouts, [trace.name for trace in operators.attending if trace.name not in fitting]


class _Operators(TorchFunctionMode):
    """Records the operators that the modules call."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.running: list[nn.Module] = []
        """The modules that are running, the innermost last."""
        self.softmax: dict[Trace, tuple[Tensor, Tensor]] = {}
        """The scores and weights of the last softmax of each trace."""
        self.attending: dict[Trace, None] = {}
        """The traces in which a softmax was multiplied by values, in order."""

    def enter(self, module: nn.Module, _args: Any) -> None:
        self.running.append(module)

    def leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        self.running.pop()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name in _OPERANDS:
            owner = next((each for each in reversed(self.running) if any(True for _ in each.children())), None)
            trace = None if owner is None else self.watch.traces.get(owner)
            if trace is not None and not trace.settled and trace.input is not None:
                names = _OPERANDS[name]
                operands = [*args[: len(names)], *((kwargs or {})[each] for each in names[len(args) :])]
                self._record(trace, name, operands, result)
        return result

    def _record(self, trace: Trace, name: str, operands: list[Tensor], result: Tensor) -> None:
        if name == "softmax":
            (scores,) = operands
            if scores.ndim >= 3 and scores.is_floating_point():
                self.softmax[trace] = scores, result
        elif name == _ATTENTION:
            query, key, value = operands
            self.attending[trace] = None
            trace.record_call(query, key, value, result.transpose(1, 2))
        elif trace in self.softmax:
            scores, weights = self.softmax[trace]
            left = operands[0]
            # The weights may have been reshaped or converted to another dtype before the product.
            same_size = left.numel() == weights.numel()
            if same_size and bitwise_equal([left.flatten()], [weights.to(left.dtype).flatten()]):
                self.attending[trace] = None
                _record_product(trace, scores, operands[1], result)


def _record_product(trace: Trace, scores: Tensor, value: Tensor, output: Tensor) -> None:
    """Record the product of weights and values; batch and heads may share an axis."""
    assert trace.input is not None
    batch = trace.input.shape[0]
    scores_BHTS, value_BHSD, output_BHTD = (
        each.unflatten(0, (batch, -1)) if each.ndim == 3 and each.shape[0] % batch == 0 else each
        for each in (scores, value, output)
    )
    if any(each.ndim != 4 for each in (scores_BHTS, value_BHSD, output_BHTD)):
        return
    gradients = [_columns_in_scores(scores_BHTS, call.leaf) for call in trace.calls]
    value_part = trace.part(value_BHSD)
    trace.record_parts(
        {
            "query": trace.part_of([(call, own) for call, (own, _) in zip(trace.calls, gradients, strict=True)]),
            "key": trace.part_of([(call, other) for call, (_, other) in zip(trace.calls, gradients, strict=True)]),
            "value": value_part,
        },
        value_BHSD,
        output_BHTD.transpose(1, 2),
    )
    trace.settled = value.requires_grad


def _columns_in_scores(scores_BHTS: Tensor, leaf_BTW: Tensor) -> tuple[list[list[int]] | None, list[list[int]] | None]:
    """List the columns that each head's queries and keys come from.

    The scores of the last query depend on the query's columns at its own position, and on the keys' columns at all
    positions.
    """
    last = scores_BHTS.shape[2] - 1
    if leaf_BTW.shape[1] <= last:
        return None, None
    weights = torch.randn(scores_BHTS.shape[-1], generator=torch.Generator().manual_seed(0)).to(scores_BHTS)
    queries: list[list[int]] = []
    keys: list[list[int]] = []
    for head in range(scores_BHTS.shape[1]):
        # Masked scores may be infinite; their gradient is zero, but not their product.
        row = scores_BHTS[:, head, last]
        gradient = gradient_to(leaf_BTW, (row.masked_fill(~row.isfinite(), 0) * weights).sum())
        if gradient is None:
            return None, None
        elsewhere = gradient[:, :last].abs().sum((0, 1)) > 0
        here = (gradient[:, last].abs().sum(0) > 0) & ~elsewhere
        for heads, columns in ((queries, here), (keys, elsewhere)):
            found = columns.nonzero().flatten().tolist()
            if found not in heads:
                heads.append(found)
    return (queries if all(queries) else None), (keys if all(keys) else None)
