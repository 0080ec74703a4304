"""Variants: a named gate with its own options; and the placebos of each.

A placebo keeps everything of a gate except its mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from tidegate._validation import InputError
from tidegate.gate import Gate
from tidegate.gates import Gates
from tidegate.lab.training.records import Variant

TRAINING_OPTIONS = ("lr", "gate_lr", "weight_decay", "warmup", "final_lr", "clip")
"""Options of `Training` that a variant may override; all are numbers."""
MODEL_OPTIONS = ("init", "d_ff", "qk_norm")
"""Options of the model's configuration that a variant may override."""
OPTIONS = (*TRAINING_OPTIONS, "params", "first_seed", *MODEL_OPTIONS)
"""All options of a variant, in the order of its records.

`params` names a variant: feed-forward layers are widened to its number of parameters. `first_seed` is the first seed,
by default 0; only equal seeds share initial values and batches.
"""
_SPELLING = "spelled name=gate@option=value"


def training_options(variant: Variant) -> dict[str, Any]:
    """Return the options of `Training` that a variant overrides."""
    return {name: value for name, value in variant.overrides.items() if name in TRAINING_OPTIONS}


def model_options(variant: Variant) -> dict[str, Any]:
    """Return the options of the model's configuration that a variant overrides."""
    found: dict[str, Any] = {name: value for name, value in variant.overrides.items() if name in MODEL_OPTIONS}
    return found | ({"qk_norm": found["qk_norm"] == "yes"} if "qk_norm" in found else {})


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Parse a comma-separated list of variants with different names, the baseline first."""
    variants = tuple(parse_variant(part, field="variants") for part in text.split(",") if part.strip())
    if len(variants) < 2:
        raise InputError("variants", expected="at least two, the baseline first", got=text, hint="Write none,bma.")
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        hint = "Name them differently, as in first=none,second=none."
        raise InputError("variants", expected="of different names", got=", ".join(twice), hint=hint)
    return variants


def parse_variant(text: str, *, field: str = "variant") -> Variant:
    """Parse one variant, as in `slow=g1@lr=1e-3`; errors name the argument `field`."""
    spelled, *options = text.split("@")
    name, named, gate = spelled.rpartition("=")
    if named and not name.strip():
        raise InputError(field, expected=_SPELLING, got=text, hint="Write a name, or only the gate.")
    given: dict[str, float | str] = {}
    for option in options:
        own, value = _parse_option(option, text, field)
        if own in given:
            raise InputError(field, expected=f"given {own} once", got=text, hint="Leave one of them out.")
        given[own] = value
    gates = Gates.parse(gate.strip())
    if placebo := given.pop("placebo", None):
        if not gates or any(each.placebo is not None for each in gates):
            expected = "a gate that is not a placebo yet, with @placebo"
            raise InputError(field, expected=expected, got=text, hint="Leave @placebo out.")
        gates = Gates(replace(each, placebo=cast("Any", placebo)) for each in gates)
    if "params" in given and "d_ff" in given:
        hint = "Leave d_ff or params, which chooses the width, out."
        raise InputError(field, expected="given their width once", got=text, hint=hint)
    undone = [str(each) for each in gates if each.is_undone_by_norm]
    if undone and given.get("qk_norm") == "yes":
        expected = f"without qk_norm, which cancels the gate {undone[0]}"
        hint = "Use grain 'element', another site, or leave qk_norm out."
        raise InputError(field, expected=expected, got=text, hint=hint)
    if given.get("first_seed") == 0:
        # The default.
        del given["first_seed"]
    overrides = {option: value for option, value in given.items() if option in TRAINING_OPTIONS}
    overrides |= {option: given[option] for option in OPTIONS if option in given}
    return Variant(name=name.strip() or text.strip(), gate=str(gates), overrides=overrides)


def _parse_option(option: str, text: str, field: str) -> tuple[str, float | str]:
    name, equals, value = option.partition("=")
    name, value = name.strip().replace("-", "_"), value.strip()
    if not equals or name not in (*OPTIONS, "placebo"):
        hint = f"{option.strip()!r} is none of {', '.join((*OPTIONS, 'placebo'))}."
        raise InputError(field, expected=_SPELLING, got=text, hint=hint)
    if name in ("placebo", "params") or (name == "init" and value in ("fan-in", "torch")):
        return name, value
    if name == "qk_norm":
        if value not in ("yes", "no"):
            raise InputError(field, expected="given yes or no for qk_norm", got=value)
        return name, value
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(field, expected=f"given a finite number for {name}", got=value)
    if name not in ("first_seed", "d_ff"):
        return name, number
    if not number.is_integer() or number < 0:
        raise InputError(field, expected=f"given an integer of at least 0 for {name}", got=value)
    return name, int(number)


def placebos_of(variant: Variant, variants: Sequence[Variant], *, control: str) -> tuple[str, ...]:
    """Return the names of a variant's placebos, which have the same options.

    They are the shuffled gate, a trained constant at its site, and a constant equal to the gate's initial factor on the
    branch: the baseline, if it has no gate and the factor is exactly 1. A placebo has no placebos itself.
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
    """Add a constant placebo for each initial factor other than 1, unless there is one already.

    One is added for each factor and set of options.
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
    """Return whether the gates are a constant factor on the branch at initialization."""
    return bool(gates) and gates.branch_scale is not None and not any(gate.site in ("query", "key") for gate in gates)


def _is_constant(gates: Gates) -> bool:
    return _can_be_scaled(gates) and all(gate.placebo == "constant" for gate in gates)
