"""The one door to all tasks, from what a command line says."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

from tidegate._json import decode_part, require_object
from tidegate._validation import InputError
from tidegate.lab.tasks.image import ImageTask, image_task
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import DataError, RecordedTask, Task, TaskKind
from tidegate.lab.tasks.text import DEFAULT_LENGTH, TextTask, text_task

_CLASSES: dict[str, type[TextTask | ImageTask | RecallTask]] = {
    "lm": TextTask,
    "image": ImageTask,
    "recall": RecallTask,
}


def task_of(
    kind: TaskKind,
    data: str | None = None,
    *,
    tokenizer: str | None = None,
    field: str | None = None,
    length: int | None = None,
    final_tokens: int | None = None,
) -> Task:
    """The task that the options of a command line describe, with its data found and fingerprinted.

    final_tokens : how much of what is held out of a text is evaluated at the end, at most; None takes the task's own

    A `DataError` says what cannot be found or read, and which option has no meaning for this kind of task.
    """
    if kind == "lm":
        length = DEFAULT_LENGTH if length is None else length
        task = text_task(data, tokenizer=tokenizer, field=field, length=length)
        return task if final_tokens is None else replace(task, num_final_tokens=final_tokens)
    if kind not in get_args(TaskKind):
        raise DataError(f"--task must be one of {', '.join(get_args(TaskKind))}; got {kind!r}.")
    _require_absent(kind, "tokenizer", tokenizer)
    _require_absent(kind, "field", field)
    _require_absent(kind, "final-tokens", final_tokens)
    if kind == "image":
        _require_absent(kind, "length", length)
        return image_task(data)
    _require_absent(kind, "data", data)
    return RecallTask() if length is None else _recall_task(length)


def task_from_dict(values: Any) -> Task:
    """Return the task that `Task.to_dict` described; with fields of its own it is a `RecordedTask`."""
    kind = require_object(values).get("kind")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise InputError("kind", expected=f"one of {', '.join(_CLASSES)}", got=kind)
    if set(values) - {option.name for option in fields(_CLASSES[kind])}:
        return RecordedTask(values)
    return decode_part(_CLASSES[kind], values)


def _require_absent(kind: TaskKind, option: str, value: str | int | None) -> None:
    if value is not None:
        raise DataError(f"--{option} {value} has no meaning for --task {kind}; leave it out.")


def _recall_task(length: int) -> RecallTask:
    """As many pairs as fit, all of them asked for; keys enough for four times as many."""
    num_pairs, rest = divmod(length, 3)
    if num_pairs < 1 or rest:
        raise DataError(f"--length of --task recall must be a multiple of 3, three tokens a pair; got {length}.")
    return RecallTask(num_pairs=num_pairs, num_keys=max(RecallTask().num_keys, 4 * num_pairs))
