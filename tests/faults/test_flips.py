"""Damage to each kind of file: a flipped bit or a truncation is detected, or does not change the result."""

import json
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from damage import flip
from lab_runs import executed, model_of, run_of, text_of, write_text
from retrofit_models import tiny

from tidegate.lab.compare.summary import summarise
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.study import read_record
from tidegate.lab.tasks.documents import Document
from tidegate.lab.tasks.text import _open, _require_whole, text_task
from tidegate.lab.tasks.tokenizer import merged_tokens
from tidegate.lab.tasks.tokenizing import tokenize
from tidegate.lab.training.checkpoint import checkpoint_path, load_checkpoint
from tidegate.lab.training.events import Progress
from tidegate.lab.training.model import build_model
from tidegate.lab.training.outputs import RunLog, log_path
from tidegate.lab.training.records import LayerMeasurements, Plan, Record, RecordFile, records_path
from tidegate.lab.training.train import make_optimizer
from tidegate.torch import TransformerLM, load_model, observe, save_model
from tidegate.torch.gate import gate_parameters
from tidegate.torch.observing.observation import Observation
from tidegate.torch.retrofit import add_gates, load_gates, save_gates

RECORDS = Path(__file__).parents[2] / "docs" / "records"


HARMLESS, SHORTENED = "harmless", "lost lines at the end, which are repeated"


class Kind(Protocol):
    """A kind of file: an intact one, and its reader."""

    path: Path
    noticed: str = "rejected"

    def read(self) -> Any:
        """Return the content; raise ValueError if damage is detected."""

    def judge(self, found: Any, whole: Any) -> str:
        """Return why the damage is harmless; fail if the content leads to other results."""
        assert found == whole
        return HARMLESS


