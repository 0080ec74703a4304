"""Create tasks from command-line options or from records."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

from tidegate._json import decode_part, require_object
from tidegate._validation import InputError, require_choice
from tidegate.lab.tasks.image import ImageTask, image_task
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import LONGER, RecordedTask, Task, TaskKind
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
    """Return the task for command-line options, with the fingerprint of its data.

    Args:
        kind: Kind of task.
        data: A path or a name of data; None takes the default data of the task.
        tokenizer: `bytes` or `bpe:N`, for text.
        field: The field that holds the text in JSON lines and datasets.
        length: Sequence length in tokens.
        final_tokens: Maximum number of held-out tokens in the final evaluation of text; None takes the default.

    Raises:
        InputError: The data cannot be found or read, or an option does not apply to this kind of task.
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
    if length is None:
        return RecallTask()
    num_pairs, rest = divmod(length, 3)
    if num_pairs < 1 or rest:
        raise InputError("length", expected="a multiple of 3 for the task recall, three tokens per pair", got=length)
    # All pairs are queried, and there are enough keys for examples of four times the length.
    return RecallTask(num_pairs=num_pairs, num_keys=max(RecallTask().num_keys, LONGER * num_pairs))


def task_from_dict(values: Any) -> Task:
    """Return the task that `Task.to_dict` described; a `RecordedTask` if it has unknown fields."""
    kind = require_object(values).get("kind")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise InputError("kind", expected=f"one of {', '.join(_CLASSES)}", got=kind)
    if set(values) - {option.name for option in fields(_CLASSES[kind])}:
        return RecordedTask(values)
    return decode_part(_CLASSES[kind], values)


def _require_absent(kind: TaskKind, option: str, value: str | int | None) -> None:
    if value is not None:
        raise InputError(option, expected=f"left out for the task {kind}", got=value)
