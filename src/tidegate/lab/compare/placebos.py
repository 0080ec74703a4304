"""Which variant is the placebo of which, and what has to be added so that every gate has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.lab.compare.variants import Variant
from tidegate.lab.training.records import VariantPlan


def placebos_of(variant: VariantPlan, variants: Sequence[VariantPlan], *, control: str) -> tuple[str, ...]:
    """Name the variants that have all of a gate but its mechanism, under the same options.

    They are its shuffled self, a trained constant at its site, and a constant that scales the branch as much as the
    gate does at the start: the control, if it has no gate, where that is exactly 1. A variant that is a placebo itself
    has none.
    """
    gates = Gates.parse(variant.gate)
    if not gates or variant.name == control or any(_is_placebo(gate) for gate in gates):
        return ()
    names = [
        other.name
        for other in variants
        if other.overrides == variant.overrides and _stands_for(Gates.parse(other.gate), gates)
    ]
    bare = next(other for other in variants if other.name == control)
    is_alike = not Gates.parse(bare.gate) and bare.overrides == variant.overrides
    starts_as_control = is_alike and _can_be_scaled(gates) and gates.branch_scale == 1
    return (control,) if starts_as_control and not names else tuple(names)


def with_constants(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Add the constant that a gate starts from, where it is not 1 and nobody asked for it.

    One is added for each scale and set of options.
    """
    known = [(variant.gates.branch_scale, variant.options) for variant in variants if _is_constant(variant.gates)]
    added: list[Variant] = []
    for variant in variants:
        scale, options = variant.gates.branch_scale, variant.options
        if not _can_be_scaled(variant.gates) or scale in (None, 0.0, 1.0) or (scale, options) in known:
            continue
        known.append((scale, options))
        constants = Gates(replace(gate, placebo="constant") for gate in variant.gates)
        own = "".join(f"@{option}={value}" for option, value in options.items())
        added.append(replace(variant, name=f"constant {scale:g}{own}", gates=constants))
    return (*variants, *added)


def _stands_for(placebo: Gates, gates: Gates) -> bool:
    if _is_constant(placebo):
        return _can_be_scaled(gates) and placebo.branch_scale == gates.branch_scale
    if len(placebo) != len(gates):
        return False
    return any(
        all(other in controls for other, controls in zip(placebo, each, strict=True))
        for each in (map(_shuffled, gates), map(_blind, gates))
    )


def _shuffled(gate: Gate) -> Iterator[Gate]:
    if gate.reads not in ("partition", "nothing") and gate.op != "replace":
        yield replace(gate, placebo="shuffled")


def _blind(gate: Gate) -> Iterator[Gate]:
    if gate.reads == "partition":
        yield replace(gate, placebo="constant")
    elif gate.op != "replace":
        yield Gate(
            site=gate.site,
            reads="nothing",
            grain=gate.grain,
            share=gate.share,
            activation=gate.activation,
            op=gate.op,
            bias=gate.bias,
        )


def _can_be_scaled(gates: Gates) -> bool:
    """Whether all that they are before they have learned anything is a factor of the branch."""
    return bool(gates) and gates.branch_scale is not None and not any(gate.site in ("query", "key") for gate in gates)


def _is_constant(gates: Gates) -> bool:
    return _can_be_scaled(gates) and all(gate.placebo == "constant" for gate in gates)


def _is_placebo(gate: Gate) -> bool:
    return gate.placebo is not None or gate.reads == "nothing"
