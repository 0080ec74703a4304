"""Evaluate our trained models on the tasks of lm-evaluation-harness."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, final

from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.defaults import DEFAULT_OTHER_SEED
from lm_eval.evaluator import evaluate as harness_evaluate
from lm_eval.tasks import TaskManager

from tidegate._validation import InputError
from tidegate.lab.models.language_models import LanguageModel
from tidegate.lab.models.text import Continuation, continuations, continue_text, require_decoder
from tidegate.lab.tasks.source import log_level
from tidegate.lab.training.events import Tell, ignore

_NEW_TOKENS = 256
"""Number of new tokens if a task does not set one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One metric of one task."""

    task: str
    num_samples: int
    metric: str
    value: float
    error: float | None
    """Standard error of the value over the samples, if there is one."""
    higher_is_better: bool | None
    """None if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskScores:
    """The scores of a model on some tasks."""

    harness: str
    """The version of lm-eval."""
    scores: tuple[Score, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        return asdict(self)


@final
class HarnessModel(LM):
    """Adapt one of our models to the interface of lm-eval: texts in, log-likelihoods and texts out.

    Our models have no token for the start of a text: its first token is predicted after a line break, which separates
    documents in training. A context beyond the trained length loses its beginning; a continuation beyond it is
    predicted in blocks, each with as much preceding context as fits.
    """

    def __init__(self, model: LanguageModel, *, batch_size: int = 4, tell: Tell = ignore) -> None:
        super().__init__()
        self._model = model
        self._length = require_decoder(model).config.max_length
        self._batch_size = batch_size
        self._tell = tell
        self._start = model.encode(b"\n")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would generate it."""
        parts = [self._parts(*request.args) for request in requests]
        return [(found.log_likelihood, found.is_greedy) for found in self._continuations(parts)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """Return the log-likelihood of each text, of any length."""
        texts = [(self._start, self._encode(request.args[0])) for request in requests]
        return [found.log_likelihood for found in self._continuations(texts)]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Generate text after each context up to one of the task's strings; greedily unless the task samples."""
        return [self._generate(*request.args) for request in requests]

    def _continuations(self, requests: Sequence[tuple[list[int], list[int]]]) -> list[Continuation]:
        return continuations(self._model, requests, length=self._length, batch_size=self._batch_size, tell=self._tell)

    def _encode(self, text: str) -> list[int]:
        return self._model.encode(text.encode())

    def _parts(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return tokens of both, encoded as one text: a token may start with the space that ends the context."""
        whole, before = self._encode(context + continuation), self._encode(context.rstrip())
        # A token across the boundary is predicted too.
        place = min(len(before), max(len(whole) - 1, 0))
        return (whole[:place] or self._start), whole[place:]

    def _generate(self, context: str, options: Mapping[str, Any]) -> str:
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        tokens, num_tokens = self._leave_room(self._encode(context) or self._start, options.get("max_gen_toks"))
        temperature = float(options.get("temperature", 0.0))
        # As in lm-eval, a temperature samples unless the task sets do_sample: false.
        sampled = bool(options.get("do_sample", temperature > 0))
        temperature = (temperature or 1.0) if sampled else 0.0
        limits = {name: options[name] for name in ("top_k", "top_p") if sampled and options.get(name)}
        text = ""
        for piece in continue_text(self._model, tokens, max_new_tokens=num_tokens, temperature=temperature, **limits):
            text += piece.decode("utf-8", errors="replace")
            if ends := [text.index(stop) for stop in stops if stop and stop in text]:
                return text[: min(ends)]
        return text

    def _leave_room(self, tokens: list[int], wanted: object) -> tuple[list[int], int]:
        """Return the end of a context and the number of tokens to generate, together at most the trained length.

        If a task sets the number, the context loses its beginning. Otherwise, generate as many tokens as the context
        leaves, or a quarter of the length if it leaves fewer.
        """
        if wanted is None:
            room = max(self._length - len(tokens), self._length // 4)
            num_tokens = max(1, min(_NEW_TOKENS, room))
        else:
            num_tokens = int(str(wanted))
            if not 1 <= num_tokens < self._length:
                expected = f"at least 1 and less than the model's length, {self._length}"
                hint = "Change that option of the task to leave room for a context."
                raise InputError("max_gen_toks", expected=expected, got=num_tokens, hint=hint)
        return tokens[-(self._length - num_tokens) :], num_tokens


def evaluate_tasks(
    model: LanguageModel,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 4,
    tell: Tell = ignore,
) -> TaskScores:
    """Evaluate a model on tasks.

    Args:
        model: One of our models.
        tasks: Names of lm-eval's own tasks, `.yaml` files of tasks, and folders of such files.
        limit: Number of first samples of each task; None takes all.
        num_fewshot: Examples before each sample, unless the task sets 0; None uses the task's number.
        batch_size: In sequences.
        tell: Receives a `PartsDone` for each batch.

    Raises:
        InputError: A task does not exist.
    """
    adapter = HarnessModel(model, batch_size=batch_size, tell=tell)
    with log_level("lm_eval", logging.ERROR):
        # Not `simple_evaluate`: it runs git and pip, and git prints an error outside a repository.
        loaded: Any = _load_tasks(tasks, num_fewshot)
        results: Any = harness_evaluate(adapter, loaded, limit=limit, log_samples=False)
    return TaskScores(harness=version("lm-eval"), scores=tuple(_scores(results)))


def _load_tasks(tasks: Sequence[str], num_fewshot: int | None) -> Any:
    """Return the loaded tasks with `num_fewshot` examples, sampled with lm-eval's seed."""
    manager, specifications = _find_tasks(tasks)
    loaded: Any = manager.load(specifications)
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        # A 0 in a task is deliberate.
        if own is None or (num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    return loaded


def _find_tasks(tasks: Sequence[str]) -> tuple[TaskManager, list[Any]]:
    """Return a manager of the tasks, and the specifications to load."""
    places = [Path(task) for task in tasks if _is_path(task)]
    hint = "Name a task of lm-eval (`lm-eval ls tasks` lists them), a .yaml file, or a folder of such files."
    for place in places:
        if not place.exists():
            raise InputError("tasks", expected="existing tasks", got=place, hint=hint)
    # lm-eval's own tasks are thousands of files: they are read only if one is named.
    folders: Any = [place for place in places if place.is_dir()]
    manager = TaskManager(include_path=folders, include_defaults=len(places) < len(tasks))
    specifications: list[Any] = []
    for task in tasks:
        if Path(task).is_dir():
            own = TaskManager(include_path=[task], include_defaults=False).all_subtasks
            if not own:
                raise InputError("tasks", expected="folders with .yaml files of tasks", got=task, hint=hint)
            specifications += own
        elif _is_path(task) or task in manager.all_tasks:
            specifications.append(task)
        else:
            raise InputError("tasks", expected=f"tasks of lm-eval {version('lm-eval')}", got=task, hint=hint)
    return manager, specifications


def _is_path(task: str) -> bool:
    return task.endswith((".yaml", ".yml")) or "/" in task or Path(task).is_dir()


def _scores(results: Mapping[str, Any]) -> Iterator[Score]:
    """Yield the metrics of lm-eval's results, whose keys are `metric,filter` and `metric_stderr,filter`."""
    for task, metrics in results["results"].items():
        better = results.get("higher_is_better", {}).get(task, {})
        samples = results.get("n-samples", {}).get(task, {}).get("effective", 0)
        for key, value in metrics.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = metrics.get(f"{metric}_stderr,{chosen}")
            yield Score(
                task=task,
                num_samples=samples,
                metric=metric if chosen == "none" else f"{metric} ({chosen})",
                value=float(value),
                error=error if isinstance(error, float) else None,
                higher_is_better=better.get(metric),
            )
