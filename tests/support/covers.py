"""Rows of a product that the tests run: a cover by default, all rows with `--full`.

The cover contains the rows in which at most one argument leaves its few representative values: every gate with one rich
set of options, every set of options with a few gates. `tests/parity/test_torch_reference.py` always runs the whole
product of gates and options.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
from layers import GATES
from libraries import LIBRARIES
from torch_layers import OPTIONS, SPELLINGS


@dataclass(frozen=True)
class Axis:
    """The values of one argument by name, and the few that are combined with every value of the other arguments."""

    values: Mapping[str, Any]
    few: tuple[str, ...]


def axis(values: Iterable[Any] | Mapping[str, Any], *few: Any) -> Axis:
    """Return an axis of values, named by their `str` unless they have names; `few` defaults to the first."""
    named = dict(values) if isinstance(values, Mapping) else {str(value): value for value in values}
    return Axis(named, tuple(map(str, few)) or (next(iter(named)),))


def rows(axes: Mapping[str, Axis], *, full: bool) -> list[dict[str, str]]:
    """Return all rows of the product, as names of values, or those in which at most one argument leaves its few."""
    every = (dict(zip(axes, names, strict=True)) for names in product(*(axis.values for axis in axes.values())))
    return [row for row in every if full or sum(row[name] not in axis.few for name, axis in axes.items()) <= 1]


def without_most_eager_jax(laws: Iterable[tuple[str, str, str | None]]) -> list[bool]:
    """Return whether each law, a file, a function and a library, runs: on eager JAX only the first of each file.

    Eager JAX compiles every operator for every shape, and takes longer than the other three libraries together. It runs
    the same code as jitted JAX, but with values instead of tracers, which one law per file covers.
    """
    first: dict[str, str] = {}
    return [library != "jax" or first.setdefault(file, function) == function for file, function, library in laws]


def over(**axes: Axis) -> pytest.MarkDecorator:
    """Run a test over the product of axes, each named after the test's argument."""
    return pytest.mark.over(axes)


SEVERAL = ("none", "g1+g2+g3+g4+g5", "output:query:head+value:query:head+key:query:head+query:query:head")
"""No gate, an element-wise gate at every site, and a gate per head at every site of the heads."""

SPELLING = axis(SPELLINGS, *SEVERAL)
GATE = axis(map(str, GATES), "bma", "g1", "key:query:head")
OPTION = axis(OPTIONS, "everything")
DTYPE = axis([torch.float64, torch.float32, torch.bfloat16, torch.float16], torch.bfloat16)
LIBRARY = axis({library.name: library for library in LIBRARIES})
HALF = axis([torch.bfloat16, torch.float16])

every_layer = over(gate=SPELLING, options=OPTION)
every_layer_with_one_gate = over(gate=GATE, options=OPTION)
every_half_layer = over(gate=SPELLING, dtype=HALF, options=OPTION)
