"""The distributions of the tests: Student's t, Dunnett's maximum of several t, noncentral t."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

from tidegate._validation import InputError

Array: TypeAlias = NDArray[np.float64]


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Return mean and standard deviation (n - 1 in the denominator); the deviation of a single number is None."""
    if not len(values):
        raise InputError("values", expected="at least one number", got=0)
    numbers = np.asarray(values, dtype=np.float64)
    return float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None


def t_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return Student's confidence interval for the mean of at least two independent numbers."""
    check_confidence(confidence)
    if len(values) < 2:
        raise InputError("values", expected="at least two numbers", got=len(values))
    mean, sd = mean_and_sd(values)
    half = student_critical_value(len(values) - 1, 1 - confidence) * (sd or 0.0) / math.sqrt(len(values))
    return mean - half, mean + half


def student_critical_value(degrees_of_freedom: float, level: float) -> float:
    """Return the t that Student's |T| exceeds with probability `level`."""
    return float(special.stdtrit(degrees_of_freedom, 1 - level / 2))


def detectable_noncentrality(critical_value: float, degrees_of_freedom: float, power: float) -> float:
    """Return the noncentrality at which t exceeds the critical value with probability `power`."""
    return float(special.nctdtrinc(degrees_of_freedom, 1 - power, critical_value))


def dunnett_p_value(statistic: float, num_comparisons: int, degrees_of_freedom: float) -> float:
    r"""Return $P(\max_i |T_i| \ge t)$ for k differences from one baseline, each over its estimated standard error.

    $T_i = (Z_i - Z_0) / (\sqrt 2\, s)$ with independent standard normal $Z$ and $s^2$ a chi-square over its degrees of
    freedom, so any two have correlation 1/2. Computed by two nested trapezoidal sums, over $|Z_0|$ and $\log s$: both
    integrands are analytic and vanish at the ends, so the sums converge faster than any power of the step. With k = 1
    it is Student's two-sided p-value. Accurate to rounding down to p = 1e-15, and to an order of magnitude below.
    """
    for name, value in (("num_comparisons", num_comparisons), ("degrees_of_freedom", degrees_of_freedom)):
        if value < 1:
            raise InputError(name, expected="at least 1", got=value)
    z, z_weights, s, s_weights = _nodes(degrees_of_freedom)
    reach = math.sqrt(2) * abs(statistic) * s[:, None]
    outside = np.minimum(special.ndtr(z - reach) + special.ndtr(-z - reach), 1 - 2**-53)
    any_outside = -np.expm1(num_comparisons * np.log1p(-outside))
    return float(s_weights @ (any_outside @ z_weights))


@lru_cache(maxsize=1024)
def dunnett_critical_value(num_comparisons: int, degrees_of_freedom: float, confidence: float = 0.95) -> float:
    """Return the t at which `dunnett_p_value` equals one minus the confidence."""
    check_confidence(confidence)
    level = 1 - confidence
    # Bracket the root: Student's value below, Bonferroni's above.
    low, high = (student_critical_value(degrees_of_freedom, level / share) for share in (1, num_comparisons))
    if num_comparisons == 1:
        return low
    found: Any = optimize.brentq(
        lambda t: dunnett_p_value(t, num_comparisons, degrees_of_freedom) - level, low, high, xtol=1e-12
    )
    return float(found)


@lru_cache(maxsize=1024)
def _nodes(degrees_of_freedom: float) -> tuple[Array, Array, Array, Array]:
    """Return nodes and weights of |Z| and of s."""
    z = np.linspace(0, 9, 55)
    z_weights = np.exp(-(z**2) / 2)
    z_weights[0] /= 2
    # Beyond these ends the density of log s is below exp(-45) of its peak at 0.
    width = math.sqrt(45 / degrees_of_freedom)
    log_s = np.arange(-width * (1 + width), width, 0.12 / math.sqrt(degrees_of_freedom))
    s_weights = np.exp(degrees_of_freedom * (log_s - np.expm1(2 * log_s) / 2))
    return z, z_weights / z_weights.sum(), np.exp(log_s), s_weights / s_weights.sum()


def check_confidence(confidence: float) -> None:
    """Raise InputError unless the confidence lies between 0 and 1."""
    if not 0 < confidence < 1:
        raise InputError("confidence", expected="between 0 and 1, such as 0.95", got=confidence)
