import json
import pickle
from typing import get_args

import pytest
from errors import rejects

from tidegate.lab.tasks.catalogue import make_task
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import TaskKind
from tidegate.lab.tasks.text import TextTask

KINDS = get_args(TaskKind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_a_task_that_needs_no_data(kind):
    task = make_task(kind)
    data = task.load()
    inputs, targets = data.batch(seed=0, step=0, size=3)
    assert task.kind == data.facts["kind"] == task.to_dict()["kind"] == kind
    assert len(inputs) == len(targets) == 3
    assert inputs[0].numel() % task.length == 0
    assert 2 <= len(data.validation()[0].inputs) <= 64
    assert len(data.probe().inputs) == 8
    assert data.facts["chance_loss"] == data.chance_loss > 0
    assert data.facts["num_training_examples"] == data.num_training_examples


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_comes_back_from_json(kind):
    task = make_task(kind)
    assert type(task)(**json.loads(json.dumps(task.to_dict()))) == task
    assert pickle.loads(pickle.dumps(task)) == task
    assert hash(task) == hash(make_task(kind))
    assert make_task("image", "digits") == make_task("image")


def test_a_length_reaches_the_task():
    assert make_task("lm", length=17).length == 17
    assert make_task("recall", length=48) == RecallTask()
    longer = make_task("recall", length=300)
    assert longer.length == 300
    assert longer.load().long().inputs.shape[1] == 1200


def test_a_source_reaches_the_task(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"body": f"line {number}"}) + "\n" for number in range(500)))
    task = make_task("lm", str(path), tokenizer="bpe:300", field="body", length=8)
    assert isinstance(task, TextTask)
    assert (task.source, task.field, task.tokenizer) == (str(path), "body", "bpe:300")
    assert task.load().vocab_size == 300


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("image", "tokenizer", "bpe:4096"),
        ("image", "final_tokens", 64),
        ("recall", "data", "corpus.txt"),
        ("recall", "length", 50),
        ("recall", "length", 0),
        ("lm", "length", 0),
    ],
)
def test_options_that_do_not_fit_are_refused(kind, field, value):
    with rejects(field):
        make_task(kind, **{field: value})


def test_a_kind_of_task_that_there_is_not_is_refused():
    with rejects("kind"):
        make_task("speech")
