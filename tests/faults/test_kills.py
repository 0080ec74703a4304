"""Work that is killed at any moment resumes, and ends with the same results as undisturbed work."""

import json
import random
import time
from datetime import datetime

import fault_points
import pytest
import victims
from fault_points import POINTS
from lab_runs import text_of, timeless
from safetensors.torch import load_file
from torch.distributed import TCPStore

from tidegate.lab.training.executors.executor import RETRIES
from tidegate.lab.training.records import Record, RecordFile, records_path
from tidegate.torch import load_model

RECORD_WRITES = [point for point in POINTS if point.startswith("record:")]
CHECKPOINT_WRITES = [point for point in POINTS if point.startswith("checkpoint:")]
NUM_KILLS_IN_PROCESSES = 8
"""Of driver, worker and both, in the long version: before it starts, a worker imports PyTorch."""


class Disturbed:
    """Work that is killed and started again: what it gives undisturbed, and how long that takes."""

    def __init__(self, folder, work, result_of, *arguments, num_processes=1):
        self.folder, self.work, self.result_of, self.arguments = folder, work, result_of, arguments
        self.ranks = [{}]
        if num_processes > 1:
            # The store at which the processes meet is here, so that its port is never free for others.
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
            where |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            where["WORLD_SIZE"] = str(num_processes)
            self.ranks = [where | {"RANK": str(rank)} for rank in range(num_processes)]
        victims.wait_for_server()
        start = time.monotonic()
        self.expected = self.finish(folder / "undisturbed")
        self.seconds = time.monotonic() - start

    def start(self, out, **environment):
        """Start all processes; the first is returned, and writes."""
        first, *self.others = (
            victims.start(self.work, self.folder, out, *self.arguments, environment=rank | environment)
            for rank in self.ranks
        )
        return first

    def join(self, process):
        """Wait for the end of all processes; return the exit code of the first."""
        for each in (process, *self.others):
            each.join()
        return process.exitcode

    def finish(self, out):
        """Let the work end; return its result."""
        assert self.join(self.start(out)) == 0
        return self.result_of(out)

    def kill_at_random(self, folder, number, moments, *, times=2, kill=victims.kill):
        """Kill at least so often, several times in each folder, which is then finished; return kills and folders."""
        killed = folders = 0
        while killed < number:
            out = folder / str(folders)
            folders += 1
            for _ in range(times):
                process = self.start(out)
                process.join(moments.uniform(0, self.seconds))
                killed += kill(process)
            assert self.finish(out) == self.expected
        return killed, folders

    def kill_at(self, point, out, count):
        """Start, to be killed when the point is reached so often; return whether it was reached."""
        code = self.join(self.start(out, **fault_points.environment(point, count)))
        assert code in (0, -9)
        return code == -9


def recorded(out):
    """The records of a comparison by run, times aside; each run is recorded once, and none failed."""
    records = [timeless(line) for line in RecordFile(records_path(out)).read() if isinstance(line, Record)]
    found = {record.id: record for record in records}
    assert len(found) == len(records)
    return found


def study_record(out):
    path = out / "depth.json"
    return json.loads(path.read_bytes()) if path.exists() else None


def trained(out):
    """What a training leaves, times aside: its record, its model twice, the log's losses, the names of its files."""
    (record,) = recorded(out).values()
    weights = load_model(out / "model.safetensors").state_dict()
    steps = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    exported = load_file(out / "hf" / "model.safetensors")
    return (
        record,
        {name: value.numpy().tobytes() for name, value in weights.items()},
        {name: value.numpy().tobytes() for name, value in exported.items()},
        (out / "hf" / "config.json").read_text(),
        [(line["step"], line["loss"]) for line in steps if "step" in line],
        {file.name for file in out.iterdir()},
    )


def shards_in(out):
    """All that a tokenizing leaves."""
    return {file.name: file.read_bytes() for file in out.iterdir() if not file.name.endswith(".partial")}


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """Makes each kind of work once."""
    made = {}

    def make(work, result_of, *arguments, **options):
        key = (work, *arguments, *options.values())
        if key not in made:
            folder = tmp_path_factory.mktemp(work.__name__)
            text_of(folder)
            made[key] = Disturbed(folder, work, result_of, *arguments, **options)
        return made[key]

    return make


@pytest.fixture
def serial(disturbed):
    return disturbed(victims.small_comparison, recorded, 1, 40)


