"""Damage to each kind of file: a flipped bit or a cut is noticed, or changes nothing that is read."""

import random
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from lab_runs import executed, model_of, run_of, text_of
from retrofit_models import tiny

from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.study import read_record
from tidegate.lab.training.checkpoint import checkpoint_path, load_checkpoint
from tidegate.lab.training.model import build_model
from tidegate.lab.training.records import RecordFile, records_path
from tidegate.lab.training.train import make_optimizer
from tidegate.torch import TransformerLM, add_gates, load_gates, load_model, observe, save_gates, save_model
from tidegate.torch.gate import gate_parameters
from tidegate.torch.observing.observation import Observation

RECORDS = Path(__file__).parents[2] / "docs" / "records"


class Kind(Protocol):
    """A kind of file: one that is whole, and how its users read it."""

    path: Path

    def read(self) -> Any:
        """What a reader gets; a `ValueError` if it notices damage."""

    def serves(self, found: Any, whole: Any) -> bool:
        """Whether what was found leads to the same numbers as the whole file."""
        return found == whole


def bits(tensors):
    """Tensors as something that can be compared: exact, nan included."""
    return {name: (tensor.dtype, tuple(tensor.shape), tensor.numpy().tobytes()) for name, tensor in tensors.items()}


class Records(Kind):
    """The committed records of the default comparison: its plan, its costs and three runs."""

    def __init__(self, folder):
        self.path = records_path(folder)
        lines = (RECORDS / "compare" / "records.jsonl").read_bytes().splitlines(keepends=True)
        self.path.write_bytes(b"".join(lines[:5]))

    def read(self):
        return RecordFile(self.path).read()

    def serves(self, found, whole):
        # What was cut off at the end is as if never written: the command does those runs again.
        return found == whole[: len(found)]


class Checkpoint(Kind):
    """The last checkpoint of a run, whose previous one is gone."""

    def __init__(self, folder):
        self.run = run_of(text_of(folder))
        executed(self.run, folder=folder)
        self.path = checkpoint_path(folder, self.run.id)

    def read(self):
        model = build_model(self.run.model, seed=self.run.seed)
        optimizer = make_optimizer(model, self.run)
        loaded = load_checkpoint(self.path, model, optimizer, run=self.run.id)
        if loaded.problems:
            assert loaded.state is None
            raise ValueError(loaded.problems[0])
        moments = {
            f"{i}.{name}": value for i, own in enumerate(optimizer.state.values()) for name, value in own.items()
        }
        return loaded.state, bits(model.state_dict()), bits(moments)


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


KINDS = {
    "records.jsonl": Records,
    "a checkpoint": Checkpoint,
    "a model's file": Model,
    "a model's file, read by JAX": Params,
    "gates.safetensors": GateWeights,
    "gates.json": GateDescription,
    "an observation": Observed,
    "the record of a study": StudyRecord,
}


@pytest.fixture(params=KINDS.values(), ids=KINDS, scope="module")
def kind(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("file"))


def damage(content, rng):
    """The content with one bit flipped or, once in ten times, cut."""
    if rng.random() < 0.1:
        return content[: rng.randrange(len(content))]
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


def test_damage_is_noticed_or_harmless(kind, request, effort, report):
    content, whole, rng = kind.path.read_bytes(), kind.read(), random.Random(2)
    tally = Counter()
    for _ in range(effort(25, 1000)):
        kind.path.write_bytes(damage(content, rng))
        try:
            found = kind.read()
        except ValueError:
            tally["noticed"] += 1
        else:
            assert kind.serves(found, whole)
            tally["harmless"] += 1
    kind.path.write_bytes(content)
    assert kind.serves(kind.read(), whole)
    assert tally["noticed"]
    name = request.node.callspec.id
    report(
        f"A flipped bit or a cut in {name}",
        tried=tally.total(),
        outcome=f"{tally['noticed']:,} noticed and refused; {tally['harmless']:,} changed nothing that is read",
    )


def test_a_damaged_checkpoint_leaves_the_run_to_the_one_before_it(tmp_path):
    """The numbers are those of a run that was never stopped, whichever of its two checkpoints is damaged."""
    run = run_of(text_of(tmp_path))
    folder = tmp_path / "checkpoints"
    executed(run, folder=folder, checkpoint_seconds=0.0)
    last = checkpoint_path(folder, run.id)
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 4
    last.write_bytes(content)
    told = []
    again = executed(run, folder=folder, report=told.append)
    assert replace(again, timing=None) == replace(executed(run), timing=None)
    assert any("damaged" in str(event) for event in told)


def test_a_damaged_line_of_records_names_file_line_and_remedy(tmp_path):
    kind = Records(tmp_path)
    lines = kind.path.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b'"status": "finished"', b'"status": "diverged"')
    kind.path.write_bytes(b"".join(lines))
    with pytest.raises(ValueError, match=r"records\.jsonl, line 4, is damaged.*Remove that line"):
        kind.read()
