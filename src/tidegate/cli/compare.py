"""`tidegate compare`: train attention variants under equal conditions and report their differences."""

from __future__ import annotations

import pkgutil
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from rich.console import Console

from tidegate._validation import InputError
from tidegate.cli.console import finish_page, new_console, new_table
from tidegate.cli.errors import FAILED, stop, stop_interrupted
from tidegate.cli.folders import require_output_folder
from tidegate.cli.options import DATA, TrainingData, option, this_command, verb
from tidegate.cli.progress import display

if TYPE_CHECKING:
    from tidegate.lab.compare.request import Request
    from tidegate.lab.compare.summary import Summary, VariantSummary
    from tidegate.lab.training.executors.executor import RunResources
    from tidegate.lab.training.run import Run

_BUDGET, _TUNING, _WORK = "Budget and fairness", "Tuning", "Running"
_WIDE = 160
_G1, _BMA = "output:input:twosigmoid", "value:query:twosigmoid"
DEFAULT_VARIANTS = (
    f"none,g1-from-1={_G1},g1-shuffled={_G1}@placebo=shuffled,bma-from-1={_BMA},bma-shuffled={_BMA}@placebo=shuffled"
)
"""The ungated baseline; two gates that start at 1, so that they keep the initial scale; and their shuffled placebos."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(TrainingData):
    """Options of `tidegate compare`."""

    variants: str = option(
        DEFAULT_VARIANTS,
        "Variants to compare, comma-separated, the baseline first: gates (none, bma, bma-query, g1, g1-head, g2, g3, "
        "g4, g5, vga, sink, off-by-one, or a spelling of docs/gates.md), or name=gate@option=value for a variant with "
        "its own name and options: lr, gate_lr, weight_decay, warmup, final_lr, clip, first_seed; init (a standard "
        "deviation, fan-in, torch), d_ff, qk_norm (yes, no), params (the variant whose parameter count to match by "
        "widening); placebo (constant, shuffled).",
    )
    placebos: bool = option(
        True, "For each gate that does not start at 1, add a placebo: a constant gate with its initial value."
    )
    task: Literal["lm", "image", "recall"] = option(
        "lm",
        "Language modeling; image classification (--data: a folder of class folders, or digits, the default); or "
        "associative recall on generated examples.",
        panel=DATA,
    )
    length: int | None = option(None, "Sequence length in tokens. Default: the preset's.", panel=DATA, min=2)
    preset: Literal["tiny", "small", "base"] = option(
        "tiny", "Model size and training budget: about 0.2, 1 and 14 million parameters.", panel=_BUDGET
    )
    seeds: int = option(5, "Number of seeds: one run per variant and seed. A verdict needs three.", panel=_BUDGET)
    tokens: int | None = option(None, "Training tokens (or images) per run. Default: the preset's.", panel=_BUDGET)
    match: Literal["tokens", "params", "flops", "time"] = option(
        "tokens", "Quantity to match across variants; the others are reported.", panel=_BUDGET
    )
    margin: float | None = option(
        None,
        "Smallest relevant difference, as a fraction of the baseline loss. Default: 0.002 (0.2 %).",
        panel=_BUDGET,
    )
    final_tokens: int | None = option(
        None, "Held-out tokens for the final loss. Default: all of them, up to four million.", panel=_BUDGET
    )
    tune: bool = option(
        False,
        "Grid-search three learning rates and three initializations for each variant and seed; the search runs use "
        "other seeds. Ten times the runs, or six times with --search stepwise.",
        "--tune",
        panel=_TUNING,
    )
    search: Literal["grid", "stepwise"] = option(
        "grid",
        "Search of --tune. grid: all pairs of learning rate and initialization; stepwise: all initializations at the "
        "middle learning rate, then the other learning rates at the best initialization.",
        panel=_TUNING,
    )
    map_: bool = option(
        False,
        "Train every variant at all pairs of learning rate and initialization, and plot where its differences from "
        "the baseline and from its placebo change sign. Selects settings only with --tune.",
        "--map",
        panel=_TUNING,
    )
    rates: str | None = option(
        None, "Learning rates for --tune and --map, as multiples of the preset's. Default: 0.5,1,2.", panel=_TUNING
    )
    starts: str | None = option(
        None, "Initializations for --tune and --map. Default: 0.02,fan-in,torch.", panel=_TUNING
    )
    settings: str | None = option(
        None,
        "Folder of an earlier comparison with --tune on the same data. Each variant gets the learning rate and "
        "initialization that most seeds selected there; untuned variants get the baseline's. Default: the settings "
        "shipped for Python's own sources at preset tiny if they cover every variant, else the preset's; none always "
        "uses the preset's.",
        panel=_TUNING,
        metavar="FOLDER|none",
    )
    out: Path = option(
        Path("comparison"), "Folder for records and report; rerun the same command to resume.", panel=_WORK
    )
    executor: Literal["serial", "processes", "ray"] = option(
        "processes",
        "Where to execute runs: one after another, on all cores of this machine, or on a Ray cluster (RAY_ADDRESS, or "
        "a new local one). Results do not depend on it.",
        panel=_WORK,
    )
    cpus_per_run: int | None = option(
        None,
        "Cores and threads per run with --executor ray. Default: 1, or one per process. More than one changes the "
        "rounding of sums.",
        panel=_WORK,
    )
    gpus_per_run: int | None = option(
        None,
        "GPUs per run with --executor ray: 0 (default), or as many as --procs-per-run. Sets the device to cuda.",
        panel=_WORK,
    )
    procs_per_run: int | None = option(
        None,
        "Data-parallel processes per run with --executor ray, on any nodes. Default: 1. More than one changes the "
        "rounding of sums.",
        panel=_WORK,
    )
    retries: int | None = option(
        None, "Times to resume a run whose process was killed before it counts as failed. Default: 2.", panel=_WORK
    )
    device: str | None = option(
        None, "PyTorch device for training. Default: cpu, or cuda with --gpus-per-run.", panel=_WORK
    )
    runs: str | None = option(None, "module:function that returns a list of Runs to compare instead.", panel=_WORK)


@verb
def compare(options: CompareOptions) -> None:
    """Train attention variants under equal conditions, and report their differences with confidence intervals.

    By default: the ungated baseline, g1 and bma (starting at 1) and their shuffled placebos, five seeds, byte-level
    models of Python's own sources; about ten minutes on two cores.

    After Ctrl-C, the same command resumes, with the same results.

    Example: tidegate compare --data notes/ --variants none,g1,bma+g1,slow=g1@lr=1e-3 --out notes-gates
    """
    command = this_command()
    console = new_console(stderr=options.as_json)
    if not console.is_terminal:
        # Output is not a terminal: do not wrap.
        console.width = _WIDE
    from tidegate.lab.compare.page import comparison_page
    from tidegate.lab.compare.run import RunsFailedError
    from tidegate.lab.compare.run import compare as run_comparison
    from tidegate.lab.compare.summary import summarise
    from tidegate.lab.training.executors.executor import RETRIES, make_executor
    from tidegate.lab.training.records import RecordFile, records_path
    from tidegate.report import write_page

    out = options.out
    try:
        request = _request(options, command) if options.runs is None else _request_of_runs(options, command)
        runner = make_executor(
            options.executor,
            retries=RETRIES if options.retries is None else options.retries,
            resources=_resources(options),
        )
        require_output_folder(out, options.data)
        examples = "images" if request.task.kind == "image" else "tokens"
        with display(console, quiet=options.quiet, examples=examples) as tell:
            lines = run_comparison(request, out, executor=runner, on_event=tell)
        summary = summarise(lines)
        page = comparison_page(summary)
        written = write_page(page, out)
    except RunsFailedError as problem:
        stop(f"{problem} See {records_path(out)}; rerun the same command to retry them.", code=FAILED)
    except KeyboardInterrupt:
        stop_interrupted(command, begun=RecordFile(records_path(out)).has_lines())
    if not options.as_json:
        _print_summary(console, summary)
    finish_page(written, page.data, as_json=options.as_json)


def _request(options: CompareOptions, command: str) -> Request:
    """Return the request that the options describe."""
    from tidegate.lab.compare.presets import PRESETS
    from tidegate.lab.compare.request import Request, parse_grid
    from tidegate.lab.compare.tuning import find_settings
    from tidegate.lab.compare.variants import parse_variants, with_constants
    from tidegate.lab.judging import MARGIN
    from tidegate.lab.tasks.catalogue import make_task

    searches = options.tune or options.map_
    for name in ("rates", "starts"):
        if getattr(options, name) is not None and not searches:
            raise InputError(name, expected="left out without --tune or --map")
    if options.search == "stepwise" and options.map_:
        raise InputError("search", expected="grid with --map", got=options.search)
    if options.search == "stepwise" and not options.tune:
        raise InputError("search", expected="left out without --tune", got=options.search)
    variants = parse_variants(options.variants)
    variants = with_constants(variants) if options.placebos else variants
    task = make_task(
        options.task,
        options.data,
        tokenizer=options.tokenizer,
        field=options.field,
        length=options.length or PRESETS[options.task][options.preset].length,
        final_tokens=options.final_tokens,
    )
    grid = parse_grid(options.rates, options.starts, search=options.search, chooses=options.tune) if searches else None
    return Request(
        variants=variants,
        task=task,
        preset=options.preset,
        num_seeds=options.seeds,
        budget=options.tokens,
        match=options.match,
        grid=grid,
        settings=find_settings(options.settings, variants, task, options.preset, grid),
        device=options.device or ("cuda" if options.gpus_per_run else "cpu"),
        margin=MARGIN if options.margin is None else options.margin,
        command=command,
    )


def _resources(options: CompareOptions) -> RunResources | None:
    """Return the cluster resources of each run; None if no option sets any."""
    from tidegate.lab.training.executors.executor import RunResources

    cpus, gpus, processes = options.cpus_per_run, options.gpus_per_run, options.procs_per_run
    if cpus is None and gpus is None and processes is None:
        return None
    return RunResources(cpus=cpus, gpus=gpus or 0, processes=1 if processes is None else processes)


def _print_summary(console: Console, summary: Summary) -> None:
    from tidegate.lab.compare.answer import answer
    from tidegate.lab.compare.fairness import fairness_checks, violations_in_words

    table = new_table("Loss on held-out data (nats)")
    metrics = () if summary.metric is None else (_METRICS[summary.metric],)
    for heading in ("variant", "verdict", "loss", *metrics, "difference", "95 % interval", "p", "time"):
        # On a narrow terminal cells wrap; nothing is cut.
        table.add_column(heading, justify="left" if heading in ("variant", "verdict") else "right", overflow="fold")
    for variant in summary.variants:
        table.add_row(*_cells(variant, summary))
    console.print(table)
    console.print(answer(summary), soft_wrap=True)
    sentences = [
        *(variant.result.sentence for variant in summary.variants),
        *(variant.effect_sentence for variant in summary.variants),
        *violations_in_words(fairness_checks(summary)),
    ]
    for sentence in filter(None, sentences):
        console.print(sentence, soft_wrap=True)


_METRICS = {"bits_per_byte": "bits/byte", "accuracy": "accuracy"}


def _cells(variant: VariantSummary, summary: Summary) -> Iterator[str]:
    result, cost = variant.result, variant.cost
    metric = None if summary.metric is None else variant.metric(summary.metric)
    yield from (variant.name, result.verdict)
    yield "" if result.mean is None else f"{result.mean:.4f}"
    if summary.metric is not None:
        yield "" if metric is None else f"{metric[0]:.4f}"
    yield "" if result.difference is None else f"{result.difference:+.4f}"
    yield "" if result.low is None else f"{result.low:+.4f} … {result.high:+.4f}"
    yield "" if result.p_value is None else f"{result.p_value:.4f}"
    yield "" if cost is None else f"×{cost.time_ratio:.3f}"


_WITH_RUNS = {"runs", "margin", "out", "executor", "retries", "cpus_per_run", "gpus_per_run", "procs_per_run"}


def _request_of_runs(options: CompareOptions, command: str) -> Request:
    """Return the request for given runs; the variant of the first run is the baseline."""
    from tidegate.gates import Gates
    from tidegate.lab.compare.request import Request
    from tidegate.lab.judging import MARGIN
    from tidegate.lab.training.records import Variant

    for item in fields(options):
        if item.name not in {*_WITH_RUNS, "as_json", "quiet"} and getattr(options, item.name) != item.default:
            raise InputError(item.name, expected="left out with --runs", hint="The runs decide it.")
    runs = _call_function(cast("str", options.runs))
    variants = {run.variant: Variant(name=run.variant, gate=str(Gates.parse(run.model.gate))) for run in runs}
    if len(variants) < 2:
        raise InputError("runs", expected="a function that returns runs of several variants", got=list(variants))
    first = runs[0]
    return Request(
        variants=tuple(variants.values()),
        task=first.task,
        num_seeds=len(runs) // len(variants),
        budget=first.training.steps * first.training.batch_size * first.task.length,
        margin=MARGIN if options.margin is None else options.margin,
        command=command,
        runs=tuple(runs),
    )


def _call_function(name: str) -> list[Run]:
    """Import module:function, from the working directory too, and return its list of runs."""
    from tidegate.lab.training.run import Run

    if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
        raise InputError("runs", expected="module:function", got=name)
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = pkgutil.resolve_name(name)
    except (ModuleNotFoundError, AttributeError) as problem:
        hint = f"{problem}. Use a module in the working directory or an installed one."
        raise InputError("runs", expected="an importable module:function", got=name, hint=hint) from None
    try:
        signature(found).bind()
    except (TypeError, ValueError):
        # It is not a function, it needs arguments, or it is a builtin without a signature.
        raise InputError("runs", expected="a function without required arguments", got=name) from None
    given: Any = found()
    if not isinstance(given, list) or not given or not all(isinstance(run, Run) for run in cast("list[Any]", given)):
        expected = "a function that returns a list of tidegate.lab.training.run.Run"
        raise InputError("runs", expected=expected, got=cast("object", given))
    return cast("list[Run]", given)
