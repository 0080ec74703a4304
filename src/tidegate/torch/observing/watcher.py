"""Watch the attention of any PyTorch model, unmodified, without the matrix of its weights.

Legend: B batch, T query positions, S attended positions, H heads, D gated width, M model width.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from tidegate.torch.observing.sums import (
    LayerRecord,
    RunningContribution,
    RunningRank,
    Tally,
    real_tokens,
)

_NOT_EVERY_QUERY = "it has not one query for each token that the module was given, or fewer keys than queries"
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
    """Watch every attention call that the model makes inside the `with`; `watcher.observation()` returns the results.

    The model computes the same as otherwise, gradients included. Only two things are different: the fast path of
    `nn.MultiheadAttention` and `nn.TransformerEncoder` is off, and a compiled model runs uncompiled. Statistics are of
    the weights before dropout. They have no gradients, also under autocast, `no_grad` and `inference_mode`. A call
    that gradient checkpointing repeats in the backward pass is counted once. A batch that raises is not counted at all.

    A call belongs to the innermost running module. Observed are all calls of `scaled_dot_product_attention` and its
    fused kernels; `nn.MultiheadAttention` with `need_weights=True`, whose call is made a second time; the `eager`
    attention functions of transformers, with their soft caps and sinks; and attention made of separate operators, if
    it is certain: a product, a softmax over its last axis, a product with the values, with a query for each token that
    the module is given. Other attention is not observed, nor that of nested tensors, inside `torch.func` transforms
    and of other threads.

    Queries that are padding, or may see nothing, are left out. A query that may see a single key, such as the first of
    a causal row, is left out of means and kept in curves by position.

    Padding is what `attention_mask` says, (B, positions), of ones and zeros, if the model is given one and either the
    modules down to the one that attends have an argument for a mask, or no real query may see the padding. Else it is
    read from the masks of the calls: a key that no
    query of its row may see, and in self-attention the query at its position. In an additive mask numbers up to -10,000
    forbid; in separate operators, where mask and scores are seen as a sum, sums up to -5,000. Where masks hide keys for
    other reasons give `padding`.

    Positions are those of the whole sequence. As many queries as keys begin one; a call continues it if the key before
    its own is the last key of the call before. So a cache may drop keys: they have no mass and no impact, as behind
    a window. If the beginning of a sequence was not watched, or its cache was cut back, positions are counted from the
    first key that is handed over.

    In cross-attention every query counts, at its position within the call, and padding is read for the keys alone. It
    is recognized by the arguments of the module: `nn.MultiheadAttention` whose key is not its query, and modules that
    are given `key_value_states`, `encoder_hidden_states` or `context`. Name others in `crossing`: taken for
    self-attention, they lose the queries at the source's padding where lengths are equal, and count from S - T where
    they are not.

    Memory grows with the longest sequence and, for `residual`, with the square of the model's width, not with the
    number of batches.

    Args:
        model: Any module; names of layers are paths within it.
        keys: The key set of mass, impact and contribution: how many of the first keys that are not padding, or
            positions in the row, or a bool tensor (S,) or (B, S). Keys that a call does not have, or that a tensor is
            too short for, are not in the set.
        heat: Whether to compute the largest score and the heat capacity too, which takes a blocked pass.
        residual: Whether to observe the residual stream after each block.
        padding: (B, S) bool, True for real tokens, for the batches that follow: all positions of a batch, or those of
            the prompt in generation, after which all tokens are real; None reads it from the masks. Set
            `watcher.padding` for the next batch. Cross-attention ignores it.
        crossing: Names of layers that attend to another sequence, or endings of them, as in `("encoder_attn",)`.

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
            _disable_fast_path(),
            _force_eager(),
            follow_modules(model, watcher) as stack,
            watch_interface(watcher.see),
            AttentionCalls(watcher.see, watcher.miss),
        ):
            watcher.follow(stack)
            yield watcher
    finally:
        # After an interrupt no hook has run.
        watcher.end()
        _watched_models.discard(model)


