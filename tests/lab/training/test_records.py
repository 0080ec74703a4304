import json
from dataclasses import replace

import fault_points
import pytest
from errors import rejects
from lab_runs import cost_of, executed, run_of

from tidegate import InputError
from tidegate._json import add_checksum, content_hash
from tidegate.lab.tasks.recall import RecallTask
from tidegate.lab.tasks.task import TaskFacts
from tidegate.lab.training.records import Costs, LayerMeasurements, Plan, Record, RecordFile, Variant, last_costs

PLAN = Plan(
    command="tidegate compare",
    variants=(Variant(name="none", gate="none"), Variant(name="low", gate="bma", overrides={"lr": 1e-3})),
    control="none",
    num_seeds=3,
    match="tokens",
    margin=0.005,
    grid=None,
    task=TaskFacts.from_dict(
        {"kind": "lm", "chance_loss": 5.5, "num_training_examples": 9, "missing": [], "bytes_per_token": 1.0}
    ),
    description="A text.",
    preset="tiny",
    budget=768,
    request="0123456789abcdef",
    environment={"python": "3"},
)
COSTS = Costs(request=PLAN.request, items=(cost_of("none"), cost_of("low", 1.1)), environment={})
LAYERS = LayerMeasurements(id="1", curvature_reason="a reason", gauge_reason="another")
RUN = run_of(RecallTask(num_pairs=3), variant="low")
FAILED = Record(id=RUN.id, run=RUN, status="failed", error="Traceback")


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


def test_lines_come_back_exactly_and_in_order(file, record):
    assert record.status == "finished", record.error
    assert record.observations
    lines = [PLAN, record, COSTS, FAILED, record, LAYERS]
    assert filled(file, *lines).read() == lines


def test_a_line_that_was_cut_off_anywhere_is_ignored_and_replaced_by_the_next(file):
    filled(file, PLAN)
    whole = file.path.read_bytes()
    last = filled(file, COSTS).path.read_bytes()[len(whole) :]
    for length in range(len(last)):
        file.path.write_bytes(whole + last[:length])
        assert file.read() == [PLAN]
        if length % 7 == 0:
            assert filled(file, FAILED).read() == [PLAN, FAILED]


class TestAFileThatIsTakenAway:
    words = r"records\.jsonl was removed or replaced while this command was running.* Rerun the command"

    def test_by_another_command_that_begins_its_own_does_not_mix_with_that(self, file):
        with file.lock():
            file.append(PLAN)
            file.path.unlink()
            other = RecordFile(file.path)
            with other.lock():
                other.append(COSTS)
                with pytest.raises(FileNotFoundError, match=self.words):
                    file.append(FAILED)
                assert other.read() == [COSTS]

    def test_once_the_lock_is_gone_is_no_error(self, file):
        with file.lock():
            file.append(PLAN)
        file.path.unlink()
        assert filled(file, COSTS).read() == [COSTS]


def test_a_number_that_json_does_not_have_is_refused_and_leaves_the_file_as_it_was(file):
    filled(file, PLAN)
    with pytest.raises(ValueError, match="JSON"):
        file.append(replace(FAILED, metrics={"accuracy": float("nan")}))
    assert file.read() == [PLAN]


GOOD = {"id": "1", "run": RUN.to_dict(), "status": "failed", "kind": "run"}


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ({"kind": "poem"}, "kind"),
        (GOOD | {"status": "junk"}, "status"),
        (GOOD | {"curve": [{"step": 1}]}, "curve[0].tokens"),
        ({"id": "1", "kind": "run"}, "run"),
        (GOOD | {"run": RUN.to_dict() | {"colour": 0}}, "run.colour"),
        (GOOD | {"run": RUN.to_dict() | {"task": {"kind": "sea"}}}, "run.task.kind"),
        (GOOD | {"run": RUN.to_dict() | {"training": {"steps": 1, "lr": "fast"}}}, "run.training.lr"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_line_of_another_form_is_rejected_with_file_number_field_and_remedy(file, line, field):
    filled(file, PLAN)
    with file.path.open("a") as opened:
        opened.write(json.dumps(add_checksum(line)) + "\n")
    with rejects(f"{file.path}, line 2: {field}", hint="Remove it and rerun the command"):
        file.read()


def test_a_task_of_somebodys_own_comes_back_as_it_was_described(file):
    task = {"name": "copy", "row": 12, "kind": "recall"}
    with file.path.open("a") as opened:
        opened.write(json.dumps(add_checksum(GOOD | {"run": RUN.to_dict() | {"task": task}})) + "\n")
    (record,) = file.read()
    assert record.run.task.kind == "recall"
    assert record.run.task.to_dict() == task
    with rejects("task"):
        record.run.task.load()


def test_a_run_that_was_read_keeps_the_fields_that_it_had(file):
    older = RUN.to_dict()
    del older["model"]["init"]
    with file.path.open("a") as opened:
        opened.write(json.dumps(add_checksum(GOOD | {"run": older})) + "\n")
    (record,) = file.read()
    assert record.run.to_dict() == older
    assert record.run.id == content_hash(older) != RUN.id
    assert record.run == RUN
    assert replace(record.run, seed=RUN.seed).id == RUN.id


@pytest.mark.parametrize("line", [b"[" * 100_000, b"\xff", b"", b"null", b'{"loss": NaN}'], ids=range(5))
def test_a_line_that_is_not_an_object_is_rejected(file, line):
    file.path.write_bytes(line + b"\n")
    with pytest.raises(InputError, check=lambda error: error.field.startswith(f"{file.path}, line 1: ")):
        file.read()


def test_a_figure_that_was_changed_by_hand_is_noticed_and_another_layout_is_none(file):
    filled(file, PLAN, FAILED, COSTS)
    lines = file.path.read_text().splitlines()
    lines[2] = lines[2].replace('"time_ratio": 1.1', '"time_ratio": 1.2')
    file.path.write_text("".join(f"{line}\n" for line in lines))
    with rejects(f"{file.path}, line 3: digest"):
        file.read()
    filled(RecordFile(file.path.with_name("again.jsonl")), PLAN, FAILED)
    spaced = [json.dumps(json.loads(line), separators=(" , ", " : "), sort_keys=True) for line in lines[:2]]
    file.path.write_text("".join(f"{line}\n" for line in spaced))
    assert file.read() == [PLAN, FAILED]


@pytest.mark.parametrize(("point", "kept"), [("before-write", 1), ("half-written", 1), ("written", 2)])
def test_a_full_disk_is_named_and_the_next_line_heals_what_is_left(file, monkeypatch, point, kept):
    filled(file, PLAN)
    fault_points.ask_for(monkeypatch, f"record:{point}")
    with pytest.raises(OSError, match=f"{file.path} .*: No space left on device"):
        file.append(FAILED)
    assert file.read() == [PLAN, FAILED][:kept]
    assert filled(file, LAYERS).read() == [*[PLAN, FAILED][:kept], LAYERS]


def test_the_costs_that_hold_are_the_last():
    again = replace(COSTS, items=(cost_of("none", 2.0),))
    assert last_costs([PLAN, COSTS, FAILED, again, LAYERS]) is again
    assert last_costs([PLAN]) is None
