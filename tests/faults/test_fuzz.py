"""Fuzz readers and the command line: only documented errors, little time and memory."""

import io
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import pytest
import torch
import typer
from damage import change_header, change_metadata
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab_runs import LINES, executed, model_of, run_of, text_of
from PIL import Image
from retrofit_models import tiny
from spending import measure_spending
from typer.testing import CliRunner

from tidegate import Gate, Gates
from tidegate._json import add_checksum
from tidegate.cli import app
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.lab.compare.variants import parse_variants
from tidegate.lab.models.language_models import load_language_model
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.options import set_options, settings_of
from tidegate.lab.studies.study import read_record
from tidegate.lab.tasks.image import read_image_folder
from tidegate.lab.tasks.source import read_corpus, read_tokens
from tidegate.lab.training.checkpoint import checkpoint_path, load_checkpoint
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import RecordFile
from tidegate.lab.training.train import make_optimizer
from tidegate.torch import TransformerLM, load_model, observe, save_model
from tidegate.torch.observing.observation import Observation
from tidegate.torch.retrofit import add_gates, load_gates, save_gates

RECORDS = Path(__file__).parents[2] / "docs" / "records"
MOST_SECONDS, MOST_BYTES = 20.0, 100 * 2**20
"""That no input may take: seconds of processor time, a hundred times what they take, and memory."""

Read: TypeAlias = Callable[[str], object]
Samples: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Reader:
    """Something that reads what a user hands in."""

    open: Callable[[Path], tuple[Read, Samples]]
    """Takes a folder to work in; returns a function that reads an input, and inputs to spoil, which it reads well."""
    form: Literal["text", "JSON", "sealed JSON"] = "text"
    """JSON is also spoilt value by value; sealed JSON then gets a digest that fits."""
    many: int = 5_000
    """Inputs of the long version."""


def text_reader(read, *samples, **options):
    return Reader(lambda _folder: (read, samples), **options)


def file_reader(read, name, *samples, encoding="utf-8", ending="", **options):
    """A reader of a file of this name.

    encoding : in latin-1 each character of an input is one byte
    ending   : after each input
    """

    def open_in(folder):
        def read_input(text):
            (folder / name).write_bytes((text + ending).encode(encoding, errors="replace"))
            return read(folder / name)

        return read_input, samples

    return Reader(open_in, **options)


def first_lines(path, count):
    return (RECORDS / path).read_text().splitlines()[:count]


def array_file():
    """A file of tokens, a character for each byte."""
    file = io.BytesIO()
    np.save(file, np.arange(40, dtype=np.uint16))
    return file.getvalue().decode("latin-1")


def image_file(kind):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((8, 8)).save(file, kind)
    return file.getvalue().decode("latin-1")


