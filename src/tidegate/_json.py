"""Parse JSON, add and verify checksums, and convert between JSON and dataclasses with cattrs.

Every error is an `InputError` that names the field, as in `curve[3].loss`.
"""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias, Union, cast, get_args, get_origin

from tidegate._text import short_repr, shorten
from tidegate._validation import InputError

if TYPE_CHECKING:
    from cattrs import Converter

_CHECKSUM = "digest"
_Hook: TypeAlias = Callable[[Any, Any], Any]


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raise InputError for anything else, including nan, infinities and too many levels."""
    try:
        return json.loads(text, parse_constant=_reject_constant, parse_float=_finite_number)
    except RecursionError:
        raise InputError("text", expected="valid JSON", hint="Lists or objects are nested too deeply.") from None
    except ValueError as problem:
        raise InputError("text", expected="valid JSON", hint=f"{problem}.") from None


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _finite_number(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{short_repr(digits)} is too large for a number")
    return number


def content_hash(value: Any) -> str:
    """Return a hash of a JSON value as sixteen hexadecimal digits, independent of its layout."""
    # `import tidegate` does not need hashlib, which loads OpenSSL.
    import hashlib

    try:
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except RecursionError:
        raise InputError("value", expected="JSON", hint="Lists or objects are nested too deeply.") from None
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def add_checksum(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with a checksum of its content for `verify_checksum`."""
    assert _CHECKSUM not in value
    return {**value, _CHECKSUM: content_hash(value)}


def verify_checksum(value: Any) -> dict[str, Any]:
    """Return the object without its checksum. Raise InputError if the checksum is missing or wrong."""
    fields: dict[str, Any] = require_object(value, "value")
    content = {name: item for name, item in fields.items() if name != _CHECKSUM}
    if _CHECKSUM not in fields:
        raise InputError(_CHECKSUM, expected="given")
    if fields[_CHECKSUM] != content_hash(content):
        hint = "The content was changed or damaged."
        raise InputError(_CHECKSUM, expected="the checksum of the content", got=fields[_CHECKSUM], hint=hint)
    return content


def require_object(value: Any, field: str = "") -> dict[str, Any]:
    """Return a JSON object. Raise InputError for any other value."""
    if not isinstance(value, dict):
        raise InputError(field, expected="an object of fields", got=value)
    return cast("dict[str, Any]", value)


def finite(value: float | None) -> float | None:
    """Return the number, or None for nan and infinities, which JSON does not have."""
    return value if value is not None and math.isfinite(value) else None


def without_nan(value: Any) -> Any:
    """Replace every nan and infinity in a JSON value by None; tuples become lists."""
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in cast("list[Any]", value)]
    return value


def encode(value: Any) -> Any:
    """Return a dataclass as a JSON value; classes with a `to_dict` method are encoded by it."""
    return _converter(null_is_nan=False).unstructure(value)


def decode(kind: Any, value: Any, *, where: str = "", null_is_nan: bool = False) -> Any:
    """Return a value of the annotated type from a JSON value.

    Nothing is coerced: an unknown field, a missing one without a default, or a value of another type raises InputError
    with the path of the field. An integer may be a float. The field `kind` chooses among several dataclasses. A
    function `decode` in the metadata of a field decodes it.

    Args:
        kind: A dataclass, or a tuple, list, dictionary or union of supported types.
        value: The JSON value.
        where: The name of the value in errors; empty for a whole document.
        null_is_nan: Whether null in place of a number is nan instead of an error.
    """
    try:
        return _structure(_converter(null_is_nan=null_is_nan), kind, value, where)
    except InputError as problem:
        field = problem.field or "value"
        raise InputError(field, expected=problem.expected, got=problem.got, hint=problem.hint) from None


def decode_part(kind: Any, value: Any) -> Any:
    """Decode within a field's decoder: like `decode`, but errors name fields relative to the value."""
    return _structure(_converter(null_is_nan=False), kind, value, "")


def _structure(converter: Converter, kind: Any, value: Any, where: str) -> Any:
    from cattrs.errors import BaseValidationError

    try:
        return converter.structure(value, kind)
    except (InputError, BaseValidationError) as problem:
        raise _first_problem(problem, where) from None


def _first_problem(problem: Exception, path: str) -> InputError:
    """Return the first error of a group, with the path of its field."""
    from cattrs.errors import AttributeValidationNote, BaseValidationError, ForbiddenExtraKeysError

    while isinstance(problem, BaseValidationError):
        problem = problem.exceptions[0]
        for note in getattr(problem, "__notes__", ()):
            path = _join(path, note.name) if isinstance(note, AttributeValidationNote) else path
    match problem:
        case InputError():
            field = _join(path, problem.field)
            return InputError(field, expected=problem.expected, got=problem.got, hint=problem.hint)
        case KeyError():
            return InputError(path, expected="given")
        case ForbiddenExtraKeysError():
            known = ", ".join(field.name for field in fields(cast("Any", problem.cl)))
            expected = f"a field of {problem.cl.__name__}: {known}"
            return InputError(_join(path, min(problem.extra_fields)), expected=expected)
        case ValueError() | TypeError() | OverflowError():
            return InputError(path, expected="valid", hint=shorten(str(problem)))
        case _:
            raise problem


