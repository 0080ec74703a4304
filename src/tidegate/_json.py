"""JSON: parsed and sealed, and frozen dataclasses from the JSON that `dataclasses.asdict` makes of them.

Whatever is wrong with a text or a value is one `ValueError`, which names the field.
"""

from __future__ import annotations

import functools
import json
import math
import types
import typing
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, NoReturn, cast, get_args, get_origin

from tidegate._text import echo, shorten

_DIGEST = "digest"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON; a `ValueError` says what is wrong, also with nan and infinities and with too many levels."""
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite_number)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply.") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"it is no JSON: {problem}.") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"it is no JSON: {name} is no number of JSON.")


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it is no JSON: {echo(digits)} is too large for a number.")
    return number


def content_hash(value: Any) -> str:
    """Sixteen hexadecimal digits that stand for a JSON value, however it is written."""
    # It loads OpenSSL, which `import tidegate` does not need.
    import hashlib

    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise ValueError("lists or objects are nested too deeply.") from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a digest of its content, by which `open_sealed` notices any change of it."""
    assert _DIGEST not in value
    return {**value, _DIGEST: content_hash(value)}


def open_sealed(value: Any) -> dict[str, Any]:
    """Return what `seal` was given; a `ValueError` if there is no digest, or if it is not that of the content."""
    if not isinstance(value, dict):
        raise ValueError(f"it must be an object of fields; got {echo(value)}.")
    content = {name: item for name, item in cast("dict[str, Any]", value).items() if name != _DIGEST}
    if _DIGEST not in value:
        raise ValueError("it has no digest.")
    if cast("Any", value[_DIGEST]) != content_hash(content):
        raise ValueError("its content does not fit its digest: it was changed or damaged.")
    return content


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


def read_as(kind: Any, value: Any, *, where: str = "", null_is_nan: bool = False) -> Any:
    """Build a value of the annotated type from JSON: dataclasses, tuples, lists and dictionaries of them, and unions.

    The field `kind` says which dataclass of a union it is. What does not fit its type is refused, as are an unknown
    field and one that is missing and has no default; the `ValueError` names the field, as in `curve[3].loss`. A whole
    number serves as a `float`. `Any` takes everything.

    where       : what the value is called in errors; empty for a whole document
    null_is_nan : null where a number belongs is nan, instead of an error
    """
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _read_union(arguments, value, where, null_is_nan)
    if null_is_nan and kind is float and value is None:
        return math.nan
    if not _fits(kind, value):
        raise ValueError(f"{where or 'it'} must be {_in_words(kind)}; got {echo(value)}.")
    if is_dataclass(kind):
        return _read_fields(kind, value, where, null_is_nan)
    if origin is dict:
        return {
            name: read_as(arguments[1], item, where=_inside(where, name), null_is_nan=null_is_nan)
            for name, item in value.items()
        }
    if origin in (tuple, list):
        kinds = arguments if _length(kind) is not None else arguments[:1] * len(value)
        items = (
            read_as(item_kind, item, where=f"{where}[{index}]", null_is_nan=null_is_nan)
            for index, (item_kind, item) in enumerate(zip(kinds, value, strict=True))
        )
        return tuple(items) if origin is tuple else list(items)
    return value


def _read_fields(kind: Any, value: dict[str, Any], where: str, null_is_nan: bool) -> Any:
    hints, required = _hints(kind), _required_fields(kind)
    if unknown := sorted(set(value).difference(hints)):
        raise ValueError(f"{where or kind.__name__} has no field {', '.join(map(shorten, unknown))}.")
    for name in required:
        if name not in value:
            raise ValueError(f"{_inside(where, name)} is missing.")
    read = {
        name: read_as(hints[name], item, where=_inside(where, name), null_is_nan=null_is_nan)
        for name, item in value.items()
    }
    try:
        return kind(**read)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}" if where else str(problem)) from None


# Asked once for each dataclass and not once for each value: resolving annotations takes longer than all the rest.
@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


@functools.cache
def _required_fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING)


def _read_union(choices: tuple[Any, ...], value: Any, where: str, null_is_nan: bool) -> Any:
    classes = [choice for choice in choices if is_dataclass(choice)]
    if isinstance(value, dict) and len(classes) > 1:
        choices = (_class_for(cast("dict[str, Any]", value), classes, where),)
    fitting = [choice for choice in choices if _fits(choice, value)]
    if not fitting and null_is_nan and value is None and float in choices:
        return math.nan
    if not fitting:
        words = " or ".join(dict.fromkeys(map(_in_words, choices)))
        raise ValueError(f"{where or 'it'} must be {words}; got {echo(cast('Any', value))}.")
    for choice in fitting[:-1]:
        try:
            return read_as(choice, value, where=where, null_is_nan=null_is_nan)
        except ValueError:
            continue
    return read_as(fitting[-1], value, where=where, null_is_nan=null_is_nan)


def _class_for(value: dict[str, Any], classes: list[Any], where: str) -> Any:
    """Choose the class whose `kind` the value names."""
    by_kind = {_kind(choice): choice for choice in classes}
    kind = value.get("kind")
    if not isinstance(kind, str) or kind not in by_kind:
        raise ValueError(f"{_inside(where, 'kind')} must be one of {', '.join(sorted(by_kind))}; got {echo(kind)}.")
    return by_kind[kind]


def _kind(choice: Any) -> str:
    # A class with slots shows a descriptor where its default would be.
    return next(str(field.default) for field in fields(choice) if field.name == "kind")


def _fits(kind: Any, value: Any) -> bool:
    """Whether a value has the outer form of a type; what is inside it is looked at later."""
    origin = get_origin(kind)
    if origin is Literal:
        return any(type(choice) is type(value) and choice == value for choice in get_args(kind))
    if origin in (tuple, list):
        return isinstance(value, list) and _length(kind) in (None, len(cast("list[Any]", value)))
    if origin is dict or is_dataclass(kind):
        return isinstance(value, dict)
    return _CHECKS[kind](value)


def _length(kind: Any) -> int | None:
    """Items that a tuple type has; None for any number, and for lists."""
    arguments = get_args(kind)
    return None if get_origin(kind) is list or arguments[-1] is Ellipsis else len(arguments)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_LARGEST = 10**308
_CHECKS: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: _is_whole,
    # A whole number beyond the range of floats would break the first sum that it enters.
    float: lambda value: isinstance(value, float) or (_is_whole(value) and abs(value) <= _LARGEST),
    types.NoneType: lambda value: value is None,
}
_WORDS = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    types.NoneType: "null",
}


def _in_words(kind: Any) -> str:
    origin = get_origin(kind)
    if origin is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if origin in (tuple, list):
        return "a list" if _length(kind) is None else f"a list of {_length(kind)}"
    return "an object of fields" if origin is dict or is_dataclass(kind) else _WORDS[kind]


def _inside(where: str, name: str) -> str:
    name = shorten(name)
    return f"{where}.{name}" if where else name
