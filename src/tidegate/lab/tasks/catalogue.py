"""The one door to all tasks: from the options of a comparison, or from a record."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

from tidegate._json import decode_part, require_object
from tidegate._validation import InputError, require_choice
from tidegate.lab.tasks.image import ImageTask, image_task
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import RecordedTask, Task, TaskKind
from tidegate.lab.tasks.text import DEFAULT_LENGTH, TextTask, text_task

_CLASSES: dict[str, type[TextTask | ImageTask | RecallTask]] = {
    "lm": TextTask,
    "image": ImageTask,
    "recall": RecallTask,
}


def make_task(
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

    Raises:
        InputError: Data cannot be found or read, or an option has no meaning for this kind of task.
    """
    if kind == "lm":
        length = DEFAULT_LENGTH if length is None else length
        task = text_task(data, tokenizer=tokenizer, field=field, length=length)
        return task if final_tokens is None else replace(task, num_final_tokens=final_tokens)
    require_choice("kind", kind, get_args(TaskKind))
    _require_absent(kind, "tokenizer", tokenizer)
    _require_absent(kind, "field", field)
    _require_absent(kind, "final_tokens", final_tokens)
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
        raise InputError(option, expected=f"left out for the task {kind}", got=value)


def _recall_task(length: int) -> RecallTask:
    """As many pairs as fit, all of them asked for; keys enough for four times as many."""
    num_pairs, rest = divmod(length, 3)
    if num_pairs < 1 or rest:
        raise InputError("length", expected="a multiple of 3 for the task recall, three tokens a pair", got=length)
    return RecallTask(num_pairs=num_pairs, num_keys=max(RecallTask().num_keys, 4 * num_pairs))
