"""`tidegate evaluate`: the loss of a trained model on a text, or its scores on benchmark tasks."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tidegate._files import write_content
from tidegate._text import number_of
from tidegate._validation import InputError
from tidegate.cli.console import new_console, new_table, print_json
from tidegate.cli.folders import require_output_folder
from tidegate.cli.options import OWN_MODEL, ModelAndText, Output, argument, option, verb
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.models.evaluate import TaskScores
    from tidegate.lab.models.text import TextLoss

_TASKS = "Tasks"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(ModelAndText, Output):
    """Options of `tidegate evaluate`."""

    model: Path = argument(OWN_MODEL)
    length: int | None = option(None, "Sequence length in tokens. Default: the training length.", min=2)
    sequences: int | None = option(
        None, "Number of sequences to score, spread over the text. Default: all of them.", min=1
    )
    batch_size: int = option(4, "Batch size, in sequences.", min=1)
    tasks: str | None = option(
        None,
        "Tasks of lm-evaluation-harness to score instead of a text, comma-separated: names that it downloads, .yaml "
        "files, or folders of them. Paths in a .yaml file are relative to the working directory. A task may execute "
        "Python code, so use only tasks that you trust.",
        panel=_TASKS,
    )
    limit: int | None = option(None, "Samples per task. Default: all of them.", panel=_TASKS, min=1)
    num_fewshot: int | None = option(None, "Few-shot examples. Default: the task's own number.", panel=_TASKS, min=0)
    out: Path | None = option(None, "JSON file for the result.")


@verb
def evaluate(options: EvaluateOptions) -> None:
    """Evaluate a trained model on text or benchmark tasks.

    On text: loss, perplexity and bits per byte (comparable across tokenizers). Every token but the first is predicted
    from the preceding tokens of its sequence. With --tasks: scores from lm-evaluation-harness (extra: eval).

    Example: tidegate evaluate model --data notes.txt
    """
    from tidegate.lab.models.language_models import load_language_model, require_known_length, text_tokens
    from tidegate.lab.models.text import require_decoder, text_loss

    _require_options_of_one_kind(options)
    out = options.out
    if out is not None:
        if out.is_dir():
            raise InputError("out", expected="a file name", got=out, hint=f"Use {out / 'scores.json'}.")
        require_output_folder(out.parent)
    loaded = load_language_model(options.model, derivatives=False)
    decoder = require_decoder(loaded)
    # The harness draws its own progress bars while it prepares tasks.
    bars = redirect_stderr(io.StringIO()) if options.quiet else nullcontext()
    with display(new_console(stderr=True), quiet=options.quiet) as tell, bars:
        if options.tasks is None:
            length = options.length or decoder.config.max_length
            require_known_length(loaded, length)
            tokens = text_tokens(loaded, options.data, field=options.field)
            found = text_loss(
                loaded, tokens, length=length, count=options.sequences, batch_size=options.batch_size, tell=tell
            )
        else:
            from tidegate.lab.models.evaluate import evaluate_tasks

            found = evaluate_tasks(
                loaded,
                [task.strip() for task in options.tasks.split(",") if task.strip()],
                limit=options.limit,
                num_fewshot=options.num_fewshot,
                batch_size=options.batch_size,
                tell=tell,
            )
    result = {"model": loaded.name, **found.to_dict()}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_content(out, f"{json.dumps(result, indent=2)}\n".encode())
    if options.as_json:
        print_json(result)
    else:
        _print(found, loaded.name)


def _require_options_of_one_kind(options: EvaluateOptions) -> None:
    """Raise InputError for options that would be ignored."""
    of_text, of_tasks = ("data", "field", "length", "sequences"), ("limit", "num_fewshot")
    unread, hint = (of_tasks, "Set tasks.") if options.tasks is None else (of_text, "It has no effect with tasks.")
    for name in unread:
        if getattr(options, name) is not None:
            raise InputError(name, expected="left out", hint=hint)
    if options.tasks is not None and not options.tasks.strip(" ,"):
        raise InputError("tasks", expected="at least one task", got=options.tasks)


def _print(found: TextLoss | TaskScores, name: str) -> None:
    from tidegate.lab.models.text import TextLoss

    if isinstance(found, TextLoss):
        share = found.num_tokens / found.num_text_tokens
        scored = "the whole text" if share == 1 else f"{share:.2%} of the text"
        new_console().print(
            f"{name} on {scored}, {number_of(found.num_tokens, 'token')}, {number_of(found.num_bytes, 'byte')}: "
            f"loss {found.loss:.4f} nats, perplexity {found.perplexity:.3f}, {found.bits_per_byte:.4f} bits per byte.",
            soft_wrap=True,
        )
        return
    table = new_table(f"{name} by lm-eval {found.harness}")
    # The harness has no standard error for some metrics, such as bits per byte.
    has_errors = any(score.error is not None for score in found.scores)
    for column in ("task", "samples", "metric", "value", *(("±",) if has_errors else ())):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", overflow="fold")
    for score in found.scores:
        better = {True: " ↑", False: " ↓", None: ""}[score.higher_is_better]
        cells = [score.task, f"{score.num_samples:,}", score.metric + better, f"{score.value:.4f}"]
        if has_errors:
            cells.append("" if score.error is None else f"{score.error:.4f}")
        table.add_row(*cells)
    new_console().print(table)
