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

from tidegate._validation import require_bool
from tidegate.torch.attention import GatedAttention
from tidegate.torch.gate import AttentionGate
from tidegate.torch.kernel import inside_transform
from tidegate.torch.observing.branch import AttentionBranch
from tidegate.torch.observing.calls import AttentionCall, AttentionCalls, in_backward
from tidegate.torch.observing.counting import (
    CountedCall,
    Keys,
    count_call,
    keys_in_words,
    require_keys,
    require_padding,
)
from tidegate.torch.observing.interface import InterfaceCalls
from tidegate.torch.observing.modules import (
    ModuleCall,
    attend_without_weights,
    attends_across,
    block_of,
    follow_modules,
    given_padding,
    num_added_keys,
    projects_itself,
    require_names,
    with_rows_of,
)
from tidegate.torch.observing.observation import Observation, ResidualSummary
from tidegate.torch.observing.sums import (
    STATISTICS,
    STATISTICS_WITH_HEAT,
    LayerRecord,
    RunningContribution,
    RunningRank,
    Tally,
    tokens_of,
)

_NOT_EVERY_QUERY = "not one for each of the tokens that the module was given, over at least as many keys"
_CHANGED = "what met the values is not what it gave"
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
    """Watch every attention call that the model makes inside the `with`; `watcher.observation()` says what was seen.

    The model computes what it computes otherwise, gradients included. Only two things are different: the fast path of
    `nn.MultiheadAttention` and `nn.TransformerEncoder` is off, and a compiled model runs uncompiled. Statistics are of
    the weights before dropout. They come without gradients, also under autocast, `no_grad` and `inference_mode`. A call
    that gradient checkpointing repeats in the backward pass is counted once. A batch that raises is not counted at all.

    A call belongs to the innermost module at work. Seen is all that goes through `scaled_dot_product_attention` or its
    fused kernels; `nn.MultiheadAttention` with `need_weights=True`, whose call is made a second time; the `eager`
    attention functions of transformers, with their soft caps and sinks; and attention that a model spells out, if it is
    certain: a product, a softmax over its last axis, a product with the values, with a query for each token that the
    module is given. Other attention is not, nor is that of nested tensors, inside `torch.func` transforms and of other
    threads.

    Queries that are padding, or may see nothing, are left out. A query that may see a single key, such as the first of
    a causal row, is left out of means and kept in curves by position.

    Padding is what `attention_mask` says, (B, positions), of ones and zeros, if the model is given one and the modules
    down to the one that attends have an argument for a mask. Else it is read from the masks of the calls: a key that no
    query of its row may see, and in self-attention the query at its position. What a mask adds forbids from -10,000
    down. Where masks hide keys for other reasons give `padding`.

    Positions are those of the whole sequence. As many queries as keys begin one; a call goes on with it if the key
    before its own is the last of the call before. So a cache may drop keys: they have no mass and no impact, as behind
    a window. If the beginning of a sequence was not watched, or its cache was cut back, positions are counted from the
    first key that is handed over.

    In cross-attention every query counts, at its position within the call, and padding is read for the keys alone. It
    is told by the arguments of the module: `nn.MultiheadAttention` whose key is not its query, and modules that are
    given `key_value_states`, `encoder_hidden_states` or `context`. Name others in `crossing`: taken for self-attention,
    they lose the queries at the source's padding where lengths are equal, and count from S - T where they are not.

    Memory grows with the longest sequence and, for `residual`, with the square of the model's width, not with the
    number of batches.

    model    : any module; names of layers are paths within it
    keys     : the key set of mass, impact and contribution: how many of the first keys that are no padding, or
               positions in the row, or a bool tensor (S,) or (B, S). Keys that a call does not have are no part of it,
               nor are those that a tensor is too short for.
    heat     : whether to see the largest score and the heat capacity too, which takes a blocked pass
    residual : whether to see the residual stream after each block
    padding  : (B, S) bool, True for real tokens, for the batches that follow: all positions of a batch, of generation
               those of the prompt, after which all tokens are real; None reads it from the masks. Set
               `watcher.padding` for the next batch. Cross-attention does not heed it.
    crossing : names of layers that attend to another sequence, or how such names end, as in `("encoder_attn",)`
    yields   : the watcher
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module; got {type(model).__name__}.")
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
            InterfaceCalls(watcher.see),
            AttentionCalls(watcher.see),
        ):
            watcher.follow(stack)
            yield watcher
    finally:
        # After an interrupt no hook has run.
        watcher.end()
        _watched_models.discard(model)


class Watcher:
    """Keep what has been seen so far; made by `observe`."""

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
        require_keys(keys)
        require_names(crossing, model)
        require_bool("heat", heat)
        require_bool("residual", residual)
        self._model = model
        self._keys = keys
        self._heat = heat
        self._wants_residual = residual
        self.padding = padding
        self._crossing = tuple(crossing)
        self._stack: Sequence[ModuleCall] = ()
        self._tally = Tally()
        self._uncertain: dict[str, str] = {}
        """Layers that spell out something like attention, which is not observed, and why."""
        self._before: Tally | None = None
        """The sums before the batch that runs."""
        self._real: dict[str, Tensor] = {}
        """Which tokens are no padding, for each layer that has attended in this batch."""
        self._branches: dict[str, AttentionBranch] = {}
        """Outputs of attention calls of this batch that have not been projected yet, by layer."""

    @property
    def padding(self) -> Tensor | None:
        """(B, S) bool, True for real tokens, for the batches that follow; None reads it from the masks."""
        return self._padding

    @padding.setter
    def padding(self, padding: Tensor | None) -> None:
        require_padding(padding)
        self._padding = padding

    def observation(self) -> Observation:
        """Return everything seen so far, as plain data.

        Warns of layers with a softmax that is not certain to be attention, of which something is not observed.
        """
        tally = self._tally
        uncertain = "".join(f" In {name} a softmax was found, but {why}." for name, why in self._uncertain.items())
        if not tally.layers:
            raise RuntimeError(
                f"No attention call of {type(self._model).__name__} was seen. Call it inside the `with`.{uncertain} "
                "Watched are scaled_dot_product_attention, the attention functions of transformers, and a product, a "
                "softmax over its last axis and a product with the values, one after the other. Load a transformers "
                'model with attn_implementation="sdpa" or "eager".'
            )
        if uncertain:
            warnings.warn(f"Not all attention of {type(self._model).__name__} is observed.{uncertain}", stacklevel=2)
        gates = tally.gates.summaries(dict.fromkeys(name for name, _ in tally.layers))
        return Observation(
            layers=tuple(
                record.observation(gates[name], self._residual(name)) for (name, _), record in tally.layers.items()
            ),
            num_batches=tally.num_batches,
            keys=keys_in_words(self._keys),
        )

    def follow(self, stack: Sequence[ModuleCall]) -> None:
        """Read from this stack which module is at work."""
        self._stack = stack

    def begin(self) -> None:
        """Keep the sums as they are before a batch."""
        if not in_backward():
            self._real.clear()
            self._branches.clear()
            self._before = self._tally.copy()

    def end(self) -> None:
        """Drop what a batch that broke off has added."""
        if self._before is not None:
            self._tally, self._before = self._before, None

    @torch.no_grad()
    def see(self, call: AttentionCall) -> None:
        """Take in an attention call of the module at work; one from outside the model is not ours."""
        if not self._stack or 0 in (call.query.numel(), call.key.numel()):
            return
        name, module = self._stack[-1].name, self._stack[-1].module
        if call.scored:
            # Ours calls the kernel, and PyTorch's own is called again for it.
            if isinstance(module, GatedAttention) or projects_itself(module):
                return
            known = None if call.changed else with_rows_of(self._stack[-1], call)
            if known is None:
                self._uncertain[name or type(module).__name__] = _CHANGED if call.changed else _NOT_EVERY_QUERY
                return
            call = known
        sink_H = module.sink_logits() if isinstance(module, GatedAttention) else call.sink_H
        record = self._record(name, call.query.shape[1], has_sink=sink_H is not None)
        counted = count_call(
            call,
            keys=self._keys,
            heat=self._heat,
            padding=self.padding,
            from_mask=given_padding(self._stack),
            set_output=record.contribution.known,
            past=record.past,
            crossing=name.endswith(self._crossing) or attends_across(self._stack[-1]),
            num_added=num_added_keys(self._stack[-1], call.key.shape[2]),
            sink_H=sink_H,
        )
        record.add(counted)
        self._begin_branch(name, module, call, counted, record.contribution)
        batch_first = getattr(module, "batch_first", True)
        self._real[name] = counted.real_BT if batch_first else counted.real_BT.mT

    @torch.no_grad()
    def leave(self, call: ModuleCall, result: Any) -> None:
        """Take in what a module returned."""
        if in_backward() or inside_transform():
            return
        attend_without_weights(call.module, call.args, call.kwargs)
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
        if projects_itself(module):
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
            else:
                self._place(name)
            statistics = (*(STATISTICS_WITH_HEAT if self._heat else STATISTICS), *(("sink",) if has_sink else ()))
            record = LayerRecord(title, num_heads, statistics)
            layers[name, num_heads] = record
        return record

    def _place(self, layer: str) -> None:
        block = block_of(self._model, layer) if self._wants_residual else None
        if block is not None:
            self._tally.layers_in.setdefault(block, []).append(layer)

    def _add_stream(self, block: str, result: Any, real: list[Tensor]) -> None:
        stream = result[0] if isinstance(result, tuple | list) else result
        if not isinstance(stream, Tensor) or stream.ndim < 2:
            return
        # Cross-attention gives no padding for its queries: use masks of matching shape only.
        same = [each for each in real if each.shape == stream.shape[:2]]
        rows = tokens_of(stream, torch.stack(same).all(dim=0)) if same and stream.ndim == 3 else stream
        self._tally.streams.setdefault(block, RunningRank()).add(rows.detach().flatten(0, -2))

    def _residual(self, layer: str) -> ResidualSummary | None:
        for block, stream in self._tally.streams.items():
            if layer in self._tally.layers_in[block]:
                return ResidualSummary(largest=stream.largest, effective_rank=stream.effective_rank())
        return None


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