@pytest.fixture
def processes(disturbed):
    return disturbed(victims.comparison_in_processes, recorded, 1, 400)


@pytest.fixture
def study(disturbed):
    return disturbed(victims.small_study, study_record)


@pytest.fixture
def training(disturbed):
    return disturbed(victims.small_training, trained)


@pytest.fixture
def tokenizing(disturbed):
    return disturbed(victims.small_tokenizing, shards_in)


def equal_records(folders):
    return f"same records in all {folders} folders"


@pytest.mark.fault("SIGKILL of a serial comparison at a random moment")
def test_a_comparison_killed_at_random_moments_resumes(serial, tmp_path, effort, report):
    killed, folders = serial.kill_at_random(tmp_path, effort(4, 50), random.Random(14), times=4)
    report(tried=killed, outcome=equal_records(folders))


@pytest.mark.fault(lambda point: f"SIGKILL when {POINTS[point]}")
@pytest.mark.parametrize("point", RECORD_WRITES + CHECKPOINT_WRITES)
def test_a_kill_inside_a_write_loses_nothing(serial, point, tmp_path, effort, report):
    counts = range(1, effort(2, 5))
    for count in counts:
        assert serial.kill_at(point, tmp_path / str(count), count)
        assert serial.finish(tmp_path / str(count)) == serial.expected
    report(tried=len(counts), outcome="same records")


@pytest.mark.torture
@pytest.mark.fault(lambda whom: f"SIGKILL of {whom} at a random moment of a comparison in processes")
@pytest.mark.parametrize("whom", ["the driver", "driver and workers at once"])
def test_a_comparison_whose_driver_is_killed_at_random_moments_resumes(processes, whom, tmp_path, effort, report):
    kill = {"the driver": victims.kill, "driver and workers at once": victims.kill_all}[whom]
    number = effort(1, NUM_KILLS_IN_PROCESSES)
    killed, folders = processes.kill_at_random(tmp_path, number, random.Random(whom), times=3, kill=kill)
    report(tried=killed, outcome=equal_records(folders))


def resumed_runs(out):
    """The runs that lost their process and resumed from a checkpoint: by their records they started before the loss.

    A record has whole seconds, so that a run is left out if it was lost in the second in which it started.
    """
    lines = RecordFile(records_path(out)).read()
    started = {line.id: line.timing.started for line in lines if isinstance(line, Record) and line.timing}
    return [
        run
        for run, moment in victims.first_losses(out).items()
        if datetime.fromisoformat(started[run]).timestamp() < int(moment)
    ]


@pytest.mark.torture
@pytest.mark.fault("SIGKILL of a worker at a random moment of a comparison in processes")
def test_a_run_whose_worker_is_killed_resumes_from_its_checkpoint(processes, tmp_path, effort, report):
    """In every second folder, runs are in progress at that moment."""
    moments, killed, folders, lost, resumed = random.Random("worker"), 0, 0, 0, 0
    most = effort(1, NUM_KILLS_IN_PROCESSES)
    while (killed < most or not resumed) and folders < 3 * most:
        out = tmp_path / str(folders)
        process = processes.start(out)
        if folders % 2:
            victims.wait_for_a_step(process, out)
        process.join(moments.uniform(0, 2 if folders % 2 else processes.seconds))
        killed += victims.kill_child(process)
        assert process.exitcode == 0
        assert recorded(out) == processes.expected
        folders += 1
        lost += len(victims.first_losses(out))
        resumed += len(resumed_runs(out))
    assert resumed, "no run resumed from a checkpoint"
    report(
        tried=killed,
        outcome=f"{lost} hit a run in progress, of which at least {resumed} resumed from a checkpoint; same records in "
        f"all {folders} folders",
    )


@pytest.mark.torture
@pytest.mark.fault(lambda point: f"SIGKILL of a worker, three times in a row, when {POINTS[point]}")
@pytest.mark.parametrize("point", CHECKPOINT_WRITES)
def test_a_run_whose_workers_are_killed_inside_their_writes_fails_and_resumes_later(processes, point, tmp_path, report):
    """Each worker is killed at its third checkpoint, so that two runs fail; the next command resumes them."""
    out = tmp_path / "out"
    assert processes.join(processes.start(out, **fault_points.environment(point, 3))) == 1
    assert processes.join(processes.start(out)) == 0
    records = [timeless(line) for line in RecordFile(records_path(out)).read() if isinstance(line, Record)]
    failed = [record for record in records if record.status == "failed"]
    assert len(failed) == len(victims.first_losses(out)) == 2
    assert len(records) == len(processes.expected) + 2
    assert {record.id: record for record in records if record not in failed} == processes.expected
    report(tried=2 * (1 + RETRIES), outcome="two runs recorded as failed after two retries; then same records")


