import os
import pickle
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace

import fault_points
import lab_runs
import psutil
import pytest
from errors import rejects
from lab_runs import Deadly, executed, model_of, records_of, request_of, run_of, text_of, timeless
from waiting import wait_until

from tidegate.lab.compare.run import CHECKPOINTS, compare, records_path
from tidegate.lab.training import machine
from tidegate.lab.training.events import Notice, Progress
from tidegate.lab.training.executors import executor as executor_module
from tidegate.lab.training.executors import processes
from tidegate.lab.training.executors.executor import Attempts, SerialExecutor, capture_signals, make_executor
from tidegate.lab.training.executors.processes import ProcessExecutor, describe_end
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


TERMINATED_AT = 60
"""The checkpoint at which a worker gets SIGTERM; without the long run, no process saves as many."""


def long_run(task):
    return run_of(task, variant="long", steps=TERMINATED_AT + 10)


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
        """Records of the runs, of one that ends its process and of a terminated one; progress; and the checkpoints.

        No run is retried.
        """
        deadly, told = replace(runs[0], variant=Deadly("deadly")), set()
        folder, executor = tmp_path_factory.mktemp("checkpoints"), ProcessExecutor(2, retries=0, checkpoint_seconds=0)
        work = executor.execute(
            [long_run(runs[0].task), *runs, deadly], checkpoints=folder, report=lambda event: told.add(event.run)
        )
        with pytest.MonkeyPatch.context() as patch:
            fault_points.ask_for(patch, "checkpoint:moved", TERMINATED_AT, "terminate")
            return list(work), told, folder

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
        assert {run.id for run in runs[:3]} <= told <= {run.id for run in (*runs[:-1], long_run(runs[0].task))}
        assert "Traceback" in next(record for record in records if record.run.variant == "lost").error

    def test_a_run_that_ends_its_process_is_a_failed_record_and_the_others_are_done(self, runs, in_processes):
        records, *_ = in_processes
        (deadly,) = (record for record in records if record.run.variant == "deadly")
        assert deadly.status == "failed"
        assert "with exit code 7" in deadly.error
        assert len(records) == len(runs) + 2

    def test_a_run_whose_process_is_killed_politely_is_a_failed_record_and_goes_on_from_its_checkpoint(
        self, runs, in_processes
    ):
        records, _, folder = in_processes
        lost = long_run(runs[0].task)
        (failed,) = (record for record in records if record.id == lost.id)
        assert failed.status == "failed"
        assert "by SIGTERM" in failed.error
        again, told = done(SerialExecutor(), [lost], folder)
        assert told[0].step > TERMINATED_AT
        assert by_id(again) == by_id([executed(lost)])

    def test_a_run_whose_process_is_killed_goes_on_in_another_and_ends_as_if_nothing_had_been(
        self, runs, alone, tmp_path, monkeypatch
    ):
        # A process saves a checkpoint after each step, and is killed after its eighth; the second has only four left.
        fault_points.ask_for(monkeypatch, "checkpoint:moved", 8, "kill")
        records, told = done(ProcessExecutor(1, retries=1, checkpoint_seconds=0), [runs[1]], tmp_path)
        assert by_id(records) == by_id([alone[1]])
        assert len(records) == 1
        (notice,) = (event for event in told if isinstance(event, Notice))
        assert (notice.run, notice.variant, notice.seed) == (runs[1].id, "bma", 1)
        assert re.match(r"Its process ended early, by SIGKILL[:,][^.]* memory\. The run resumes", notice.text)
        assert notice.text.endswith("retry 1 of 1.")
        steps = [event.step for event in told[told.index(notice) + 1 :] if isinstance(event, Progress)]
        assert steps[0] == 9
        assert steps[-1] == lab_runs.STEPS

    @pytest.mark.full
    def test_on_ray_a_run_whose_process_is_killed_goes_on_in_another(self, runs, alone, tmp_path, monkeypatch):
        pytest.importorskip("ray")
        fault_points.ask_for(monkeypatch, "checkpoint:moved", 1, "kill")
        records, told = done_on_ray(runs[:2], tmp_path / "checkpoints")
        assert by_id(records) == by_id(alone[:2])
        assert len(records) == 2
        notices = [event for event in told if isinstance(event, Notice)]
        assert {notice.run for notice in notices} == {run.id for run in runs[:2]}
        for notice in notices:
            assert "ended early, by a signal or a crash, possibly for lack of memory. The run resumes" in notice.text

    @pytest.mark.full
    def test_on_ray_a_run_that_always_loses_its_process_has_failed(self, runs, tmp_path, monkeypatch):
        pytest.importorskip("ray")
        fault_points.ask_for(monkeypatch, "checkpoint:before-move", 1, "kill")
        (record,), told = done_on_ray(runs[:1], tmp_path / "checkpoints")
        assert record.status == "failed"
        assert "ended early 3 times, the last time by a signal or a crash" in record.error
        assert len([event for event in told if isinstance(event, Notice)]) == 2


