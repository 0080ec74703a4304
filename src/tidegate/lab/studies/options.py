"""A study's options as words of a command line, `NAME=VALUE`, and back; and checks that options share."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tidegate.gates import Gates


def set_options(options: Any, settings: Sequence[str]) -> Any:
    """Return the options with some of them set, each setting as `name=value`.

    Values of a tuple are parted by commas, or written as a JSON list; an option of an option is named `outer.inner`.
    """
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals:
            raise ValueError(
                f"a setting must be NAME=VALUE, such as {next(iter(settings_of(options)))}; got {setting!r}."
            )
        options = _set(options, name.strip(), text.strip(), name.strip())
    return options


def settings_of(options: Any, *, other_than: Any = None) -> list[str]:
    """Return all options as settings, or those that differ from the options given."""
    known = dict(_items(options))
    same = {} if other_than is None else dict(_items(other_than))
    return [f"{name}={_format(value)}" for name, value in known.items() if name not in same or same[name] != value]


def format_command(name: str, options: Any, *, full: Any, quick: Any) -> str:
    """Return the shortest command that answers a study with these options."""
    words = [["--set", setting] for setting in settings_of(options, other_than=full)]
    if quick is not None:
        quick_words = [["--set", setting] for setting in settings_of(options, other_than=quick)]
        if len(quick_words) < len(words):
            words = [["--quick"], *quick_words]
    return shlex.join(["tidegate", "study", name, *(word for pair in words for word in pair)])


def require_at_least(options: Any, **least: int) -> None:
    """Refuse options below their least value."""
    for name, smallest in least.items():
        if (value := getattr(options, name)) < smallest:
            raise ValueError(f"{name} must be at least {smallest}; got {value!r}.")


def require_among(name: str, values: Sequence[str], known: Sequence[str]) -> None:
    """Refuse no value at all, a value twice, and one that is not known."""
    if not values or len(set(values)) != len(values):
        raise ValueError(f"{name} must have at least one value and no duplicates; got {', '.join(values)!r}.")
    for value in values:
        if value not in known:
            raise ValueError(f"{name} must be among {', '.join(known)}; got {value!r}.")


def require_gates(gates: Sequence[str]) -> None:
    """Refuse no gates, and gates that cannot be parsed, before any work is done."""
    if not gates:
        raise ValueError("gates must have at least one value.")
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
        raise ValueError(f"there is no option {whole_name!r}. Known: {known}.")
    if inner:
        return replace(options, **{outer: _set(getattr(options, outer), inner, text, whole_name)})
    return replace(options, **{outer: _parse(whole_name, text, kinds[outer])})


def _parse(name: str, text: str, kind: Any) -> Any:
    if get_origin(kind) is tuple:
        words = _json_list(text) or [word.strip() for word in text.split(",") if word.strip()]
        return tuple(_parse(name, word, get_args(kind)[0]) for word in words)
    if get_origin(kind) is Literal:
        require_among(name, [text], get_args(kind))
        return text
    if kind is str:
        return text
    try:
        return kind(text)
    except ValueError:
        words = {int: "a whole number", float: "a number"}
        raise ValueError(f"{name} must be {words[kind]}; got {text!r}.") from None


def _json_list(text: str) -> list[str]:
    if not text.startswith("["):
        return []
    try:
        return [word if isinstance(word, str) else json.dumps(word) for word in json.loads(text)]
    except json.JSONDecodeError as problem:
        raise ValueError(f"a list must be JSON, or words parted by commas; got {text!r}: {problem}.") from None


def _format(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    words = [str(word) for word in value]
    return json.dumps(value) if any("," in word for word in words) else ",".join(words)
