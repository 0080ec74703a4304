import os
import pickle
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import lab_runs
import pytest
from lab_runs import Deadly, executed, model_of, records_of, request_of, run_of, text_of, timeless

from tidegate.lab.compare.run import CHECKPOINTS, compare, records_path
from tidegate.lab.training.events import Progress
from tidegate.lab.training.executors import processes, serial
from tidegate.lab.training.executors.executor import executor_of
from tidegate.lab.training.executors.processes import ProcessExecutor
from tidegate.lab.training.executors.serial import SerialExecutor, note_interrupts
from tidegate.lab.training.records import RecordFile


def several(task):
    """Runs of all kinds: plain, gated, with dropout, diverging, failing."""
    return [
        run_of(task, gate="none", variant="none"),
        run_of(task, seed=1),
        run_of(task, variant="dropout", model=model_of("g1", dropout=0.2)),
        run_of(task, variant="wild", lr=1e6, weight_decay=1.0),
        run_of(replace(task, source="gone.txt"), variant="lost"),
    ]


def long_runs(task):
    """Two runs that are far from their end when they are first heard of."""
    return [run_of(task, variant=f"long {seed}", seed=seed, steps=60) for seed in (0, 1)]


PATHS = {"PYTHONPATH": os.pathsep.join(sys.path)}
STATUSES = {"none": "finished", "bma": "finished", "dropout": "finished", "wild": "diverged", "lost": "failed"}


def done(executor, runs, folder):
    told = []
    return list(executor.execute(runs, checkpoints=folder, report=told.append)), told


def done_on_ray(runs, folder):
    process = subprocess.run(
        [sys.executable, "-c", "from lab_runs import on_ray; on_ray()"],
        env=os.environ | PATHS,
        input=pickle.dumps((runs, folder)),
        stdout=subprocess.PIPE,
        check=True,
    )
    return pickle.loads(process.stdout)


def collect(work, records):
    """Append what comes, so that it is there also if the work breaks off."""
    for record in work:
        records += [record]


def without_traceback(record):
    """Which lines of which file failed depends on who called them; what was said does not."""
    if record.status == "failed":
        record = replace(record, error=record.error.strip().splitlines()[-1])
    return timeless(record)


def by_id(records):
    return {record.id: without_traceback(record) for record in records}


class TestEveryExecutor:
    @pytest.fixture(scope="class")
    @classmethod
    def runs(cls, tmp_path_factory):
        return several(text_of(tmp_path_factory.mktemp("text")))

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls, runs):
        return [executed(run) for run in runs]

    @pytest.fixture(scope="class")
    @classmethod
    def in_processes(cls, runs, tmp_path_factory):
        """Records of the runs, of one that ends its process and of two, one of which is killed; also which runs were
        told of, and how many processes were started.

        The two begin first, side by side, and the process of the first that is heard of is killed at once.
        """
        deadly, pair = replace(runs[0], variant=Deadly("deadly")), long_runs(runs[0].task)
        told, started = set(), []

        class Pool(processes._WorkerPool):
            def start_worker(self):
                super().start_worker()
                started.append(list(self.workers.values())[-1])

        def report(progress):
            if not told:
                (worker,) = (worker for worker in started if worker.run is not None and worker.run.id == progress.run)
                os.kill(worker.process.pid, signal.SIGKILL)
            told.add(progress.run)

        folder = tmp_path_factory.mktemp("checkpoints")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(processes, "_WorkerPool", Pool)
            work = ProcessExecutor(2).execute([*pair, *runs, deadly], checkpoints=folder, report=report)
            return list(work), told, len(started)

    def test_of_the_runs_on_their_own_each_ends_in_its_way(self, alone):
        assert {record.run["variant"]: record.status for record in alone} == STATUSES
        assert alone[-1].error.startswith("Traceback")

    def test_serially_each_run_is_as_it_is_alone(self, runs, alone, tmp_path):
        records, told = done(SerialExecutor(), runs, tmp_path / "checkpoints")
        assert [record.id for record in records] == [run.id for run in runs]
        assert by_id(records) == by_id(alone)
        assert {progress.run for progress in told} == {run.id for run in runs[:-1]}

    def test_in_processes_each_run_is_as_it_is_alone(self, runs, alone, in_processes):
        records, told, _ = in_processes
        expected = by_id(alone)
        assert {run: record for run, record in by_id(records).items() if run in expected} == expected
        # Of a run that diverges within a moment nothing may be told.
        assert {run.id for run in runs[:3]} <= told <= {run.id for run in (*runs[:-1], *long_runs(runs[0].task))}
        assert "Traceback" in next(record for record in records if record.run["variant"] == "lost").error

    def test_a_run_that_ends_its_process_is_a_failed_record_and_the_others_are_done(self, runs, in_processes):
        records, _, _ = in_processes
        (deadly,) = (record for record in records if record.run["variant"] == "deadly")
        assert deadly.status == "failed"
        assert deadly.error == "The process of this run was ended from outside: exit code 7."
        assert len(records) == len(runs) + 3

    def test_a_run_whose_process_is_killed_from_outside_is_a_failed_record_and_the_other_goes_on(self, in_processes):
        records, _, num_processes = in_processes
        pair = {record.status: record for record in records if record.run["variant"].startswith("long")}
        assert sorted(pair) == ["failed", "finished"]
        assert "ended from outside: signal 9" in pair["failed"].error
        # Another takes its place; after the last run, which ends its process, none does.
        assert num_processes == 3

    @pytest.mark.full
    def test_on_ray_each_run_is_as_it_is_alone(self, runs, alone, tmp_path):
        pytest.importorskip("ray")
        records, told = done_on_ray(runs, tmp_path / "checkpoints")
        assert by_id(records) == by_id(alone)
        assert len(records) == len(runs)
        assert {progress.run for progress in told} <= {run.id for run in runs}
        assert told
        assert "Traceback" in next(record for record in records if record.status == "failed").error

    @pytest.mark.parametrize("name", ["serial", "processes"])
    def test_of_no_runs_there_are_no_records(self, name, tmp_path):
        assert done(executor_of(name), [], tmp_path) == ([], [])


