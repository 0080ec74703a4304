r"""The best guess that any function of a sequence can make of its label, where the boundary is straight.

The mean of the points that a sequence shows says all that it says of its point: it is that point and noise of the
deviation $\tau = 0.1/\sqrt 4$. So the point, given the mean, is normal about it, cut off at the sides of the square,
and the best guess is the side of the line on which more of that lies. Away from the sides this is the side of the mean
itself, which errs with probability $2\tau\ell/(\sqrt{2\pi} A)$ for a line of length $\ell$ in a square of area A.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import ndtr

from tidegate.lab.studies.boundary.tasks import LINEAR, NOISE, NUM_TOKENS, FloatArray, Labels, mean_point

_DEVIATION = NOISE / math.sqrt(NUM_TOKENS)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)
_REACH = 8.0
"""Deviations from the mean beyond which nothing is left to integrate."""


def bayes_labels(task: str, sequences: FloatArray) -> Labels:
    """Return the likelier label of each sequence (count, T, width); the task's boundary must be straight."""
    plane = LINEAR[task]
    mean = mean_point(sequences, task)
    low, high = (np.clip(mean[:, :1] + sign * _REACH * _DEVIATION, -plane.reach, plane.reach) for sign in (-1.0, 1.0))
    # Integrated over the first coordinate; the second is in closed form, from the line to a side.
    first = low + (high - low) * (_NODES + 1) / 2
    line = np.clip((plane.offset - plane.normal[0] * first) / plane.normal[1], -plane.reach, plane.reach)
    at_line, at_low, at_high = (ndtr((end - mean[:, 1:]) / _DEVIATION) for end in (line, -plane.reach, plane.reach))
    density = _WEIGHTS * np.exp(-(((first - mean[:, :1]) / _DEVIATION) ** 2) / 2)
    above, below = (density * (at_high - at_line)).sum(axis=1), (density * (at_line - at_low)).sum(axis=1)
    return ((above > below) == (plane.normal[1] > 0)).astype(np.int64)