def test_an_unknown_executor_is_refused():
    with rejects("executor"):
        make_executor("threads")


class TestASignal:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_is_noted_and_breaks_nothing_off(self, number):
        before = signal.getsignal(number)
        with capture_signals() as noted:
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
        original = executor_module.execute_run

        def signalled(run, around):
            record = original(run, around)
            os.kill(os.getpid(), signal.SIGINT)
            return record

        monkeypatch.setattr(executor_module, "execute_run", signalled)
        records = []
        work = SerialExecutor().execute([run_of(task), run_of(task, seed=1)], checkpoints=tmp_path, report=print)
        with pytest.raises(KeyboardInterrupt):
            collect(work, records)
        assert [record.status for record in records] == ["finished"]


@pytest.fixture
def begin():
    """Start comparisons in their own sessions; kill their remaining processes at the end."""
    processes = []

    def begun(*arguments, **options):
        process = in_a_session(*arguments, **options)
        processes.append(process)
        is_paused = psutil.Process(process.pid).status
        wait_until(lambda: is_paused() == psutil.STATUS_STOPPED, "the first checkpoint", jobs=[process])
        return process

    yield begun
    for process in processes:
        for member in members(process.pid):
            os.kill(member, signal.SIGKILL)
        process.wait()
        process.stderr.close()


