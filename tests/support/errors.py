"""Expect errors by their field, not by their wording."""

import pytest

from tidegate import InputError


def rejects(field, *, hint=""):
    """Expect an InputError for a field; `hint` is a part of its hint, such as the remedy."""
    return pytest.raises(InputError, check=lambda error: error.field == field and hint in error.hint)
