"""Observe the attention of any PyTorch model, unmodified, without its attention matrix.

Legend: B batch, T query positions, S attended positions, H heads, D gated width, M model width.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tidegate._validation import InputError, require_bool
from tidegate.torch.attention import GatedAttention
from tidegate.torch.gate import AttentionGate
from tidegate.torch.kernel import inside_transform
from tidegate.torch.observing.branch import AttentionBranch
from tidegate.torch.observing.calls import AttentionCalls, in_backward
from tidegate.torch.observing.counting import (
    CountedCall,
    Keys,
    count_call,
    describe_keys,
    validate_keys,
    validate_padding,
)
from tidegate.torch.observing.interface import watch_interface
from tidegate.torch.observing.modules import (
    ModuleCall,
    attend_without_weights,
    block_of,
    follow_modules,
    given_padding,
    is_cross_attention,
    is_torch_multihead,
    num_added_keys,
    with_rows_of,
)
from tidegate.torch.observing.observation import Observation, ResidualSummary
from tidegate.torch.observing.statistics import AttentionCall
from tidegate.torch.observing.sums import LayerRecord, RunningContribution, RunningRank, Tally, real_tokens

_watched_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def observe(
    model: nn.Module,
    *,
    keys: Keys = 1,
    heat: bool = False,
    residual: bool = True,
    padding: Tensor | None = None,
    crossing: Sequence[str] = (),
) -> Generator[Watcher]:
    """Observe every attention call that the model makes inside the `with`; `watcher.observation()` returns the results.

    The model's results and gradients stay the same, up to rounding where `nn.MultiheadAttention` and
    `nn.TransformerEncoder` run without their fast path and compiled models uncompiled. Statistics use the weights
    before dropout and carry no gradients. A call that gradient checkpointing repeats in the backward pass counts once.
    A batch that raises is discarded as a whole.

    Four kinds of calls are observed, each assigned to the innermost running module: `scaled_dot_product_attention` and
    its fused kernels; `nn.MultiheadAttention` with `need_weights=True`, whose call is repeated without weights; the
    `eager` attention functions of transformers, with their soft caps and sinks; and attention written as separate
    operators: a product, a softmax over its last axis and a product with the values, with one query for each input
    token of the module. Nested tensors, `torch.func` transforms and other threads are not observed.

    Padded queries and queries that may see nothing are left out. A query that may see only one key, such as the first
    of a causal row, is left out of means and included in curves by position.

    Padding is taken from an `attention_mask` of ones and zeros, (B, positions), if either all modules down to the one
    that attends accept a mask, or no real query may see the padding. Otherwise it is inferred from the masks of the
    calls: a key that no query of its row may see is padding, and in self-attention so is the query at its position. In
    an additive mask, values up to -10,000 hide a key; with separate operators, where only the sum of mask and score is
    known, sums up to -5,000. If masks hide keys for other reasons, pass `padding`.

    Positions refer to the whole sequence. A call with as many queries as keys starts a sequence; a call continues it if
    the key before its own keys is the last key of the previous call. So a cache may drop keys: they have no mass and no
    impact, like keys outside a window. If the start of a sequence was not observed, or its cache was cropped, positions
    count from the first key in the call.

    In cross-attention all queries count, at their positions within the call, and padding applies to the keys only. It
    is recognized by the module's arguments: a key other than the query in `nn.MultiheadAttention`, or
    `key_value_states`, `encoder_hidden_states` or `context` in any other module. Name other such layers in `crossing`:
    otherwise their queries would be dropped or misplaced.

    Memory grows with the longest sequence and, for `residual`, with the square of the model's width, not with the
    number of batches.

    Args:
        model: Any module; layers are named by their paths within it.
        keys: The key set of mass, impact and contribution: the number of first real keys, or positions in the row, or
            a bool tensor (S,) or (B, S). Positions that a call does not have, or beyond the tensor's end, are not in
            the set.
        heat: Whether to compute the largest score and the heat capacity too, which needs a blocked pass.
        residual: Whether to observe the residual stream after each block.
        padding: (B, S) bool, True for real tokens, for the following batches: all positions of a batch, or those of the
            prompt in generation. None infers it. Set `watcher.padding` for the next batch. Cross-attention ignores it.
        crossing: Names, or ends of names, of layers that attend to another sequence, as in `("encoder_attn",)`.

    Yields:
        The watcher.
    """
    validate_options(model, keys=keys, heat=heat, residual=residual, crossing=crossing)
    if any(not set(model.modules()).isdisjoint(other.modules()) for other in _watched_models):
        raise RuntimeError(
            "model, or a part of it, is being observed already. Leave the first `observe`, or use its watcher."
        )
    watcher = Watcher(model, keys=keys, heat=heat, residual=residual, padding=padding, crossing=crossing)
    _watched_models.add(model)
    try:
        with (
            # Run compiled functions uncompiled; do not import the compiler if nothing was compiled.
            torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext(),
            _disable_fast_path(),
            follow_modules(model, watcher) as watcher.stack,
            watch_interface(watcher.see),
            AttentionCalls(watcher.see, watcher.miss),
        ):
            yield watcher
    finally:
        # After an interrupt, no hook has run.
        watcher.end()
        _watched_models.discard(model)


def validate_options(model: nn.Module, *, keys: Keys, heat: bool, residual: bool, crossing: Sequence[str]) -> None:
    """Raise TypeError or InputError about an argument of `observe`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}.")
    validate_keys(keys)
    require_bool("heat", heat)
    require_bool("residual", residual)
    if not isinstance(crossing, tuple | list) or not all(isinstance(name, str) and name for name in crossing):
        raise TypeError(
            f'crossing must be a tuple of names of layers, or ends of names, as in ("encoder_attn",), got {crossing!r}.'
        )
    names = [name for name, _ in model.named_modules()]
    if unknown := [ending for ending in crossing if not any(name.endswith(ending) for name in names)]:
        expected = f"ends of the names of modules of {type(model).__name__}"
        raise InputError("crossing", expected=expected, got=unknown, hint="See model.named_modules().")