def open_images(folder):
    """A folder of two classes, in which the last image is the input; what kind of image it is, its content says."""
    samples = tuple(map(image_file, ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")))
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(samples[0].encode("latin-1"))

    def read(text):
        path.write_bytes(text.encode("latin-1", errors="replace"))
        return read_image_folder(str(folder), 8)

    return read, samples


def open_observation(_folder):
    torch.manual_seed(0)
    model = TransformerLM(model_of("bma", num_layers=1)).eval()
    with observe(model) as watcher, torch.no_grad():
        model(torch.arange(12)[None])
    return Observation.from_json, (watcher.observation().to_json(),)


def open_model_header(folder):
    return _open_model(folder, load_model, lambda path, text: change_header(path, lambda _: text.encode()), _header)


def open_model_config(folder):
    return _open_model(folder, load_model, lambda path, text: change_metadata(path, config=text), _config)


def open_params_config(folder):
    from tidegate.flax import load_params

    return _open_model(folder, load_params, lambda path, text: change_metadata(path, config=text), _config)


def _open_model(folder, load, change, part):
    """A file of `save_model` with another text for a part of its header, and a digest that fits."""
    path = folder / "model.safetensors"
    save_model(TransformerLM(model_of("g1", num_layers=1)), path)
    content = path.read_bytes()

    def read(text):
        path.write_bytes(content)
        change(path, text)
        return load(path)

    return read, (part(content),)


def _header(content):
    return content[8 : 8 + int.from_bytes(content[:8], "little")].decode()


def _config(content):
    return json.loads(_header(content))["__metadata__"]["config"]


def open_checkpoint_state(folder):
    """A checkpoint with another state, and a digest that fits."""
    run = run_of(text_of(folder), steps=2)
    executed(run, folder=folder)
    path = checkpoint_path(folder, run.id)
    content, model = path.read_bytes(), build_model(run.model, seed=0)
    optimizer = make_optimizer(model, run)

    def read(text):
        path.write_bytes(content)
        change_metadata(path, state=text)
        loaded = load_checkpoint(folder, model, optimizer, run=run.id)
        if loaded.problems:
            raise ValueError(*loaded.problems)

    return read, (json.loads(_header(content))["__metadata__"]["state"],)


def open_gates_description(folder):
    model = tiny("llama", num_hidden_layers=1)
    add_gates(model, "g1")
    save_gates(model, folder)

    def read(text):
        (folder / "gates.json").write_bytes(text.encode())
        load_gates(model, folder)

    return read, ((folder / "gates.json").read_text(),)


def open_hugging_face_config(folder):
    tiny("llama").save_pretrained(folder)

    def read(text):
        (folder / "config.json").write_bytes(text.encode())
        return load_language_model(folder, derivatives=False)

    return read, ((folder / "config.json").read_text(),)


GATES = ("bma", "g1+g2", "output:query:head:silu:r8:w12:b1.5:s0.02", "value:value:element:tanh1:add", "none")
DEPTH = STUDIES["depth"]
READERS = {
    "Gate.parse": text_reader(Gate.parse, *GATES[:1], *GATES[2:4]),
    "Gates.parse": text_reader(Gates.parse, *GATES),
    "Gate.from_json": text_reader(
        Gate.from_json, *(Gate.parse(text).to_json() for text in ("bma", GATES[2])), form="JSON"
    ),
    "Gates.from_json": text_reader(Gates.from_json, *(Gates.parse(text).to_json() for text in GATES), form="JSON"),
    "TransformerConfig.from_json": text_reader(TransformerConfig.from_json, TransformerConfig().to_json(), form="JSON"),
    "VisionConfig.from_json": text_reader(VisionConfig.from_json, VisionConfig().to_json(), form="JSON"),
    "Observation.from_json": Reader(open_observation, form="sealed JSON"),
    "--variants": text_reader(parse_variants, "none,g1,slow=bma@lr=1e-3@clip=2", "none,x=g1@gate_lr=0.5"),
    "--set of a study": text_reader(lambda text: set_options(DEPTH.options, [text]), *settings_of(DEPTH.options)),
    "records.jsonl": file_reader(
        lambda path: RecordFile(path).read(),
        "records.jsonl",
        *first_lines("compare/records.jsonl", 3),
        # What has no end of a line is as if never written.
        ending="\n",
        form="sealed JSON",
    ),
    "the record of a study": file_reader(
        lambda path: read_record(DEPTH, path),
        "depth.json",
        (RECORDS / "geometry" / "depth.json").read_text(),
        form="sealed JSON",
    ),
    "gates.json": Reader(open_gates_description, form="sealed JSON"),
    "the header of a model's file": Reader(open_model_header, form="JSON"),
    "the configuration in a model's file": Reader(open_model_config, form="JSON"),
    "the configuration in a model's file, read by JAX": Reader(open_params_config, form="JSON", many=2_000),
    "the state in a checkpoint": Reader(open_checkpoint_state, form="JSON"),
    "config.json of a Hugging Face model": Reader(open_hugging_face_config, form="JSON", many=1_000),
    "--data of JSON lines": file_reader(
        lambda path: read_corpus(str(path), None), "input.jsonl", '{"text": "the sea"}\n{"text": null}\n' * 3
    ),
    "--data of a text": file_reader(lambda path: read_corpus(str(path), None), "input.txt", "".join(LINES[:5])),
    "--data of tokens": file_reader(lambda path: read_tokens(str(path)), "input.npy", array_file(), encoding="latin-1"),
    "--data of images": Reader(open_images),
}

nested = st.sampled_from(("[", '{"a":', "(")).flatmap(lambda mark: st.integers(1, 120_000).map(lambda n: mark * n))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def spoil_text(samples):
    """A sample of which a stretch is replaced by something else."""

    def splice(sample, start, length, middle):
        start %= len(sample) + 1
        return sample[:start] + middle + sample[start + length :]

    middle = st.text(max_size=6) | values.map(json.dumps) | st.sampled_from(samples)
    return st.builds(splice, st.sampled_from(samples), st.integers(0, 2**16), st.integers(0, 12), middle)


@st.composite
def spoil_value(draw, samples, *, sealed):
    """A sample of JSON of which one value, however deep, is another, is gone or has another name."""
    document = json.loads(draw(st.sampled_from(samples)))
    if sealed:
        del document["digest"]
    holder, key = document, draw_key(draw, document)
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 4)):
        holder = holder[key]
        key = draw_key(draw, holder)
    change = draw(st.sampled_from(("replace", "replace", "remove", "rename")))
    if change == "replace":
        holder[key] = draw(values)
    else:
        value = holder.pop(key)
        if change == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=300))] = value
    # Compact, as safetensors writes its header.
    return json.dumps(seal_unless_odd(document) if sealed else document, separators=(",", ":"))


