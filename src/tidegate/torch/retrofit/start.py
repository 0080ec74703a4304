"""Which values gates start from, so that a trained model stays what it is."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from tidegate.gate import Activation, Gate
from tidegate.gates import GateLike, Gates

_NEUTRAL: dict[str, tuple[Activation, ...]] = {"multiply": ("tanh1", "twosigmoid"), "add": ("identity", "silu")}
"""The activations whose value at zero changes nothing: 1 where it multiplies, 0 where it adds."""


def starting_gates(gate: GateLike, activation: Activation | None) -> Gates:
    """The gates with this activation, at zero where that changes nothing; None leaves each gate as it is spelled.

    A bias stays, but starts at zero with the matrix.
    """
    gates = Gates.parse(gate)
    if not gates:
        raise ValueError("gate must name at least one gate; got none. Write for example 'g1' or 'bma'.")
    if activation is None:
        return gates
    if activation not in get_args(Activation):
        known = ", ".join(get_args(Activation))
        raise ValueError(f"activation must be one of {known}, or None for the gate's own; got {activation!r}.")
    return Gates(_started(replace(each, activation=activation)) for each in gates)


def is_neutral(gate: Gate) -> bool:
    """Whether the gate, as it starts, changes nothing."""
    return gate.activation in _NEUTRAL[gate.op] and gate.init_std == 0 and not gate.bias


def _started(gate: Gate) -> Gate:
    if gate.activation not in _NEUTRAL[gate.op]:
        return gate
    return replace(gate, init_std=0.0, bias=None if gate.bias is None else 0.0)
