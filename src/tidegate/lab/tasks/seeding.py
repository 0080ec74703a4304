"""Random numbers that depend on what they are for, a seed and a step, and on nothing before."""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np

from tidegate._validation import InputError

Purpose: TypeAlias = Literal["training", "validation", "probe", "long"]
"""What numbers are for: those of one purpose never come up again for another, whatever the seed."""

_WORDS: dict[Purpose, int] = {"training": 0, "validation": 1, "probe": 2, "long": 3}


def draws(purpose: Purpose, *, seed: int, step: int) -> np.random.Generator:
    """Return a generator that depends on its arguments alone."""
    for name, value in (("seed", seed), ("step", step)):
        if value < 0:
            raise InputError(name, expected="at least 0", got=value)
    # The bit generator is named, since NumPy may change its default one.
    return np.random.Generator(np.random.PCG64([_WORDS[purpose], seed, step]))
