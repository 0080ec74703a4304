"""The one door to all tasks, from what a command line says."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from tidegate.lab.tasks.image import image_task
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import DataError, Task, TaskKind
from tidegate.lab.tasks.text import DEFAULT_LENGTH, text_task


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


def _require_absent(kind: TaskKind, option: str, value: str | int | None) -> None:
    if value is not None:
        raise DataError(f"--{option} {value} has no meaning for --task {kind}; leave it out.")


def _recall_task(length: int) -> RecallTask:
    """As many pairs as fit, all of them asked for; keys enough for four times as many."""
    num_pairs, rest = divmod(length, 3)
    if num_pairs < 1 or rest:
        raise DataError(f"--length of --task recall must be a multiple of 3, three tokens a pair; got {length}.")
    return RecallTask(num_pairs=num_pairs, num_keys=max(RecallTask().num_keys, 4 * num_pairs))
