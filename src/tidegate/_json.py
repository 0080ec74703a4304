"""Values that JSON can hold, and frozen dataclasses from the JSON that `dataclasses.asdict` makes of them."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, cast, get_args, get_origin


def finite(value: float | None) -> float | None:
    """Return the number, or None in place of nan and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def without_nan(value: Any) -> Any:
    """Return a value of JSON with None in place of every nan and infinity; tuples become lists."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in cast("list[Any]", value)]
    return value


def read_as(kind: Any, value: Any) -> Any:
    """Build a value of the annotated type from JSON: dataclasses, tuples and dictionaries of them, and unions.

    The field `kind` says which dataclass of a union it is. An unknown field or kind is refused.
    """
    if is_dataclass(kind):
        return _read_fields(kind, value)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is tuple:
        return tuple(read_as(arguments[0], item) for item in value)
    if origin is dict:
        return {name: read_as(arguments[1], item) for name, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, value)
    return value


def _read_fields(kind: Any, value: dict[str, Any]) -> Any:
    hints = typing.get_type_hints(kind)
    if unknown := sorted(set(value).difference(field.name for field in fields(kind))):
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}.")
    return kind(**{name: read_as(hints[name], item) for name, item in value.items()})


def _read_union(choices: tuple[Any, ...], value: Any) -> Any:
    classes = [choice for choice in choices if is_dataclass(choice)]
    if isinstance(value, dict) and classes:
        return read_as(_class_for(cast("dict[str, Any]", value), classes), value)
    if isinstance(value, list):
        return read_as(next(choice for choice in choices if get_origin(choice) is tuple), value)
    return cast("Any", value)


def _class_for(value: dict[str, Any], classes: list[Any]) -> Any:
    """Choose the only class, or the one whose `kind` the value names."""
    if len(classes) == 1:
        return classes[0]
    by_kind = {_kind(choice): choice for choice in classes}
    if value.get("kind") not in by_kind:
        raise ValueError(f"kind must be one of {', '.join(sorted(by_kind))}; got {value.get('kind')!r}.")
    return by_kind[value["kind"]]


def _kind(choice: Any) -> str:
    # A class with slots shows a descriptor where its default would be.
    return next(str(field.default) for field in fields(choice) if field.name == "kind")
