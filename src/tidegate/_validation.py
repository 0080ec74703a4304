"""Input errors as data."""

from __future__ import annotations

from functools import partial
from os import PathLike

from tidegate._text import echo


class InputError(ValueError):
    """A value from a caller, a file or the command line that cannot be used.

    It reads `<field> must be <expected>, got <got>. <hint>`; without `got`, that part is left out.

    Attributes:
        field: Name of the argument, option or file field; nested as in `curve[3].loss`.
        expected: What the value must be.
        got: The value, or what describes it best.
        hint: What to do about it, in whole sentences; may be empty.
    """

    def __init__(self, field: str, *, expected: str, got: object = ..., hint: str = "") -> None:
        """Store the parts; the message is made of them here and nowhere else."""
        self.field, self.expected, self.got, self.hint = field, expected, got, hint
        shown = "" if got is ... else f", got {got if isinstance(got, PathLike) else echo(got)}"
        super().__init__(f"{field} must be {expected}{shown}.{hint and ' '}{hint}")

    def inside(self, parent: str) -> InputError:
        """Return the same error about a field of `parent`."""
        joint = "" if self.field.startswith("[") else "."
        error = type(self)(f"{parent}{joint}{self.field}", expected=self.expected, got=self.got, hint=self.hint)
        return error.with_traceback(self.__traceback__)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts where an error is pickled, as between processes."""
        return partial(type(self), self.field, expected=self.expected, got=self.got, hint=self.hint), ()
