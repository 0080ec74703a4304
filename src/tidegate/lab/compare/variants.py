"""What is compared, as the command line spells it: `gate`, or `name=gate@lr=3e-3@clip=0.5`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate.gates import Gates
from tidegate.lab.training.records import VariantPlan

OVERRIDES = ("lr", "gate_lr", "weight_decay", "warmup", "final_lr", "clip", "first_seed")
"""The options that a variant may set for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A gate under a name, perhaps with training options of its own."""

    name: str
    gates: Gates
    overrides: dict[str, float] = field(default_factory=dict)
    first_seed: int = 0
    """Its seeds begin here; the control's begin at 0, and only equal seeds share initial values and batches."""

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read one variant; a `ValueError` says what is wrong with it."""
        spelled, *options = text.split("@")
        name, named, gate = spelled.rpartition("=")
        if named and not name.strip():
            raise ValueError(f"The variant {text!r} has an empty name. Write name=gate, or the gate alone.")
        overrides = dict(_override(option, text) for option in options)
        first_seed = overrides.pop("first_seed", 0.0)
        if not first_seed.is_integer() or first_seed < 0:
            raise ValueError(f"first_seed must be a whole number of at least 0; got {first_seed:g} in {text!r}.")
        return cls(
            name=name.strip() or text.strip(),
            gates=Gates.parse(gate.strip()),
            overrides=overrides,
            first_seed=int(first_seed),
        )

    def plan(self) -> VariantPlan:
        """As the records have it."""
        seeds = {"first_seed": self.first_seed} if self.first_seed else {}
        return VariantPlan(name=self.name, gate=str(self.gates), overrides=self.overrides | seeds)


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Read a list of variants, parted by commas; the first is the control. Names must differ."""
    variants = tuple(Variant.parse(part) for part in text.split(",") if part.strip())
    if len(variants) < 2:
        raise ValueError(f"--variants needs at least two, the control first, such as none,bma; got {text!r}.")
    _require_distinct([variant.name for variant in variants])
    return variants


def _override(option: str, text: str) -> tuple[str, float]:
    name, equals, value = option.partition("=")
    name = name.strip().replace("-", "_")
    if name not in OVERRIDES or not equals:
        raise ValueError(
            f"{option!r} in {text!r} is no option of a variant. Write @name=number, name one of {', '.join(OVERRIDES)}."
        )
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} of the variant {text!r} must be a finite number; got {value!r}.")
    return name, number


def _require_distinct(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Two variants are called {', '.join(twice)}. Name them apart, as in first=none,second=none.")