def draw_key(draw, holder):
    return draw(st.sampled_from(sorted(holder)) if isinstance(holder, dict) else st.integers(0, len(holder) - 1))


def seal_unless_odd(document):
    """The document with a digest that fits, if there can be one: not for nan, nor for one that is there already."""
    try:
        return add_checksum(document)
    except (ValueError, AssertionError):
        return document


def inputs_of(samples, form):
    """Inputs that are nearly right, and a few that are all wrong."""
    near = spoil_text(samples)
    if form != "text":
        by_value = spoil_value([sample for sample in samples if json.loads(sample)], sealed=form == "sealed JSON")
        near = st.one_of(by_value, by_value, by_value, near)
    return st.one_of(near, near, near, values.map(json.dumps), st.text(), nested)


def thoroughly(examples):
    return settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.fault(lambda name: f"Fuzzing {name}")
@pytest.mark.parametrize("name", READERS)
def test_a_reader_refuses_with_a_value_error_or_reads(name, tmp_path, effort, report):
    reader, tally, spendings = READERS[name], Counter(), []
    read, samples = reader.open(tmp_path)
    for sample in samples:
        read(sample)

    @thoroughly(effort(50, reader.many))
    @given(text=inputs_of(samples, reader.form))
    def reads_or_refuses(text):
        with measure_spending() as spent:
            try:
                read(text)
                tally["read"] += 1
            except ValueError as problem:
                refusal = str(problem)
                tally["refused"] += 1
                tally["long"] += len(refusal) > 5_000
                tally["refused though whole"] += "digest" not in refusal and "no JSON" not in refusal
        spendings.append(spent)

    reads_or_refuses()
    assert len(spendings) == tally["refused"] + tally["read"]
    assert not tally["long"], "a message repeats what it was given"
    assert tally["refused though whole"], "nothing was refused for what it says"
    seconds, num_bytes = max(each.seconds for each in spendings), max(each.num_bytes for each in spendings)
    assert seconds < MOST_SECONDS
    assert num_bytes < MOST_BYTES
    report(
        tried=len(spendings),
        outcome=f"{tally['refused']:,} rejected, {tally['read']:,} read; at most {seconds:.2f} s and "
        f"{num_bytes / 2**20:.0f} MiB",
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


@pytest.mark.fault("Fuzzing the command line")
def test_the_command_line_ends_in_words_and_never_in_a_traceback(tmp_path, monkeypatch, effort, report):
    for place in (
        "tidegate.lab.compare.run.compare",
        "tidegate.cli.study._answer",
        "tidegate.cli.train._train",
        "tidegate.cli.train._launch",
        "tidegate.cli.train._print_estimate",
        "tidegate.lab.tasks.tokenizing.tokenize",
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
        tried=codes.total(),
        outcome=f"{codes[2] + codes[1]:,} rejected, {codes[0]:,} accepted; no traceback",
    )


def refuse_to_work(*_arguments, **_options):
    raise ValueError("the work would begin")