def test_an_unknown_executor_is_refused():
    with pytest.raises(ValueError, match="executor must be one of serial, processes, ray; got 'threads'"):
        executor_of("threads")


class TestASignal:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_is_noted_and_breaks_nothing_off(self, number):
        before = signal.getsignal(number)
        with note_interrupts() as noted:
            os.kill(os.getpid(), number)
            assert noted == [number]
        assert signal.getsignal(number) is before

    @pytest.mark.parametrize("at", [1, 5, lab_runs.STEPS])
    def test_stops_a_serial_run_at_its_next_step_with_a_checkpoint(self, task, tmp_path, at):
        runs = [run_of(task, variant="none", gate="none"), run_of(task)]
        folder = tmp_path / "checkpoints"

        def report(progress):
            if progress.run == runs[1].id and progress.step == at:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            list(SerialExecutor().execute(runs, checkpoints=folder, report=report))
        # The first one has ended; its trained model stays until it is forgotten.
        assert {file.stem for file in folder.iterdir()} == {run.id for run in runs}
        again, told = done(SerialExecutor(), [runs[1]], folder)
        assert by_id(again) == by_id([executed(runs[1])])
        assert [progress.step for progress in told] == list(range(at + 1, lab_runs.STEPS + 1))

    def test_after_the_last_step_does_not_lose_the_record(self, task, tmp_path, monkeypatch):
        original = serial.execute_run

        def signalled(run, around):
            record = original(run, around)
            os.kill(os.getpid(), signal.SIGINT)
            return record

        monkeypatch.setattr(serial, "execute_run", signalled)
        records = []
        work = SerialExecutor().execute([run_of(task), run_of(task, seed=1)], checkpoints=tmp_path, report=print)
        with pytest.raises(KeyboardInterrupt):
            collect(work, records)
        assert [record.status for record in records] == ["finished"]

    def test_while_a_record_is_written_waits_until_it_is(self, task, tmp_path):
        work = SerialExecutor().execute([run_of(task)], checkpoints=tmp_path, report=print)
        record = next(work)
        os.kill(os.getpid(), signal.SIGINT)
        assert record.status == "finished"
        with pytest.raises(KeyboardInterrupt):
            next(work)


@pytest.fixture
def begin():
    """Begins comparisons in sessions of their own; whatever is left of them in the end is killed."""
    processes = []

    def begun(*arguments, **options):
        processes.append(in_a_session(*arguments, **options))
        return processes[-1]

    yield begun
    for process in processes:
        for member in members(process.pid):
            os.kill(member, signal.SIGKILL)
        process.communicate()


