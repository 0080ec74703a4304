"""Several gates on one layer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import TypeAlias, final

from tidegate._json import decode, parse_json
from tidegate._text import short_repr
from tidegate._validation import InputError
from tidegate.gate import GATE_PATHS, Gate, GatePath

GateLike: TypeAlias = str | Gate | Iterable[str | Gate] | None
"""A spelling, a `Gate`, or several; None for no gates."""


@final
class Gates(tuple[Gate, ...]):
    """The gates of one layer, at most one per path, in the order in which the layer applies them."""

    __slots__ = ()

    def __new__(cls, gates: Iterable[Gate] = ()) -> Gates:
        """Sort the gates by site. Raise InputError for two at one site; a sink may accompany an output gate."""
        by_path: dict[GatePath, Gate] = {}
        for gate in gates:
            if gate.path in by_path:
                expected = "at most one gate for each site, and one sink"
                hint = "Choose one, or move one to another site."
                raise InputError("gate", expected=expected, got=f"{by_path[gate.path]}+{gate}", hint=hint)
            by_path[gate.path] = gate
        return super().__new__(cls, (by_path[path] for path in GATE_PATHS if path in by_path))

    @classmethod
    def parse(cls, gates: GateLike) -> Gates:
        """Parse `none`, one gate, `g1+g2`, a `Gate`, or several of these."""
        if gates is None:
            return cls()
        if isinstance(gates, Gate):
            return cls((gates,))
        if isinstance(gates, str):
            return cls() if gates.strip() == "none" else cls(Gate.parse(part) for part in gates.split("+"))
        if isinstance(gates, bytes) or not isinstance(gates, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"gate must be a string, a Gate, or several of either, got {short_repr(gates)}.")
        return cls(gate if isinstance(gate, Gate) else Gate.parse(gate) for gate in gates)

    def at(self, path: GatePath) -> Gate | None:
        """Return the gate at a site, or for `partition` the sink, if any."""
        return next((gate for gate in self if gate.path == path), None)

    @property
    def branch_scale(self) -> float | None:
        """Return the factor of the gates on the layer's output at initialization; None if it is not a factor.

        Gates of queries and keys are ignored: they change where a head attends, not the scale of its output.
        """
        scale = 1.0
        for gate in self:
            if gate.site in ("query", "key"):
                continue
            if gate.op != "multiply" or gate.starting_value is None:
                return None
            scale *= gate.starting_value
        return scale

    @property
    def read_other_sequences(self) -> bool:
        """Return whether any gate is a placebo that reads another sequence of the batch."""
        return any(gate.placebo == "shuffled" for gate in self)

    def require_cross_attention(self) -> None:
        """Raise InputError if a gate cannot be used in cross-attention."""
        for gate in self:
            gate.require_cross_attention()

    def num_parameters(
        self, *, d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> int:
        """Return the number of parameters that the gates add to a layer."""
        return sum(
            gate.num_parameters(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
            for gate in self
        )

    def __str__(self) -> str:
        """Return `none`, or the gates joined by `+`; `Gates.parse` reads it."""
        return "+".join(str(gate) for gate in self) or "none"

    def __repr__(self) -> str:
        """Return an expression that makes the same gates."""
        return f"Gates.parse({str(self)!r})"

    def to_json(self) -> str:
        """Return a JSON list of gates for `Gates.from_json`."""
        return json.dumps([asdict(gate) for gate in self])

    @classmethod
    def from_json(cls, text: str) -> Gates:
        """Parse the result of `to_json`."""
        return cls(decode(tuple[Gate, ...], parse_json(text)))


def require_layer_inputs(
    gates: Gates,
    d_model: int,
    *,
    x: tuple[int, ...],
    context: tuple[int, ...] | None,
    ordered: bool,
    has_cache: bool,
    packed: str | None,
) -> None:
    """Raise InputError unless the inputs of an attention layer, given by their shapes, fit the layer and each other.

    The context is None in self-attention. `ordered` layers are causal or have a window. `packed` is the name of the
    argument for packed documents, if it was given.
    """
    for name, given in (("x", x), ("context", context)):
        if given is not None and (len(given) != 3 or given[-1] != d_model):
            raise InputError(name, expected=f"of shape (batch, positions, {d_model})", got=tuple(given))
    if packed is not None and (context is not None or has_cache):
        raise InputError(packed, expected="None with a context or a cache", hint="Use mask instead.")
    for gate in gates:
        gate.require_other_sequences(x[0], cached=has_cache)
    if context is None:
        return
    if context[0] != x[0]:
        raise InputError("context", expected=f"of the batch size of x, {x[0]}", got=context[0])
    if has_cache:
        raise InputError("cache", expected="None with a context", hint="Cross-attention needs no cache.")
    if ordered:
        hint = "Both compare positions of one sequence. Cross-attention needs causal=False and window=None."
        raise InputError("context", expected="None in a layer that is causal or has a window", hint=hint)
    gates.require_cross_attention()