def bits(tensors):
    """Return tensors as bytes, which compare exactly."""
    return {name: (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()}


def moments_of(optimizer):
    """The tensors of an optimiser's state, by number and name."""
    return {f"{i}.{name}": value for i, own in enumerate(optimizer.state.values()) for name, value in own.items()}


class Records(Kind):
    """A whole comparison: two variants under one seed, from the committed records of the default one."""

    def __init__(self, folder):
        self.path = records_path(folder)
        plan, *lines = RecordFile(records_path(RECORDS / "compare")).read()
        runs = [line for line in lines if isinstance(line, Record) and line.run.block == 0][:2]
        layers = [line for line in lines if isinstance(line, LayerMeasurements)][:1]
        file = RecordFile(self.path)
        for line in (replace(plan, variants=plan.variants[:2], num_seeds=1), lines[0], *runs, *layers):
            file.append(line)
        self.reasons = self.missing_layers(file.read())

    def read(self):
        return RecordFile(self.path).read()

    def judge(self, found, whole):
        if found == whole:
            return HARMLESS
        # A truncated line at the end is ignored: the comparison repeats its run.
        assert found == whole[: len(found)]
        if any(isinstance(line, Plan | Record) for line in whole[len(found) :]):
            with pytest.raises(ValueError, match=r"plan|complete"):
                summarise(found)
        else:
            assert self.missing_layers(found) > self.reasons
        return SHORTENED

    def missing_layers(self, lines):
        """Return the number of variants without a measurement of their layers."""
        reasons = [variant.layers.curvature_reason for variant in summarise(lines).variants]
        return reasons.count("there is no measurement on record")


class Checkpoint(Kind):
    """The last checkpoint of a run, whose previous one is gone."""

    def __init__(self, folder):
        self.run, self.folder = run_of(text_of(folder)), folder
        executed(self.run, folder=folder)
        self.path = checkpoint_path(folder, self.run.id)

    def read(self):
        model = build_model(self.run.model, seed=self.run.seed)
        optimizer = make_optimizer(model, self.run)
        loaded = load_checkpoint(self.folder, model, optimizer, run=self.run.id)
        if loaded.problems:
            assert loaded.state is None
            raise ValueError(loaded.problems[0])
        return loaded.state, bits(model.state_dict()), bits(moments_of(optimizer))


class Model(Kind):
    """A file of `save_model`."""

    def __init__(self, folder):
        self.path = folder / "model.safetensors"
        torch.manual_seed(0)
        save_model(TransformerLM(model_of("g1+bma")), self.path)

    def read(self):
        model = load_model(self.path)
        return model.config, bits(model.state_dict())


class Params(Model):
    """The same file, read by JAX."""

    def read(self):
        from tidegate.flax import load_params
        from tidegate.flax.weights import to_torch

        config, params = load_params(self.path)
        return config, {name: bytes(np.asarray(array)) for name, array in to_torch(params, config).items()}


@cache
def gated_model():
    model = tiny("llama", num_hidden_layers=1)
    add_gates(model, "g1")
    return model


class GateWeights(Kind):
    """`gates.safetensors`."""

    name = "gates.safetensors"

    def __init__(self, folder):
        self.model = gated_model()
        with torch.no_grad():
            for number, weight in enumerate(gate_parameters(self.model)):
                weight.copy_(torch.linspace(-1, 1, weight.numel()).view_as(weight) + number)
        save_gates(self.model, folder)
        self.path = folder / self.name

    def read(self):
        with torch.no_grad():
            for weight in gate_parameters(self.model):
                weight.zero_()
        load_gates(self.model, self.path.parent)
        return bits({str(number): weight.detach() for number, weight in enumerate(gate_parameters(self.model))})


class GateDescription(GateWeights):
    """`gates.json`."""

    name = "gates.json"


class Observed(Kind):
    """An observation as JSON."""

    def __init__(self, folder):
        torch.manual_seed(0)
        model = TransformerLM(model_of("bma")).eval()
        with observe(model) as watcher, torch.no_grad():
            model(torch.arange(12)[None])
        self.path = folder / "observation.json"
        self.path.write_text(watcher.observation().to_json())

    def read(self):
        # As text: nan is not equal to itself.
        return repr(Observation.from_json(self.path.read_bytes().decode()))


class StudyRecord(Kind):
    """The record of a study."""

    def __init__(self, folder):
        self.path = folder / "depth.json"
        self.path.write_bytes((RECORDS / "geometry" / "depth.json").read_bytes())

    def read(self):
        return repr(read_record(STUDIES["depth"], self.path))


class ShardFile(Kind):
    """A shard of tokens, of byte pairs, as a training reads them."""

    name = "00001.bin"

    def __init__(self, folder):
        tokenize(str(write_text(folder)), folder / "shards", tokenizer="bpe:300", shard_bytes=2048)
        self.path = folder / "shards" / self.name

    def read(self):
        for read in (_open, _require_whole):
            read.cache_clear()
        data = text_task(str(self.path.parent), length=16).load()
        training, held_out = data._streams.training, data._streams.held_out
        return data.tokenizer, *(stream[np.arange(len(stream))].tolist() for stream in (training, held_out))


class ShardsIndex(ShardFile):
    """Their index."""

    name = "index.json"


class ShardsTokenizer(ShardFile):
    """Their byte pairs."""

    name = "tokenizer.json"


class BytePairs(Kind):
    """The tokens of a text, in the cache; damaged files are written again."""

    noticed = "detected and recomputed"
    ending = ".npy"
    documents = tuple(Document(name, f"{name} sat on the mat\n".encode() * 20) for name in ("cat", "dog"))

    def __init__(self, folder):
        self.folder = folder
        self.whole = self.tokens()
        (self.path,) = (folder / "tidegate").glob(f"*{self.ending}")

    def tokens(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(self.folder))
            made = merged_tokens(self.documents[:1], self.documents[1:], 270)
            return [made.training.tolist(), made.held_out.tolist(), made.token_bytes.tolist()]

    def read(self):
        lying = self.path.read_bytes()
        tokens = self.tokens()
        if self.path.read_bytes() != lying:
            assert tokens == self.whole
            raise ValueError("The tokens were recomputed.")
        return tokens


class BytePairDescription(BytePairs):
    """The tokenizer and the checksum, beside them."""

    ending = ".json"


KINDS = {
    "records.jsonl": Records,
    "a checkpoint": Checkpoint,
    "a model's file": Model,
    "a model's file, read by JAX": Params,
    "gates.safetensors": GateWeights,
    "gates.json": GateDescription,
    "an observation": Observed,
    "the record of a study": StudyRecord,
    "a shard of tokens": ShardFile,
    "the index of shards": ShardsIndex,
    "the tokenizer of shards": ShardsTokenizer,
    "the tokens of the byte-pair cache": BytePairs,
    "the tokenizer of the byte-pair cache": BytePairDescription,
}


def damage(content, rng):
    """The content with one bit flipped or, once in ten times, cut."""
    if rng.random() < 0.1:
        return content[: rng.randrange(len(content))]
    return flip(content, rng.randrange(8 * len(content)))


@pytest.mark.fault(lambda kind: f"Damage to {kind}")
@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_noticed_or_harmless(kind, tmp_path, effort, report):
    file = KINDS[kind](tmp_path)
    content, whole, rng = file.path.read_bytes(), file.read(), random.Random(2)
    tally = Counter()
    for _ in range(effort(25, 1000)):
        file.path.write_bytes(damage(content, rng))
        try:
            found = file.read()
        except ValueError:
            tally[file.noticed] += 1
        else:
            tally[file.judge(found, whole)] += 1
    file.path.write_bytes(content)
    assert file.judge(file.read(), whole) == HARMLESS
    assert tally[file.noticed]
    report(tried=tally.total(), outcome="; ".join(f"{number:,} {way}" for way, number in tally.most_common()))


@pytest.mark.fault("Damage to log.jsonl of a training that resumes")
def test_a_damaged_log_loses_at_most_the_damaged_line_and_stops_nothing(tmp_path, effort, report):
    def log(step):
        event = Progress(
            run="r", variant="g1", seed=0, role="", step=step, steps=20, tokens=step, loss=1 / step, seconds=step
        )
        RunLog(tmp_path).report(event)

    for step in range(1, 10):
        log(step)
    path, rng, tally = log_path(tmp_path), random.Random(3), Counter()
    content = path.read_bytes()
    whole = content.splitlines()
    for _ in range(effort(25, 1000)):
        damaged = damage(content, rng)
        path.write_bytes(damaged)
        log(10)
        *kept, new = path.read_bytes().split(b"\n")[:-1]
        assert json.loads(new)["step"] == 10
        # Lines of a log have no digest: what is damaged and still JSON stays as it is.
        assert len([line for line in kept if line in whole]) >= min(len(damaged.splitlines()), len(whole)) - 2
        assert all(json.loads(line) for line in kept)
        tally["lost a line"] += len(kept) < len(whole)
        tally["changed"] += any(line not in whole for line in kept)
    report(
        tried=effort(25, 1000),
        outcome=f"resumed each time; {tally['lost a line']:,} lost damaged lines, {tally['changed']:,} changed a "
        "number, which nothing reads back",
    )