def in_a_session(folder, variants, *, num_seeds, steps, num_processes=2):
    """A comparison in processes of its own, once it trains."""
    command = [sys.executable, "-c", "from lab_runs import main; main()"]
    budget = steps * 4 * lab_runs.LENGTH
    process = subprocess.Popen(
        [*command, str(folder), variants, str(num_seeds), str(budget), str(num_processes)],
        env=os.environ | PATHS | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    for line in process.stdout:
        if line.startswith("Progress"):
            break
    return process


def finished_here(folder, variants, *, num_seeds, steps, out="out", tell=lambda _: None):
    """The same comparison in this process, from wherever it stands."""
    request = request_of(text_of(folder), variants, num_seeds=num_seeds, budget=steps * 4 * lab_runs.LENGTH)
    return records_of(compare(request, folder / out, executor=SerialExecutor(), tell=tell))


def members(session):
    """Processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[3:4] == [str(session)] and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def gone(session, seconds=20):
    deadline = time.monotonic() + seconds
    while members(session) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(session)


class Asked:
    """An executor that is stopped before it begins; it knows what it was asked for."""

    def execute(self, runs, *, checkpoints, report):
        self.runs = {run.id: run for run in runs}
        raise KeyboardInterrupt


class TestAComparisonInProcesses:
    # A process sees for itself that it is alone, and each starts an interpreter.
    @pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.full)])
    def test_killed_at_any_moment_and_run_again_gives_the_same_records(
        self, num_processes, tmp_path, miniatures, begin
    ):
        process = begin(tmp_path, "none,bma", num_seeds=1, steps=60, num_processes=num_processes)
        time.sleep(random.Random(8).uniform(0.0, 0.3))
        process.kill()
        # Workers see that they are alone, save where they stand, and end.
        assert gone(process.pid)
        assert list((tmp_path / "out" / CHECKPOINTS).glob("*.safetensors"))
        assert len(records_of(RecordFile(records_path(tmp_path / "out")).read())) < 2
        told = []
        again = finished_here(tmp_path, "none,bma", num_seeds=1, steps=60, tell=told.append)
        # What was under way had stopped before its end.
        assert next(event for event in told if isinstance(event, Progress)).step > 1
        assert again == finished_here(tmp_path, "none,bma", num_seeds=1, steps=60, out="new")
        assert not (tmp_path / "out" / CHECKPOINTS).exists()

    @pytest.mark.parametrize(
        "number",
        [
            pytest.param(signal.SIGINT, id="Ctrl-C"),
            # Both signals are noted alike, which is tested above; each comparison starts three interpreters.
            pytest.param(signal.SIGTERM, id="polite kill", marks=pytest.mark.full),
        ],
    )
    def test_interrupted_ends_cleanly_and_goes_on_to_the_same_records(self, number, tmp_path, miniatures, begin):
        # So many runs that they would not all fit into the pipe to a worker.
        request = request_of(text_of(tmp_path), num_seeds=60, budget=60 * 4 * lab_runs.LENGTH)
        process = begin(tmp_path, "none,bma", num_seeds=60, steps=60)
        os.killpg(process.pid, number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert errors == ""
        assert gone(process.pid)
        folder, asked = tmp_path / "out" / CHECKPOINTS, Asked()
        with pytest.raises(KeyboardInterrupt):
            compare(request, tmp_path / "out", executor=asked, tell=lambda _: None)
        assert sum(len(pickle.dumps(run)) for run in asked.runs.values()) > 65_536
        stopped = [asked.runs[file.stem] for file in folder.iterdir() if file.stem in asked.runs]
        assert 1 <= len(stopped) <= 2
        records, told = done(SerialExecutor(), stopped, folder)
        assert told[0].step > 1
        assert by_id(records) == by_id(executed(run) for run in stopped)


def test_processes_that_cannot_begin_are_an_error(task, tmp_path, monkeypatch):
    # Its process ends when it reads what it should do, before it imports anything.
    monkeypatch.setattr(processes, "_run_worker", Deadly("worker"))
    with pytest.raises(RuntimeError, match="ended before it could begin, with exit code 7"):
        done(ProcessExecutor(1), [run_of(task)], tmp_path)