@pytest.mark.fault("SIGKILL of a study at a random moment")
def test_a_study_killed_at_random_moments_leaves_no_half_of_a_record(study, tmp_path, effort, report):
    def kill(process):
        alive = victims.kill(process)
        assert all(study_record(out) in (None, study.expected) for out in tmp_path.iterdir())
        return alive

    killed, _ = study.kill_at_random(tmp_path, effort(2, 50), random.Random(3), times=1, kill=kill)
    report(tried=killed, outcome="no record or the whole one; then same record")


@pytest.mark.fault("SIGKILL of a study when its record is written but not in place")
def test_a_study_killed_before_its_record_is_in_its_place_leaves_none(study, tmp_path, report):
    assert study.kill_at("file:before-move", tmp_path, 1)
    assert study_record(tmp_path) is None
    assert study.finish(tmp_path) == study.expected
    report(tried=1, outcome="no record; then same record")


@pytest.mark.fault("SIGKILL of `tidegate train` at a random moment")
def test_a_training_killed_at_random_moments_resumes_to_the_same_model(training, tmp_path, effort, report):
    killed, folders = training.kill_at_random(tmp_path, effort(2, 50), random.Random(5))
    report(tried=killed, outcome=f"same record, model and log in all {folders} folders")


@pytest.mark.fault(lambda point: f"SIGKILL of `tidegate train` when {POINTS[point]}")
@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point in ("record:written", "model:before-move") else pytest.mark.torture)
        for point in (*RECORD_WRITES, "model:before-move")
    ],
)
def test_a_training_killed_inside_its_last_writes_resumes_to_the_same_model(training, point, tmp_path, report):
    assert training.kill_at(point, tmp_path, 1)
    assert training.finish(tmp_path) == training.expected
    report(tried=1, outcome="same record, model and log")


IN_SHORT = {(1, "checkpoint:half-written"), (2, "checkpoint:after-previous")}
"""Kills inside a checkpoint's write that the short version tries."""


WORDS = {1: "one process", 2: "two processes"}


@pytest.mark.fault(
    lambda num_processes, point: f"SIGKILL of `tidegate train`, {WORDS[num_processes]}, whenever {POINTS[point]}"
)
@pytest.mark.parametrize(
    ("num_processes", "point"),
    [
        pytest.param(number, point, marks=() if (number, point) in IN_SHORT else pytest.mark.torture)
        for number in (1, 2)
        for point in CHECKPOINT_WRITES
    ],
)
def test_a_training_killed_inside_its_checkpoints_resumes_to_the_same_model(
    disturbed, num_processes, point, tmp_path, effort, report
):
    """The process that writes is killed at its first, second or third checkpoint, until nothing is left to train."""
    training = disturbed(victims.small_training, trained, num_processes=num_processes)
    counts, number, killed, folders = random.Random(point), effort(2, 50), 0, 0
    while killed < number:
        out = tmp_path / str(folders)
        folders += 1
        while killed < number and training.kill_at(point, out, counts.randint(1, 3)):
            killed += 1
        assert training.finish(out) == training.expected
    report(tried=killed, outcome=f"same record, model and log in all {folders} folders")


@pytest.mark.fault("SIGKILL of `tidegate tokenize` at a random moment")
def test_a_tokenizing_killed_at_random_moments_resumes_to_the_same_shards(tokenizing, tmp_path, effort, report):
    killed, folders = tokenizing.kill_at_random(tmp_path, effort(4, 100), random.Random(6))
    report(tried=killed, outcome=f"same files in all {folders} folders")


@pytest.mark.fault("SIGKILL of `tidegate tokenize` when a file is written but not in place")
def test_a_tokenizing_killed_inside_a_write_resumes_to_the_same_shards(tokenizing, tmp_path, effort, report):
    num_writes = len(tokenizing.expected)
    counts = range(1, num_writes + 1, effort(5, 1))
    for count in counts:
        assert tokenizing.kill_at("file:before-move", tmp_path / str(count), count)
        assert tokenizing.finish(tmp_path / str(count)) == tokenizing.expected
    report(tried=len(counts), outcome="same files")