def in_a_session(folder, variants, *, num_seeds, steps, num_processes=2):
    """Start a comparison in processes that are all paused at its first checkpoint."""
    command = [sys.executable, "-c", "from lab_runs import main; main()"]
    budget = steps * 4 * lab_runs.LENGTH
    return subprocess.Popen(
        [*command, str(folder), variants, str(num_seeds), str(budget), str(num_processes)],
        env=os.environ | PATHS | {"OMP_NUM_THREADS": "1"} | fault_points.environment("checkpoint:moved", 1, "pause"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finished_here(folder, variants, *, num_seeds, steps, out="out"):
    """The same comparison in this process, from wherever it stands."""
    request = request_of(text_of(folder), variants, num_seeds=num_seeds, budget=steps * 4 * lab_runs.LENGTH)
    return records_of(compare(request, folder / out, executor=SerialExecutor(), on_event=lambda _: None))


def members(session):
    """Processes of a session that still run."""
    found = []
    for process in psutil.process_iter(["status"]):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def wait_for_the_end_of(session):
    def has_ended():
        # Each process pauses all of them at its first checkpoint.
        with suppress(ProcessLookupError):
            os.killpg(session, signal.SIGCONT)
        return not members(session)

    wait_until(has_ended, "the end of all processes of the comparison")


class Asked:
    """An executor that is stopped before it begins; it knows what it was asked for."""

    def require(self, runs):
        pass

    def execute(self, runs, *, checkpoints, report):
        self.runs = {run.id: run for run in runs}
        raise KeyboardInterrupt


class TestAComparisonInProcesses:
    # A process sees for itself that it is alone, and each starts an interpreter.
    @pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.full)])
    def test_killed_at_any_moment_and_run_again_gives_the_same_records(
        self, num_processes, tmp_path, miniatures, begin
    ):
        process = begin(tmp_path, "none,bma", num_seeds=1, steps=40, num_processes=num_processes)
        process.kill()
        # Workers see that they are alone, save where they stand, and end.
        wait_for_the_end_of(process.pid)
        assert list((tmp_path / "out" / CHECKPOINTS).glob("*.safetensors"))
        assert len(records_of(RecordFile(records_path(tmp_path / "out")).read())) < 2
        again = finished_here(tmp_path, "none,bma", num_seeds=1, steps=40)
        assert again == finished_here(tmp_path, "none,bma", num_seeds=1, steps=40, out="new")
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
        request = request_of(text_of(tmp_path), num_seeds=60, budget=200 * 4 * lab_runs.LENGTH)
        process = begin(tmp_path, "none,bma", num_seeds=60, steps=200)
        os.killpg(process.pid, number)
        wait_for_the_end_of(process.pid)
        _, errors = process.communicate()
        assert process.returncode == 130
        assert errors == ""
        folder, asked = tmp_path / "out" / CHECKPOINTS, Asked()
        with pytest.raises(KeyboardInterrupt):
            compare(request, tmp_path / "out", executor=asked, on_event=lambda _: None)
        assert sum(len(pickle.dumps(run)) for run in asked.runs.values()) > 65_536
        stopped = [asked.runs[file.stem] for file in folder.iterdir() if file.stem in asked.runs]
        assert 1 <= len(stopped) <= 2
        records, told = done(SerialExecutor(), stopped, folder)
        assert told[0].step > 1
        assert by_id(records) == by_id(executed(run) for run in stopped)


def test_processes_that_cannot_begin_are_an_error(task, tmp_path, monkeypatch):
    # Its process ends when it reads what it should do, before it imports anything.
    monkeypatch.setattr(processes, "_run_worker", Deadly("worker"))
    told = []
    work = ProcessExecutor(1, retries=1).execute([run_of(task)], checkpoints=tmp_path, report=told.append)
    with pytest.raises(ChildProcessError, match=r"with exit code 7.*executor serial"):
        list(work)
    assert len(told) == 1


def test_a_run_is_retried_as_often_as_allowed_and_then_recorded_as_failed(task):
    told = []
    attempts, run = Attempts(2, told.append), run_of(task)
    assert [attempts.lose(run, "by SIGTERM") for _ in range(2)] == [None, None]
    assert attempts.lose(run_of(task, seed=1), "by SIGTERM") is None
    assert [notice.text.rpartition(": ")[2] for notice in told] == ["retry 1 of 2.", "retry 2 of 2.", "retry 1 of 2."]
    record = attempts.lose(run, "by SIGKILL")
    assert (record.id, record.status) == (run.id, "failed")
    assert "3 times, the last time by SIGKILL" in record.error


def test_the_end_of_a_process_is_described_by_its_signal_or_code():
    ends = [describe_end(code, None) for code in (-15, 143, -11, 7)]
    assert ends == ["by SIGTERM", "by SIGTERM", "by SIGSEGV", "with exit code 7"]


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ((3, 4), "by SIGKILL: since these runs began the kernel has killed a process for lack of memory"),
        ((3, 3), "by SIGKILL, with no sign of a lack of memory"),
        ((None, None), "by SIGKILL, possibly for lack of memory"),
    ],
    ids=["more", "as many", "unknown"],
)
def test_the_end_by_a_kill_says_whether_memory_was_short(counts, words, tmp_path, monkeypatch):
    before, now = counts
    monkeypatch.setattr(machine, "_VMSTAT", tmp_path / "vmstat")
    if now is not None:
        (tmp_path / "vmstat").write_text(f"pgfault 5\noom_kill {now}\n")
    assert describe_end(-9, before) == words
