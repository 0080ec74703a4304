"""How many patterns a Hopfield network can store, in closed form."""

from __future__ import annotations

import math
import sys

from tidegate.tensors._checks import require_count, require_positive


def classical_capacity(N: float) -> float:
    r"""Random ±1 patterns that N classical neurons can store: $0.138 N$ (Amit, Gutfreund and Sompolinsky 1985).

    N       : number of neurons, above 0
    returns : number of patterns, not rounded
    """
    require_positive(N=N)
    return 0.138 * N


def modern_capacity(d: int, epsilon: float = 0.01, *, beta: float = 1.0, K: float = 3.0) -> float:
    r"""Random patterns on a sphere that a modern network stores, failing with probability at most epsilon.

    The lower bound of Ramsauer et al. 2020, theorem 3, for patterns of norm $K\sqrt{d-1}$:
    $N \ge \sqrt\epsilon\, c^{(d-1)/4}$ with $c = b / W_0(e^{a + \ln b})$, $b = \frac25 K^2 \beta$,
    $a = \frac{2}{d-1} (1 + \ln(2 \beta K^2 \epsilon (d-1)))$ and $W_0$ the upper branch of Lambert's function.
    The theorem asks for $c \ge (2/\sqrt\epsilon)^{4/(d-1)}$, which says that N is at least 2: a smaller result promises
    nothing.

    d       : width of the patterns, at least 2
    epsilon : probability of failure, in (0, 1]
    beta, K : inverse temperature and radius, above 0; the defaults are those of the paper's first example
    returns : number of patterns, not rounded; `inf` beyond the largest float
    """
    require_count(2, d=d)
    require_positive(epsilon=epsilon, beta=beta, K=K)
    if epsilon > 1:
        raise ValueError(f"epsilon must be a probability in (0, 1]; got {epsilon!r}.")
    log_b = math.log(2 * K**2 * beta / 5)
    a = 2 / (d - 1) * (1 + math.log(2 * beta * K**2 * epsilon * (d - 1)))
    log_c = log_b - _log_lambert_w(a + log_b)
    exponent = math.log(epsilon) / 2 + (d - 1) / 4 * log_c
    return math.exp(exponent) if exponent < math.log(sys.float_info.max) else math.inf


def _log_lambert_w(y: float) -> float:
    """The logarithm u of $W_0(e^y)$: the root of $e^u + u = y$, by Newton's method from its right, where it is safe."""
    u = y if y <= 1 else math.log(y)
    for _ in range(50):
        u -= (math.exp(u) + u - y) / (math.exp(u) + 1)
    return u
