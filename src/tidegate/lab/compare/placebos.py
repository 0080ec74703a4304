"""Which variant is the placebo of which, and what has to be added so that every gate has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.lab.training.records import Variant


def placebos_of(variant: Variant, variants: Sequence[Variant], *, control: str) -> tuple[str, ...]:
    """Name the variants that have all of a gate but its mechanism, under the same options.

    They are its shuffled self, a trained constant at its site, and a constant that scales the branch as much as the
    gate does at the start: the control, if it has no gate, where that is exactly 1. A variant that is a placebo itself
    has none.
    """
    gates = variant.gates
    if not gates or variant.name == control or any(g.placebo is not None or g.reads == "nothing" for g in gates):
        return ()
    alike = [other for other in variants if other.overrides == variant.overrides]
    names = [other.name for other in alike if _stands_for(other.gates, gates)]
    is_bare = any(other.name == control and not other.gates for other in alike)
    starts_as_control = is_bare and _can_be_scaled(gates) and gates.branch_scale == 1
    return (control,) if starts_as_control and not names else tuple(names)


def with_constants(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Add the constant that a gate starts from, where it is not 1 and nobody asked for it.

    One is added for each scale and set of options.
    """
    parsed = [(variant, variant.gates) for variant in variants]
    known = [(gates.branch_scale, variant.overrides) for variant, gates in parsed if _is_constant(gates)]
    added: list[Variant] = []
    for variant, gates in parsed:
        scale, options = gates.branch_scale, variant.overrides
        if not _can_be_scaled(gates) or scale in (None, 0.0, 1.0) or (scale, options) in known:
            continue
        known.append((scale, options))
        constants = Gates(replace(gate, placebo="constant") for gate in gates)
        own = "".join(f"@{option}={value}" for option, value in options.items())
        added.append(replace(variant, name=f"constant {scale:g}{own}", gate=str(constants)))
    return (*variants, *added)


def _stands_for(placebo: Gates, gates: Gates) -> bool:
    if _is_constant(placebo):
        return _can_be_scaled(gates) and placebo.branch_scale == gates.branch_scale
    if len(placebo) != len(gates):
        return False
    pairs = list(zip(placebo, gates, strict=True))
    return all(other in _shuffled(gate) for other, gate in pairs) or all(
        other in _trained_constants(gate) for other, gate in pairs
    )


def _shuffled(gate: Gate) -> Iterator[Gate]:
    if gate.reads not in ("partition", "nothing") and gate.op != "replace":
        yield replace(gate, placebo="shuffled")


def _trained_constants(gate: Gate) -> Iterator[Gate]:
    if gate.reads == "partition":
        yield replace(gate, placebo="constant")
    elif gate.op != "replace":
        kept = {name: getattr(gate, name) for name in ("site", "grain", "share", "activation", "op", "bias")}
        yield Gate(reads="nothing", **kept)


def _can_be_scaled(gates: Gates) -> bool:
    """Return whether all that they are before they have learned anything is a factor of the branch."""
    return bool(gates) and gates.branch_scale is not None and not any(gate.site in ("query", "key") for gate in gates)


def _is_constant(gates: Gates) -> bool:
    return _can_be_scaled(gates) and all(gate.placebo == "constant" for gate in gates)
