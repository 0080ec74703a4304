"""Options of studies as `NAME=VALUE` settings of the command line, and shared checks of options."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tidegate._json import parse_json
from tidegate._validation import InputError
from tidegate.gates import Gates


def set_options(options: Any, settings: Sequence[str]) -> Any:
    """Return the options changed by settings of the form `name=value`.

    Values of a tuple are comma-separated, or a JSON list; a nested option is named `outer.inner`.
    """
    for setting in settings:
        name, equals, text = (part.strip() for part in setting.partition("="))
        if not equals:
            example = next(iter(settings_of(options)))
            raise InputError("settings", expected="NAME=VALUE", got=setting, hint=f"For example: {example}.")
        options = _set(options, name, text, name)
    return options


def settings_of(options: Any, *, other_than: Any = None) -> list[str]:
    """Return all options as settings, or only those that differ from `other_than`."""
    same = {} if other_than is None else dict(_items(other_than))
    return [f"{name}={_format(value)}" for name, value in _items(options) if name not in same or same[name] != value]


def format_command(name: str, options: Any, *, full: Any, quick: Any) -> str:
    """Return the shortest command that runs a study with these options."""
    words = [word for setting in settings_of(options, other_than=full) for word in ("--set", setting)]
    if quick is not None:
        others = [word for setting in settings_of(options, other_than=quick) for word in ("--set", setting)]
        words = min(words, ["--quick", *others], key=len)
    return shlex.join(["tidegate", "study", name, *words])


def require_at_least(options: Any, **least: int) -> None:
    """Raise InputError for the first option below its minimum."""
    for name, smallest in least.items():
        if (value := getattr(options, name)) < smallest:
            raise InputError(name, expected=f"at least {smallest}", got=value)


def require_among(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Raise InputError unless there are values, all known and without duplicates."""
    if not values or len(set(values)) != len(values) or not set(values) <= set(known):
        wrong = [value for value in values if value not in known]
        expected = f"at least one of {', '.join(known)}, without duplicates"
        raise InputError(name, expected=expected, got=", ".join(wrong or values))


def require_gates(gates: Sequence[str]) -> None:
    """Raise InputError unless there are gates and all can be parsed."""
    if not gates:
        raise InputError("gates", expected="at least one gate")
    for gate in gates:
        Gates.parse(gate)


def _items(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for field in fields(options):
        value = getattr(options, field.name)
        if is_dataclass(value):
            yield from _items(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def _set(options: Any, name: str, text: str, whole_name: str) -> Any:
    outer, _, inner = name.partition(".")
    kinds = get_type_hints(type(options))
    if outer not in kinds or bool(inner) != is_dataclass(kinds[outer]):
        known = ", ".join(known for known, _ in _items(options))
        raise InputError("settings", expected="a known option", got=whole_name, hint=f"Known: {known}.")
    if inner:
        return replace(options, **{outer: _set(getattr(options, outer), inner, text, whole_name)})
    return replace(options, **{outer: _parse(whole_name, text, kinds[outer])})


def _parse(name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        words = _json_list(name, text) if text.startswith("[") else text.split(",")
        return tuple(_parse(name, word.strip(), get_args(kind)[0]) for word in words if word.strip())
    if get_origin(kind) is Literal:
        require_among(name, [text], get_args(kind))
        return text
    try:
        return kind(text)
    except ValueError:
        raise InputError(name, expected={int: "an integer", float: "a number"}[kind], got=text) from None


def _json_list(name: str, text: str) -> list[str]:
    try:
        return [word if isinstance(word, str) else json.dumps(word) for word in parse_json(text)]
    except ValueError as problem:
        hint = f"Separate values by commas. {problem}"
        raise InputError(name, expected="a JSON list where it begins with [", got=text, hint=hint) from None


def _format(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    words = [str(word) for word in value]
    return json.dumps(value) if any("," in word for word in words) else ",".join(words)
