"""Variants as the command line spells them: a gate under a name, with options of its own."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

from tidegate._validation import InputError
from tidegate.gates import Gates
from tidegate.lab.training.records import Variant

TRAINING_OPTIONS = ("lr", "gate_lr", "weight_decay", "warmup", "final_lr", "clip")
"""Options of `Training` that a variant may set for itself, all of them numbers."""
MODEL_OPTIONS = ("init", "d_ff", "qk_norm")
"""Options of the model's configuration that a variant may set for itself."""
OPTIONS = (*TRAINING_OPTIONS, "params", "first_seed", *MODEL_OPTIONS)
"""All options that a variant may have, in the order in which it records them.

`params` names a variant to whose number of parameters it is widened. Its seeds begin at `first_seed`; the control's
begin at 0, and only equal seeds share initial values and batches.
"""
_SPELLING = "spelled name=gate@option=value"


def training_options(variant: Variant) -> dict[str, Any]:
    """Return the options of `Training` that a variant sets for itself."""
    return {name: value for name, value in variant.overrides.items() if name in TRAINING_OPTIONS}


def model_options(variant: Variant) -> dict[str, Any]:
    """Return the options of the model's configuration that a variant sets for itself."""
    found: dict[str, Any] = {name: value for name, value in variant.overrides.items() if name in MODEL_OPTIONS}
    return found | ({"qk_norm": found["qk_norm"] == "yes"} if "qk_norm" in found else {})


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Read a comma-separated list of variants; the first is the control. Names must differ."""
    variants = tuple(parse_variant(part, field="variants") for part in text.split(",") if part.strip())
    if len(variants) < 2:
        raise InputError("variants", expected="at least two, the control first", got=text, hint="Write none,bma.")
    names = [variant.name for variant in variants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        hint = "Name them differently, as in first=none,second=none."
        raise InputError("variants", expected="of different names", got=", ".join(twice), hint=hint)
    return variants


def parse_variant(text: str, *, field: str = "variant") -> Variant:
    """Read one variant, as in `slow=g1@lr=1e-3`; errors are about the argument `field`."""
    spelled, *options = text.split("@")
    name, named, gate = spelled.rpartition("=")
    if named and not name.strip():
        raise InputError(field, expected=_SPELLING, got=text, hint="Write a name, or the gate alone.")
    given: dict[str, float | str] = {}
    for option in options:
        own, value = _parse_option(option, text, field)
        if own in given:
            raise InputError(field, expected=f"of one {own} each", got=text, hint="Leave one of them out.")
        given[own] = value
    gates = Gates.parse(gate.strip())
    if placebo := given.pop("placebo", None):
        if not gates or any(each.placebo is not None for each in gates):
            expected = "a gate without a placebo where @placebo makes one of it"
            raise InputError(field, expected=expected, got=text, hint="Leave @placebo out.")
        gates = Gates(replace(each, placebo=cast("Any", placebo)) for each in gates)
    if "params" in given and "d_ff" in given:
        hint = "Leave d_ff or params, which chooses the width, out."
        raise InputError(field, expected="given their width once", got=text, hint=hint)
    undone = [str(each) for each in gates if each.is_undone_by_norm]
    if undone and given.get("qk_norm") == "yes":
        expected = f"without qk_norm where it undoes a gate, as it does {undone[0]}"
        hint = "Use grain 'element', another site, or leave qk_norm out."
        raise InputError(field, expected=expected, got=text, hint=hint)
    if given.get("first_seed") == 0:
        # All begin there.
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
