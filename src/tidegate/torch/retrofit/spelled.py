"""Find attention that a module spells out itself, without transformers' attention function.

The pattern is a softmax over keys whose result is multiplied by values, or PyTorch's own attention, and a matrix that
takes the heads' outputs, side by side, bit by bit. What does not fit it is not attention for the retrofit.

Legend: B batch, T query positions, S key positions, W width of a projection, H query heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tidegate.torch.retrofit.flow import Trace, Watch, gradient_to
from tidegate.torch.retrofit.layout import AttentionLayout
from tidegate.torch.retrofit.probe import bitwise_equal

_ATTENTION = "scaled_dot_product_attention"
_OPERANDS = {
    "softmax": ("input",),
    "matmul": ("input", "other"),
    "__matmul__": ("input", "other"),
    "bmm": ("input", "mat2"),
    _ATTENTION: ("query", "key", "value"),
}
"""The operators that are listened to, and the names of their operands, in order."""


def find_spelled_attention(
    model: nn.Module, run: Callable[[], object], *, known: set[nn.Module]
) -> tuple[list[AttentionLayout], list[str]]:
    """Return the layouts of the modules that spell out their attention, in the order in which they run.

    Beside them come the paths of those that attend but hand their heads to no matrix as they are.

    run   : sends a small input through the model
    known : modules whose attention has been found already
    """
    names = {
        module: name
        for name, module in model.named_modules()
        if module not in known and any(map(_projects, module.children()))
    }
    watch = Watch(model, names)
    with (
        watch.recording(),
        _running_modules(model) as running,
        torch.enable_grad(),
        _Operators(watch, running) as heard,
    ):
        run()
    found = (trace.layout() for trace in watch.traces.values())
    layouts = [layout for layout in found if layout is not None and layout.output is not None]
    fitting = {layout.name for layout in layouts}
    return layouts, [trace.name for trace in heard.attending if trace.name not in fitting]


def _projects(module: nn.Module) -> bool:
    """Tell whether a module has weights of a matrix, or of a convolution, at which no gate can stand."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim >= 2


@contextmanager
def _running_modules(model: nn.Module) -> Generator[list[nn.Module]]:
    """Keep the list of modules that are running, the innermost last."""
    running: list[nn.Module] = []

    def enter(module: nn.Module, _args: Any) -> None:
        running.append(module)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        running.pop()

    handles = [handle for module in model.modules() for handle in _hooks(module, enter, leave)]
    try:
        yield running
    finally:
        for handle in handles:
            handle.remove()


def _hooks(module: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> tuple[Any, Any]:
    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)


class _Operators(TorchFunctionMode):
    """Listens to the operators that the modules call."""

    def __init__(self, watch: Watch, running: list[nn.Module]) -> None:
        super().__init__()
        self.watch = watch
        self.running = running
        self.softmax: dict[Trace, tuple[Tensor, Tensor]] = {}
        """The scores and weights of a softmax that is yet to meet its values."""
        self.attending: dict[Trace, None] = {}
        """The traces in which a softmax has met its values, in order."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        trace = self._trace()
        name = getattr(func, "__name__", "")
        if name in _OPERANDS and trace is not None and not trace.settled and trace.input is not None:
            self._hear(trace, name, _operands(name, args, kwargs or {}), result)
        return result

    def _hear(self, trace: Trace, name: str, operands: list[Tensor], result: Tensor) -> None:
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
            if _same_numbers(operands[0], weights):
                self.attending[trace] = None
                _record_product(trace, scores, operands[1], result)

    def _trace(self) -> Trace | None:
        """Return the trace of the innermost running module that has children."""
        module = next((each for each in reversed(self.running) if any(True for _ in each.children())), None)
        return None if module is None else self.watch.traces.get(module)


def _operands(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the operands of a call, given by position or by name."""
    names = _OPERANDS[name]
    return [*args[: len(names)], *(kwargs[each] for each in names[len(args) :])]


def _same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Tell whether two tensors hold the same numbers, in one order, after a change of shape or dtype."""
    return ours.numel() == theirs.numel() and bitwise_equal([ours.flatten()], [theirs.to(ours.dtype).flatten()])


def _record_product(trace: Trace, scores: Tensor, value: Tensor, output: Tensor) -> None:
    """Record the product of weights and values; heads may stand beside the batch in one axis."""
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
    """List the columns that each head's queries and keys come from, by the scores of the last query.

    The scores of a query depend on its own position in the query's columns, and on all positions in those of the keys.
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