class Watcher:
    """The sums over all calls so far; made by `observe`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        keys: Keys,
        heat: bool,
        residual: bool,
        padding: Tensor | None,
        crossing: Sequence[str],
    ) -> None:
        self._model = model
        self._keys = keys
        self._heat = heat
        self._wants_residual = residual
        self.padding = padding
        self._crossing = tuple(crossing)
        self.stack: Sequence[ModuleCall] = ()
        """The running modules, outermost first."""
        self._tally = Tally()
        self._uncertain: dict[str, str] = {}
        """Layers whose attention is observed in part or not at all, and the reason."""
        self._before: Tally | None = None
        """The sums before the current batch."""
        self._real: dict[str, Tensor] = {}
        """The real tokens of each layer that has attended in this batch."""
        self._branches: dict[str, AttentionBranch] = {}
        """Outputs of attention calls of this batch that are not yet projected, by layer."""

    @property
    def padding(self) -> Tensor | None:
        """(B, S) bool, True for real tokens, for the following batches; None infers it."""
        return self._padding

    @padding.setter
    def padding(self, padding: Tensor | None) -> None:
        validate_padding(padding)
        self._padding = padding

    def observation(self) -> Observation:
        """Return everything observed so far as plain data.

        Warn about layers with an unobserved softmax that may be attention, and about queries that were left out because
        all their scores are below -5,000.
        """
        tally = self._tally
        uncertain = "".join(f" {name} {what}." for name, what in self._uncertain.items())
        if not tally.layers:
            raise RuntimeError(
                f"{type(self._model).__name__} made no attention call that can be observed.{uncertain} Call it inside "
                "the `with`. It must use scaled_dot_product_attention, an attention function of transformers (load it "
                'with attn_implementation="sdpa" or "eager"), or a product, a softmax over its last axis and a product.'
            )
        if uncertain:
            warnings.warn(f"Not all attention of {type(self._model).__name__} is observed.{uncertain}", stacklevel=2)
        gates = tally.gates.summaries(dict.fromkeys(name for name, _ in tally.layers))
        residuals: dict[str, ResidualSummary] = {}
        for block, stream in tally.streams.items():
            summary = ResidualSummary(largest=stream.largest, effective_rank=stream.effective_rank())
            residuals |= dict.fromkeys(tally.layers_in[block], summary)
        return Observation(
            layers=tuple(
                record.observation(gates[name], residuals.get(name)) for (name, _), record in tally.layers.items()
            ),
            num_batches=tally.num_batches,
            keys=describe_keys(self._keys),
        )

    def begin(self) -> None:
        """Save the sums before a batch."""
        if not in_backward():
            self._real.clear()
            self._branches.clear()
            self._before = self._tally.copy()

    def end(self) -> None:
        """Restore the sums if the batch did not complete."""
        if self._before is not None:
            self._tally, self._before = self._before, None

    @torch.no_grad()
    def see(self, call: AttentionCall) -> None:
        """Add an attention call of the running module; ignore calls from outside the model."""
        if not self.stack or 0 in (call.query.numel(), call.key.numel()):
            return
        current = self.stack[-1]
        name, module = current.name, current.module
        if call.scored:
            if _is_observed_otherwise(module):
                return
            known = with_rows_of(current, call)
            if known is None:
                self.miss("it has fewer keys than queries, or not one query for each input token of the module")
                return
            call = known
        from_mask, passed_on = given_padding(self.stack)
        sink_H = module.sink_logits() if isinstance(module, GatedAttention) else call.sink_H
        record = self._record(name, call.query.shape[1], has_sink=sink_H is not None)
        counted = count_call(
            call,
            keys=self._keys,
            heat=self._heat,
            padding=self.padding,
            from_mask=from_mask,
            passed_on=passed_on,
            set_output=record.contribution.known,
            past=record.past,
            cross_attention=name.endswith(self._crossing) or is_cross_attention(current),
            num_added=num_added_keys(current, call.key.shape[2]),
            sink_H=sink_H,
        )
        record.add(counted)
        if counted.has_low_queries:
            low = "leaves out queries whose scores are all below -5,000, as if they were masked"
            self._uncertain.setdefault(name or type(module).__name__, low)
        self._begin_branch(name, module, call, counted, record.contribution)
        batch_first = getattr(module, "batch_first", True)
        self._real[name] = counted.real_BT if batch_first else counted.real_BT.mT

    def miss(self, why: str) -> None:
        """Note that the running module has a softmax that may be attention, and why it is not observed."""
        if self.stack and not _is_observed_otherwise(self.stack[-1].module):
            name, module = self.stack[-1].name, self.stack[-1].module
            self._uncertain[name or type(module).__name__] = f"has a softmax that is not observed: {why}"

    @torch.no_grad()
    def leave(self, call: ModuleCall, result: Any) -> None:
        """Process the result of a module."""
        if in_backward() or inside_transform():
            return
        attend_without_weights(call)
        for layer, branch in list(self._branches.items()):
            branch.follow(call, result)
            if branch.ends_with(call.name) or len(self.stack) == 1:
                del self._branches[layer]
                branch.settle()
        name, tally = call.name, self._tally
        if isinstance(call.module, AttentionGate):
            tally.gates.store(name, call.module, result)
        inside = [layer for layer in tally.layers_in.get(name, ()) if layer in self._real]
        if inside:
            self._add_stream(name, result, [self._real[layer] for layer in inside])
        if inside or name in self._real:
            tally.gates.settle(name, self._real)
        if len(self.stack) == 1:
            tally.gates.settle("", self._real)
            tally.num_batches += bool(self._real)
            self._before = None

    def _begin_branch(
        self, name: str, module: nn.Module, call: AttentionCall, counted: CountedCall, sums: RunningContribution
    ) -> None:
        if earlier := self._branches.pop(name, None):
            # Without a projection in between, the outputs of both calls are combined first.
            earlier.settle()
        output_BHTD = call.output
        if not sums.known or counted.set_output_BHTD is None or output_BHTD is None:
            return
        if (sink_BHT := counted.statistics.sink) is not None and call.sink_H is None:
            # The layer removes the sink's share after the call.
            output_BHTD = output_BHTD * (1 - sink_BHT).unsqueeze(-1).to(output_BHTD.dtype)
        if is_torch_multihead(module):
            sums.add(counted.set_output_BHTD, output_BHTD, counted)
        else:
            self._branches[name] = AttentionBranch(name, output_BHTD, counted, sums)

    def _record(self, name: str, num_heads: int, *, has_sink: bool) -> LayerRecord:
        layers = self._tally.layers
        if (name, num_heads) not in layers:
            title = name.replace("_orig_mod.", "") or type(self._model).__name__
            if any(name == other for other, _ in layers):
                # The module attends more than once, with different heads.
                title = f"{title} ({num_heads} heads)"
            elif self._wants_residual and (block := block_of(self._model, name)) is not None:
                self._tally.layers_in.setdefault(block, []).append(name)
            statistics = ["entropy", "effective_keys", "mass", "impact", "mean_score"]
            statistics += ["max_score", "heat_capacity"] * self._heat + ["sink"] * has_sink
            layers[name, num_heads] = LayerRecord(title, num_heads, statistics)
        return layers[name, num_heads]

    def _add_stream(self, block: str, result: Any, real: list[Tensor]) -> None:
        stream = result[0] if isinstance(result, tuple | list) else result
        if not isinstance(stream, Tensor) or stream.ndim < 2:
            return
        # Cross-attention gives no padding for its queries: use masks of matching shape only.
        same = [each for each in real if each.shape == stream.shape[:2]]
        rows = real_tokens(stream, torch.stack(same).all(dim=0)) if same and stream.ndim == 3 else stream
        self._tally.streams.setdefault(block, RunningRank()).add(rows.detach().flatten(0, -2))


def _is_observed_otherwise(module: nn.Module) -> bool:
    """Return whether the module's separate operators must not count: it calls the kernel, or its call is repeated."""
    return isinstance(module, GatedAttention) or is_torch_multihead(module)


@contextmanager
def _disable_fast_path() -> Generator[None]:
    """Disable the fast path of `nn.MultiheadAttention` and `nn.TransformerEncoder`, which makes no attention call."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
