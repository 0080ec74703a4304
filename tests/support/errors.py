"""How tests name the error that they expect: by its field, not by its wording."""

import pytest

from tidegate import InputError


def rejects(field, *, hint=""):
    """Expect an InputError about a field; `hint` is a part of its hint, such as the remedy that it names."""
    return pytest.raises(InputError, check=lambda error: error.field == field and hint in error.hint)
