import json
from dataclasses import replace

import pytest
from lab_runs import cost_of, executed, run_of

from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.training import records
from tidegate.lab.training.records import Costs, LayerMeasurements, Plan, Record, RecordFile, VariantPlan

PLAN = Plan(
    command="tidegate compare",
    variants=(VariantPlan(name="none", gate="none"), VariantPlan(name="low", gate="bma", overrides={"lr": 1e-3})),
    control="none",
    num_seeds=3,
    match="tokens",
    margin=0.005,
    tuned_lr=False,
    task={"kind": "lm", "missing": [], "bytes_per_token": 1.0},
    description="A text.",
    preset="tiny",
    budget=768,
    request="0123456789abcdef",
    environment={"python": "3"},
)
COSTS = Costs(request=PLAN.request, items=(cost_of("none"), cost_of("low", 1.1)), environment={})
LAYERS = LayerMeasurements(id="1", curvature_reason="a reason", gauge_reason="another")
FAILED = Record(id="1", run={"variant": "low"}, status="failed", error="Traceback")


@pytest.fixture
def file(tmp_path):
    return RecordFile(tmp_path / "records.jsonl")


@pytest.fixture(scope="module")
def record():
    run = run_of(RecallTask(num_pairs=3), gate="g1+bma", steps=4)
    return executed(replace(run, model=replace(run.model, vocab_size=128)))


def filled(file, *lines):
    for line in lines:
        file.append(line)
    return file


def test_no_file_holds_no_lines(file):
    assert file.read() == []


def test_lines_come_back_exactly_and_in_order(file, record):
    assert record.status == "finished", record.error
    assert record.observations
    lines = [PLAN, record, COSTS, FAILED, record, LAYERS]
    assert filled(file, *lines).read() == lines


def test_each_line_is_one_json_object(file, record):
    filled(file, PLAN, record, COSTS, LAYERS)
    kinds = [json.loads(line)["kind"] for line in file.path.read_text().splitlines()]
    assert kinds == ["plan", "run", "costs", "layers"]


def test_a_line_that_was_cut_off_anywhere_is_as_if_never_written(file):
    filled(file, PLAN)
    whole = file.path.read_bytes()
    last = filled(file, COSTS).path.read_bytes()[len(whole) :]
    for length in range(len(last)):
        file.path.write_bytes(whole + last[:length])
        assert file.read() == [PLAN]


def test_the_next_line_takes_the_place_of_one_that_was_cut_off(file):
    filled(file, PLAN)
    whole = file.path.read_bytes()
    last = filled(file, COSTS).path.read_bytes()[len(whole) :]
    for length in range(0, len(last), 7):
        file.path.write_bytes(whole + last[:length])
        file.append(FAILED)
        assert file.read() == [PLAN, FAILED]


def test_a_first_line_that_was_cut_off_is_replaced(file):
    file.path.write_bytes(b'{"command": "tide')
    assert filled(file, PLAN).read() == [PLAN]


def test_a_long_line_that_was_cut_off_is_found_however_far_its_beginning_lies_back(file):
    filled(file, PLAN)
    whole = file.path.read_bytes()
    for length in (1, 4095, 4096, 4097, 20_000):
        file.path.write_bytes(whole + b"x" * length)
        assert filled(file, FAILED).read() == [PLAN, FAILED]


def test_to_add_a_line_only_the_end_of_the_file_is_read(file, monkeypatch):
    filled(file, PLAN)
    monkeypatch.setattr(records, "_SEARCHED_BYTES", 1)
    before = file.path.stat().st_size
    seen = []
    original = records._end_of_last_line
    monkeypatch.setattr(records, "_end_of_last_line", lambda f: (original(f), seen.append(f.tell()))[0])
    file.append(FAILED)
    assert seen == [before]
    assert file.read() == [PLAN, FAILED]


def test_a_number_that_json_does_not_have_is_refused_and_leaves_the_file_as_it_was(file):
    filled(file, PLAN)
    with pytest.raises(ValueError, match="JSON"):
        file.append(replace(FAILED, metrics={"accuracy": float("nan")}))
    assert file.read() == [PLAN]


def test_a_line_of_an_unknown_kind_is_refused(file):
    file.path.write_text('{"kind": "poem"}\n')
    with pytest.raises(ValueError, match="kind must be one of costs, layers, plan, run; got 'poem'"):
        file.read()


def test_two_cannot_work_on_one_file_at_once(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl")
    with file.lock(), pytest.raises(ValueError, match="Another command is at work"), file.lock():
        pass
    with file.lock():
        assert file.read() == []


def test_a_line_of_another_kind_is_named_with_its_number(tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_text('{"kind": "tide"}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 1, is no record of this version"):
        RecordFile(path).read()