def _join(path: str, name: str) -> str:
    name = shorten(name)
    return f"{path}{'' if name.startswith('[') else '.'}{name}" if path and name else path or name


@cache
def _converter(*, null_is_nan: bool) -> Converter:
    # `import tidegate` does not need cattrs.
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True)
    for kind, (fits, words) in _SCALARS.items():
        converter.register_structure_hook(kind, _scalar_hook(fits, words))
    if null_is_nan:
        number = _scalar_hook(*_SCALARS[float])
        converter.register_structure_hook(float, lambda value, _: math.nan if value is None else number(value, _))
    for origins, make_hook in (
        ((Union, types.UnionType), _union_hook),
        ((Literal,), _literal_hook),
        ((list, tuple), _list_hook),
        ((dict,), _dict_hook),
    ):
        converter.register_structure_hook_factory(lambda kind, own=origins: get_origin(kind) in own, make_hook)
    converter.register_structure_hook_factory(is_dataclass, _dataclass_hook)
    converter.register_unstructure_hook_func(
        lambda kind: is_dataclass(kind) and hasattr(kind, "to_dict"), lambda value: value.to_dict()
    )
    return converter


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_LARGEST = 10**308
_SCALARS: dict[Any, tuple[Callable[[Any], bool], str]] = {
    str: (lambda value: isinstance(value, str), "a text"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_whole, "a whole number"),
    # An integer beyond the range of floats would break the first sum that it enters.
    float: (lambda value: isinstance(value, float) or (_is_whole(value) and abs(value) <= _LARGEST), "a number"),
    types.NoneType: (lambda value: value is None, "null"),
}


def _scalar_hook(fits: Callable[[Any], bool], words: str) -> _Hook:
    def check(value: Any, _: Any) -> Any:
        if not fits(value):
            raise InputError("", expected=words, got=value)
        return value

    return check


def _literal_hook(kind: Any, _: Converter) -> _Hook:
    choices = get_args(kind)
    words = " or ".join(map(repr, choices))
    return _scalar_hook(lambda value: any(type(own) is type(value) and own == value for own in choices), words)


def _list_hook(kind: Any, converter: Converter) -> _Hook:
    origin, kinds = get_origin(kind), get_args(kind)
    length = None if origin is list or kinds[-1] is Ellipsis else len(kinds)

    def structure(value: Any, _: Any) -> Any:
        items: list[Any] = cast("list[Any]", value)
        if not isinstance(value, list) or length not in (None, len(items)):
            raise InputError("", expected="a list" if length is None else f"a list of {length}", got=items)
        item_kinds = repeat(kinds[0]) if length is None else kinds
        made = (
            _structure(converter, item_kind, item, f"[{index}]")
            for index, (item_kind, item) in enumerate(zip(item_kinds, items, strict=False))
        )
        return tuple(made) if origin is tuple else list(made)

    return structure


def _dict_hook(kind: Any, converter: Converter) -> _Hook:
    item_kind = get_args(kind)[1]

    def structure(value: Any, _: Any) -> Any:
        items = require_object(value).items()
        return {name: _structure(converter, item_kind, item, name) for name, item in items}

    return structure


def _dataclass_hook(kind: Any, converter: Converter) -> _Hook:
    from cattrs.gen import make_dict_structure_fn, override

    own = {field.name: field.metadata["decode"] for field in fields(kind) if "decode" in field.metadata}
    overrides: Any = {name: override(struct_hook=lambda value, _, read=read: read(value)) for name, read in own.items()}
    make: Any = make_dict_structure_fn(kind, converter, _cattrs_forbid_extra_keys=True, **overrides)

    return lambda value, _: make(require_object(value), kind)


def _union_hook(kind: Any, converter: Converter) -> _Hook:
    members = get_args(kind)
    classes: dict[str, Any] = {_kind_of(member): member for member in members if is_dataclass(member)}

    def structure(value: Any, _: Any) -> Any:
        if isinstance(value, dict) and len(classes) > 1:
            named = require_object(value).get("kind")
            if not isinstance(named, str) or named not in classes:
                raise InputError("kind", expected=f"one of {', '.join(sorted(classes))}", got=named)
            return converter.structure(cast("Any", value), classes[named])
        # Null is not nan where null is allowed.
        if value is None and types.NoneType in members:
            return None
        problems: list[InputError] = []
        for member in members:
            try:
                return _structure(converter, member, value, "")
            except InputError as problem:
                problems.append(problem)
        # A member whose list or object has the right form gives the best error.
        for problem in problems:
            if problem.field:
                raise problem
        words = " or ".join(dict.fromkeys(problem.expected for problem in problems))
        raise InputError("", expected=words, got=cast("Any", value))

    return structure


def _kind_of(member: Any) -> str:
    # A class with slots has a descriptor in place of its default.
    return next((str(field.default) for field in fields(member) if field.name == "kind"), "")
