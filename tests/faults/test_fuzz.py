"""Readers and the command line on inputs that nobody would write: only documented errors, in bounded time."""

import json
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab_runs import LINES
from typer.testing import CliRunner

from tidegate import Gate, Gates
from tidegate.cli import app
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.lab.compare.request import parse_variants
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.options import set_options, settings_of
from tidegate.lab.studies.study import read_record
from tidegate.lab.tasks.source import read_corpus, read_tokens
from tidegate.lab.training.records import RecordFile
from tidegate.report.page import Page

RECORDS = Path(__file__).parents[2] / "docs" / "records"
SLOWEST = 2.0
"""Seconds that no input may take."""


@dataclass(frozen=True)
class Reader:
    """Something that reads what a user hands in, and inputs that it reads well, to be spoilt."""

    read: Any
    samples: tuple[str, ...]
    suffix: str = ""
    """Of the file that it reads; empty if it takes the text itself."""

    def __call__(self, text, folder):
        if not self.suffix:
            return self.read(text)
        path = folder / f"input{self.suffix}"
        path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        return self.read(path)


def first_lines(path, count):
    return tuple((RECORDS / path).read_text().splitlines(keepends=True)[:count])


def array_as_text():
    """A file of tokens, its bytes as characters."""
    import io

    file = io.BytesIO()
    np.save(file, np.arange(40, dtype=np.uint16))
    return file.getvalue().decode("latin-1")


GATES = ("bma", "g1+g2", "output:query:head:silu:r8:w12:b1.5:s0.02", "value:value:element:tanh1:add", "none")
JSON_GATES = tuple(Gates.parse(text).to_json() for text in GATES)
READERS = {
    "Gate.parse": Reader(Gate.parse, GATES[:1] + GATES[2:4]),
    "Gates.parse": Reader(Gates.parse, GATES),
    "Gate.from_json": Reader(Gate.from_json, tuple(Gate.parse(text).to_json() for text in ("bma", GATES[2]))),
    "Gates.from_json": Reader(Gates.from_json, JSON_GATES),
    "TransformerConfig.from_json": Reader(TransformerConfig.from_json, (TransformerConfig().to_json(),)),
    "VisionConfig.from_json": Reader(VisionConfig.from_json, (VisionConfig().to_json(),)),
    "Page.from_json": Reader(Page.from_json, (json.dumps(asdict(Page(title="a", summary="b", sections=(), data={}))),)),
    "--variants": Reader(parse_variants, ("none,g1,slow=bma@lr=1e-3@clip=2", "none,x=g1@gate_lr=0.5")),
    "--set of a study": Reader(
        lambda text: set_options(STUDIES["depth"].options, [text]), tuple(settings_of(STUDIES["depth"].options))
    ),
    "records.jsonl": Reader(lambda path: RecordFile(path).read(), first_lines("compare/records.jsonl", 3), ".jsonl"),
    "the record of a study": Reader(
        lambda path: read_record(STUDIES["depth"], path), ((RECORDS / "geometry/depth.json").read_text(),), ".json"
    ),
    "--data of JSON lines": Reader(
        lambda path: read_corpus(str(path), None), ('{"text": "the sea"}\n{"text": null}\n' * 3,), ".jsonl"
    ),
    "--data of a text": Reader(lambda path: read_corpus(str(path), None), ("".join(LINES[:5]),), ".txt"),
    "--data of tokens": Reader(lambda path: read_tokens(str(path)), (array_as_text(),), ".npy"),
}

nested = st.sampled_from(("[", '{"a":', "(")).flatmap(lambda mark: st.integers(1, 120_000).map(lambda n: mark * n))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def spoilt(samples):
    """A sample of which a stretch is replaced by something else."""

    def splice(sample, start, length, middle):
        start %= len(sample) + 1
        return sample[:start] + middle + sample[start + length :]

    middle = st.text(max_size=6) | values.map(json.dumps) | st.sampled_from(samples)
    return st.builds(splice, st.sampled_from(samples), st.integers(0, 2**16), st.integers(0, 12), middle)


def inputs_of(samples):
    return st.one_of(spoilt(samples), spoilt(samples), spoilt(samples), values.map(json.dumps), st.text(), nested)


def thoroughly(examples):
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_with_a_value_error_or_reads(name, tmp_path, effort, report):
    reader, tally, seconds = READERS[name], Counter(), []

    @thoroughly(effort(60, 8_000))
    @given(text=inputs_of(reader.samples))
    def reads_or_refuses(text):
        start = time.perf_counter()
        try:
            reader(text, tmp_path)
        except ValueError as refusal:
            tally["refused"] += 1
            tally["long"] += len(str(refusal)) > 5_000
        else:
            tally["read"] += 1
        seconds.append(time.perf_counter() - start)

    reads_or_refuses()
    assert len(seconds) == tally["refused"] + tally["read"]
    assert not tally["long"], "a message repeats what it was given"
    assert max(seconds) < SLOWEST
    report(
        f"Nonsense for {name}",
        tried=len(seconds),
        outcome=f"{tally['refused']:,} refused with a ValueError, {tally['read']:,} read; nothing else was raised",
    )


def options_of(command):
    return tuple(option for parameter in command.params for option in parameter.opts if option.startswith("--"))


VERBS = {name: options_of(command) for name, command in typer.main.get_command(app).commands.items()}
words = st.sampled_from(
    (
        "none,g1",
        "bma",
        "",
        "-1",
        "0",
        "1e400",
        "nan",
        "lm",
        "tiny",
        "∞",
        "\x1b[31m",
        "a" * 500,
        "--",
        "/",
        "/dev/null",
        "list",
    )
)


def arguments():
    """A verb with some of its options, in any order, each with a word that may or may not fit."""
    return st.sampled_from(sorted(VERBS)).flatmap(
        lambda verb: st.lists(st.sampled_from(VERBS[verb]) | words | st.text(max_size=5), max_size=6).map(
            lambda rest: [verb, *rest]
        )
    )


def test_the_command_line_ends_in_words_and_never_in_a_traceback(tmp_path, monkeypatch, effort, report):
    for place in (
        "tidegate.lab.compare.run.compare",
        "tidegate.cli.study.answer_study",
        "tidegate.cli.rates.answer_study",
    ):
        # Where options are good the work would begin, which is not what is tried here.
        monkeypatch.setattr(place, refuse_to_work)
    monkeypatch.chdir(tmp_path)
    runner, codes = CliRunner(), Counter()

    @thoroughly(effort(80, 10_000))
    @given(words=arguments())
    def ends_in_words(words):
        done = runner.invoke(app, words)
        assert done.exception is None or isinstance(done.exception, SystemExit), (words, repr(done.exception))
        assert "Traceback" not in done.output
        assert "\x1b[31m" not in done.output
        codes[done.exit_code] += 1

    ends_in_words()
    assert codes[2]
    assert set(codes) <= {0, 1, 2}
    report(
        "Nonsense for the command line",
        tried=codes.total(),
        outcome=f"{codes[2] + codes[1]:,} refused in words, {codes[0]:,} accepted; no traceback",
    )


def refuse_to_work(*_arguments, **_options):
    raise ValueError("the work would begin")
