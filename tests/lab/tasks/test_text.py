import pickle
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from errors import rejects

from tidegate.lab.tasks.text import TextTask, text_task


def text_of(batch):
    return [bytes(row.tolist()) for row in batch.inputs]


def held_out_text(data):
    return b"".join(b"".join(text_of(batch)) for batch in data.validation())


# Batches


def test_a_batch_depends_on_seed_and_step_alone(text_file):
    data = text_task(str(text_file)).load()
    first = data.batch(seed=3, step=5, size=4)
    data.batch(seed=0, step=0, size=9)
    again = data.batch(seed=3, step=5, size=4)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.inputs, data.batch(seed=3, step=6, size=4).inputs)
    assert not torch.equal(first.inputs, data.batch(seed=4, step=5, size=4).inputs)


def test_targets_are_the_inputs_one_token_later(text_file):
    batch = text_task(str(text_file), length=63).load().batch(seed=0, step=0, size=5)
    assert batch.inputs.shape == batch.targets.shape == (5, 63)
    assert batch.inputs.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])


def test_windows_start_at_every_place_of_the_training_text(tmp_path):
    path = tmp_path / "alphabet.txt"
    path.write_bytes(bytes(range(100, 120)))
    data = TextTask(source=str(path), length=4, validation_share=0.5).load()
    batch = data.batch(seed=0, step=0, size=400)
    assert set(batch.inputs[:, 0].tolist()) == set(range(100, 107))
    # The line break is the one that ends the training part.
    assert int(batch.targets.max()) == 109


def test_a_negative_seed_is_refused(text_file):
    with rejects("seed"):
        text_task(str(text_file)).load().batch(seed=-1, step=0, size=1)


# What is held out


def test_no_training_window_holds_a_held_out_line(folder, sentences):
    data = text_task(str(folder), length=64).load()
    held_out = {line for line in held_out_text(data).split(b"\n") if line}
    seen = b"".join(text_of(data.batch(seed=0, step=0, size=3000)))
    whole = [line.strip().encode() for line in sentences if line.strip().encode() in held_out]
    assert len(whole) > 50
    assert not [line for line in whole if line in seen]


def test_a_single_document_gives_its_end(text_file):
    data = text_task(str(text_file)).load()
    content = text_file.read_bytes()
    assert content.find(held_out_text(data)) == round(0.95 * len(content))
    assert data.facts["held_out"] == "the last 5 % of the document"


def test_validation_windows_are_the_same_each_time_do_not_overlap_and_keep_to_the_budget(text_file):
    task = replace(text_task(str(text_file), length=16), num_validation_tokens=2000)
    first, again = task.load().validation(), pickle.loads(pickle.dumps(task)).load().validation()
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, again, strict=True))
    assert [len(batch.inputs) for batch in first] == [64, 61]
    lines = [row for batch in first for row in text_of(batch)]
    assert len(set(lines)) == len(lines) == 2000 // 16
    everything = replace(task, num_validation_tokens=10**9).load()
    assert len(everything.validation()[0].inputs) == 64
    assert everything.facts["num_validation_tokens"] > everything.facts["num_held_out_tokens"] - 17


def test_validation_is_spread_over_all_that_is_held_out(text_file):
    task = replace(text_task(str(text_file), length=16), num_validation_tokens=160)
    rows = text_of(task.load().validation()[0])
    held_out = text_file.read_bytes()[-task.load().facts["num_held_out_tokens"] + 1 :]
    places = [held_out.find(row) / len(held_out) for row in rows]
    assert len(rows) == 10
    assert max(places) > 0.8


def test_the_probe_is_held_out_text(text_file):
    data = text_task(str(text_file)).load()
    rows = [row for batch in data.validation() for row in text_of(batch)]
    assert len(text_of(data.probe())) == 8
    assert set(text_of(data.probe())) <= set(rows)
    assert len(set(text_of(data.probe()))) == 8


def test_long_rows_are_four_times_as_long_or_there_are_none(text_file):
    assert text_task(str(text_file), length=100).load().long().inputs.shape[1] == 400
    held_out = text_task(str(text_file)).load().facts["num_held_out_tokens"]
    assert text_task(str(text_file), length=held_out // 2).load().long() is None


# Sizes


def test_text_takes_at_most_twice_its_size(tmp_path):
    path = tmp_path / "large.txt"
    path.write_bytes(b"a line of text\n" * 400_000)
    task = text_task(str(path))
    tracemalloc.start()
    task.load()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2.1 * path.stat().st_size


# The task as a value


def test_a_task_survives_pickling_and_loads_once(text_file):
    task = text_task(str(text_file))
    copy = pickle.loads(pickle.dumps(task))
    assert copy == task
    assert copy.load() is task.load()


def test_the_same_text_elsewhere_is_the_same_task_but_for_its_location(folder, tmp_path):
    before = text_task(str(folder))
    moved = folder.rename(tmp_path / "moved")
    after = text_task(str(moved))
    assert before.to_dict() != after.to_dict()
    assert before.to_dict(location=False) == after.to_dict(location=False)
    assert before.to_dict(location=False)["kind"] == "lm"


def test_changed_text_is_refused(text_file, sentences):
    task = text_task(str(text_file))
    text_file.write_text("".join(sentences[1:]))
    with rejects("data", hint=f"has changed: its fingerprint was {task.fingerprint}"):
        task.load()


def test_changed_tokens_are_refused(token_file):
    task = text_task(str(token_file))
    np.save(token_file, np.arange(5000, dtype=np.uint16) % 776)
    with rejects("data", hint="has changed"):
        task.load()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("length", 0),
        ("length", 1.5),
        ("num_validation_tokens", 0),
        ("validation_share", 0.0),
        ("validation_share", 0.6),
    ],
)
def test_impossible_options_are_refused(field, value):
    with rejects(field):
        TextTask(**{field: value})