def validate_options(model: nn.Module, *, keys: Keys, heat: bool, residual: bool, crossing: Sequence[str]) -> None:
    """Raise TypeError or InputError about an argument of `observe`."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}.")
    validate_keys(keys)
    require_bool("heat", heat)
    require_bool("residual", residual)
    if not isinstance(crossing, tuple | list) or not all(isinstance(name, str) and name for name in crossing):
        raise TypeError(
            f'crossing must be a tuple of names of layers, or of their endings, as in ("encoder_attn",); '
            f"got {crossing!r}."
        )
    names = [name for name, _ in model.named_modules()]
    if strays := [ending for ending in crossing if not any(name.endswith(ending) for name in names)]:
        expected = f"endings of the names of modules of {type(model).__name__}"
        hint = "Take names from model.named_modules()."
        raise InputError("crossing", expected=expected, got=strays, hint=hint)


class Watcher:
    """The sums of what has been observed so far; made by `observe`."""

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
        self._stack: Sequence[ModuleCall] = ()
        self._tally = Tally()
        self._uncertain: dict[str, str] = {}
        """Layers of whose attention not everything is observed, and what is not."""
        self._before: Tally | None = None
        """The sums before the current batch."""
        self._real: dict[str, Tensor] = {}
        """Which tokens are not padding, for each layer that has attended in this batch."""
        self._branches: dict[str, AttentionBranch] = {}
        """Outputs of attention calls of this batch that have not been projected yet, by layer."""

    @property
    def padding(self) -> Tensor | None:
        """(B, S) bool, True for real tokens, for the batches that follow; None reads it from the masks."""
        return self._padding

    @padding.setter
    def padding(self, padding: Tensor | None) -> None:
        validate_padding(padding)
        self._padding = padding

    def observation(self) -> Observation:
        """Return everything observed so far, as plain data.

        Warn of layers with a softmax that may belong to attention and is not observed, and of queries left out because
        all their scores lie below -5,000.
        """
        tally = self._tally
        uncertain = "".join(f" {name} {what}." for name, what in self._uncertain.items())
        if not tally.layers:
            raise RuntimeError(
                f"{type(self._model).__name__} made no attention call that can be observed.{uncertain} Call it inside "
                "the `with`. It must attend by scaled_dot_product_attention, by a function of transformers (load with "
                'attn_implementation="sdpa" or "eager"), or by a product, a softmax over its last axis and a product.'
            )
        if uncertain:
            warnings.warn(f"Not all attention of {type(self._model).__name__} is observed.{uncertain}", stacklevel=2)
        gates = tally.gates.summaries(dict.fromkeys(name for name, _ in tally.layers))
        return Observation(
            layers=tuple(
                record.observation(gates[name], self._residual(name)) for (name, _), record in tally.layers.items()
            ),
            num_batches=tally.num_batches,
            keys=describe_keys(self._keys),
        )

    def follow(self, stack: Sequence[ModuleCall]) -> None:
        """Read the running modules from this stack."""
        self._stack = stack

    def begin(self) -> None:
        """Remember the sums before a batch."""
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
        """Add an attention call of the running module; calls from outside the model are ignored."""
        if not self._stack or 0 in (call.query.numel(), call.key.numel()):
            return
        name, module = self._stack[-1].name, self._stack[-1].module
        if call.scored:
            if _is_seen_otherwise(module):
                return
            known = with_rows_of(self._stack[-1], call)
            if known is None:
                self.miss(_NOT_EVERY_QUERY)
                return
            call = known
        from_mask, passed_on = given_padding(self._stack)
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
            cross_attention=name.endswith(self._crossing) or is_cross_attention(self._stack[-1]),
            num_added=num_added_keys(self._stack[-1], call.key.shape[2]),
            sink_H=sink_H,
        )
        record.add(counted)
        if counted.has_low_queries:
            low = "leaves out queries whose scores all lie below -5,000, as if they were masked"
            self._uncertain.setdefault(name or type(module).__name__, low)
        self._begin_branch(name, module, call, counted, record.contribution)
        batch_first = getattr(module, "batch_first", True)
        self._real[name] = counted.real_BT if batch_first else counted.real_BT.mT

    def miss(self, why: str) -> None:
        """Note that the running module has a softmax that may belong to attention, and why it is not observed."""
        if self._stack and not _is_seen_otherwise(self._stack[-1].module):
            name, module = self._stack[-1].name, self._stack[-1].module
            self._uncertain[name or type(module).__name__] = f"has a softmax that is not observed: {why}"

    @torch.no_grad()
    def leave(self, call: ModuleCall, result: Any) -> None:
        """Take in the result of a module."""
        if in_backward() or inside_transform():
            return
        attend_without_weights(call)
        self._follow_branches(call, result)
        name, tally = call.name, self._tally
        if isinstance(call.module, AttentionGate):
            tally.gates.take(name, call.module, result)
        inside = [layer for layer in tally.layers_in.get(name, ()) if layer in self._real]
        if inside:
            self._add_stream(name, result, [self._real[layer] for layer in inside])
        if inside or name in self._real:
            tally.gates.settle(name, self._real)
        if len(self._stack) == 1:
            tally.gates.settle("", self._real)
            tally.num_batches += bool(self._real)
            self._before = None

    def _begin_branch(
        self, name: str, module: nn.Module, call: AttentionCall, counted: CountedCall, sums: RunningContribution
    ) -> None:
        if earlier := self._branches.pop(name, None):
            # If it was not projected yet, the outputs of both calls are put together first.
            earlier.settle()
        output_BHTD = call.output
        if not sums.known or counted.set_output_BHTD is None or output_BHTD is None:
            return
        if (sink_BHT := counted.statistics.sink) is not None and call.sink_H is None:
            # The layer takes the sink's share off after the call.
            output_BHTD = output_BHTD * (1 - sink_BHT).unsqueeze(-1).to(output_BHTD.dtype)
        if is_torch_multihead(module):
            sums.add(counted.set_output_BHTD, output_BHTD, counted)
        else:
            self._branches[name] = AttentionBranch(name, output_BHTD, counted, sums)

    def _follow_branches(self, call: ModuleCall, result: Any) -> None:
        for layer, branch in list(self._branches.items()):
            branch.follow(call, result)
            if branch.ends_with(call.name) or len(self._stack) == 1:
                del self._branches[layer]
                branch.settle()

    def _record(self, name: str, num_heads: int, *, has_sink: bool) -> LayerRecord:
        layers = self._tally.layers
        record = layers.get((name, num_heads))
        if record is None:
            title = name.replace("_orig_mod.", "") or type(self._model).__name__
            if any(name == other for other, _ in layers):
                # The module attends more than once, with different heads.
                title = f"{title} ({num_heads} heads)"
            elif self._wants_residual and (block := block_of(self._model, name)) is not None:
                self._tally.layers_in.setdefault(block, []).append(name)
            statistics = ["entropy", "effective_keys", "mass", "impact", "mean_score"]
            statistics += ["max_score", "heat_capacity"] * self._heat + ["sink"] * has_sink
            record = LayerRecord(title, num_heads, statistics)
            layers[name, num_heads] = record
        return record

    def _add_stream(self, block: str, result: Any, real: list[Tensor]) -> None:
        stream = result[0] if isinstance(result, tuple | list) else result
        if not isinstance(stream, Tensor) or stream.ndim < 2:
            return
        # Cross-attention gives no padding for its queries: use masks of matching shape only.
        same = [each for each in real if each.shape == stream.shape[:2]]
        rows = real_tokens(stream, torch.stack(same).all(dim=0)) if same and stream.ndim == 3 else stream
        self._tally.streams.setdefault(block, RunningRank()).add(rows.detach().flatten(0, -2))

    def _residual(self, layer: str) -> ResidualSummary | None:
        for block, stream in self._tally.streams.items():
            if layer in self._tally.layers_in[block]:
                return ResidualSummary(largest=stream.largest, effective_rank=stream.effective_rank())
        return None


def _is_seen_otherwise(module: nn.Module) -> bool:
    """Return whether the module's separate operators are not to be counted: it calls the kernel, or is called again."""
    return isinstance(module, GatedAttention) or is_torch_multihead(module)


@contextmanager
def _disable_fast_path() -> Generator[None]:
    """Keep `nn.MultiheadAttention` and `nn.TransformerEncoder` from their fast path, which is no attention call."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _force_eager() -> AbstractContextManager[Any]:
    """Run compiled functions uncompiled; where nothing has been compiled, do not import the compiler."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
