"""Variants as the command line spells them: a gate under a name, with options of its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from tidegate._text import echo
from tidegate.gates import Gates
from tidegate.lab.training.records import VariantPlan

TRAINING_OPTIONS = ("lr", "gate_lr", "weight_decay", "warmup", "final_lr", "clip", "first_seed")
"""Numbers of the training that a variant may set for itself."""
OPTIONS = (*TRAINING_OPTIONS, "init", "d_ff", "qk_norm", "params", "placebo")
"""All that a variant may set for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A gate under a name, perhaps with options of its own."""

    name: str
    gates: Gates
    training: dict[str, float] = field(default_factory=dict)
    """Of `Training`."""
    model: dict[str, Any] = field(default_factory=dict)
    """Of the model's configuration: `init`, `d_ff`, `qk_norm`."""
    params: str | None = None
    """A variant whose number of parameters it is widened to; None leaves its width."""
    first_seed: int = 0
    """Its seeds begin here; the control's begin at 0, and only equal seeds share initial values and batches."""

    def __post_init__(self) -> None:
        if self.params is not None and "d_ff" in self.model:
            raise ValueError(
                f"The variant {self.name} has its width by d_ff and by params, which chooses it. Leave one out."
            )
        undone = [str(gate) for gate in self.gates if gate.is_undone_by_norm]
        if undone and self.model.get("qk_norm"):
            raise ValueError(
                f"The variant {self.name} normalises queries and keys, which undoes its gate {undone[0]}: a factor of "
                "a whole query or key. Use grain 'element', another site, or leave qk_norm out."
            )

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read one variant; a `ValueError` says what is wrong with it."""
        spelled, *options = text.split("@")
        name, named, gate = spelled.rpartition("=")
        if named and not name.strip():
            raise ValueError(f"The variant {echo(text)} has an empty name. Write name=gate, or the gate alone.")
        given: dict[str, Any] = {}
        for option in options:
            own, value = parse_option(option, text)
            if own in given:
                raise ValueError(f"The variant {echo(text)} has {own} twice. Leave one of them out.")
            given[own] = value
        gates = Gates.parse(gate.strip())
        if placebo := given.pop("placebo", None):
            gates = _as_placebo(gates, placebo, text)
        return cls(
            name=name.strip() or text.strip(),
            gates=gates,
            model={option: given.pop(option) for option in ("init", "d_ff", "qk_norm") if option in given},
            params=given.pop("params", None),
            first_seed=given.pop("first_seed", 0),
            training=given,
        )

    @property
    def options(self) -> dict[str, float | str]:
        """All options of its own, as the records have them."""
        apart: dict[str, float | str] = {} if self.params is None else {"params": self.params}
        apart |= {"first_seed": self.first_seed} if self.first_seed else {}
        apart |= {option: _as_word(value) for option, value in self.model.items()}
        return {**self.training, **apart}

    def plan(self) -> VariantPlan:
        """As the records have it."""
        return VariantPlan(name=self.name, gate=str(self.gates), overrides=self.options)


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Read a list of variants, parted by commas; the first is the control. Names must differ."""
    variants = tuple(Variant.parse(part) for part in text.split(",") if part.strip())
    if len(variants) < 2:
        raise ValueError(f"variants must be at least two, the control first, such as none,bma; got {echo(text)}.")
    _require_distinct([variant.name for variant in variants])
    return variants


def parse_option(option: str, text: str) -> tuple[str, Any]:
    """Read one option of a variant, as in `lr=3e-3`; a `ValueError` says what is wrong with it.

    text : what it stands in, for the error
    """
    name, equals, value = option.partition("=")
    name, value = name.strip().replace("-", "_"), value.strip()
    if name not in OPTIONS or not equals:
        raise ValueError(
            f"{echo(option)} in {echo(text)} is no option of a variant. Write @name=value, name one of "
            f"{', '.join(OPTIONS)}."
        )
    match name:
        case "placebo" | "params":
            return name, value
        case "init" if value in ("fan-in", "torch"):
            return name, value
        case "qk_norm":
            if value not in ("yes", "no"):
                raise ValueError(f"qk_norm of the variant {echo(text)} must be yes or no; got {echo(value)}.")
            return name, value == "yes"
        case "first_seed" | "d_ff":
            return name, _whole_number(name, value, text)
        case _:
            return name, _number(name, value, text)


def _number(name: str, value: str, text: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} of the variant {echo(text)} must be a finite number; got {echo(value)}.")
    return number


def _whole_number(name: str, value: str, text: str) -> int:
    number = _number(name, value, text)
    if not number.is_integer() or number < 0:
        raise ValueError(f"{name} must be a whole number of at least 0; got {number:g} in {echo(text)}.")
    return int(number)


def _as_word(value: Any) -> float | str:
    return ("yes" if value else "no") if isinstance(value, bool) else value


def _as_placebo(gates: Gates, placebo: str, text: str) -> Gates:
    if not gates:
        raise ValueError(f"The variant {echo(text)} has no gate, and so no placebo. Leave @placebo out.")
    if any(gate.placebo is not None for gate in gates):
        raise ValueError(f"The variant {echo(text)} names its placebo twice. Leave one of them out.")
    return Gates(replace(gate, placebo=cast("Any", placebo)) for gate in gates)


def _require_distinct(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two variants are called {', '.join(twice)}. Name them apart, as in first=none,second=none.")
