"""One table of tolerances, and the assertion that uses it."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

RELATIVE = {
    ("float64", "forward"): 1e-12,
    ("float64", "gradient"): 1e-10,
    ("float64", "finite difference"): 1e-6,
    ("float32", "forward"): 2e-5,
    ("float32", "gradient"): 1e-4,
}
"""Largest allowed difference, in units of 1 + the largest expected magnitude, by (dtype, kind of comparison)."""


def to_numpy(array) -> np.ndarray:
    if hasattr(array, "detach"):
        array = array.detach().cpu()
    return np.asarray(array)


@contextmanager
def naming(row: object) -> Iterator[None]:
    """Add the row to the message of an exception, for tests that loop over a table."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in the row {row}")
        raise


def assert_close(actual, expected, *, what: str = "forward", dtype: str | None = None) -> None:
    """Assert equal shapes, no unexpected nan, and a difference within the table's tolerance.

    The tolerance is that of the coarser of the two dtypes, unless `dtype` is given.
    """
    actual, expected = to_numpy(actual), to_numpy(expected)
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    if dtype is None:
        dtype = min(actual.dtype, expected.dtype, key=lambda d: np.finfo(d).bits).name
    tolerance = RELATIVE[dtype, what] * (1 + np.max(np.abs(expected), initial=0, where=np.isfinite(expected)))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance)
