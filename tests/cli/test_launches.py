"""`tidegate train` in several processes that torchrun starts, and what keeps processes from starting."""

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile

import psutil
import pytest
import torch
from lab_runs import write_text
from torch.distributed import TCPStore
from typer.testing import CliRunner
from waiting import LIMIT_IN_SECONDS, children_of, wait_until

from tidegate.cli import app
from tidegate.lab.training.checkpoint import saved_runs, saved_step
from tidegate.lab.training.outputs import TrainingFolder
from tidegate.lab.training.parallel import joined_processes
from tidegate.torch import load_model

SIZES = ["--d-model=16", "--num-layers=1", "--num-heads=4", "--length=16", "--batch-size=4", "--lr=1e-2"]
TRAIN = ["-m", "tidegate", "train", *SIZES]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
FULL = pytest.mark.full
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@contextmanager
def taken_port():
    """A port on which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def finished(command):
    done = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def wait_for_a_checkpoint(folder, *jobs):
    wait_until(lambda: list(folder.glob("checkpoints/*.safetensors")), "the first checkpoint", jobs=jobs)


def killed_after_a_checkpoint(command, folder):
    """The code and the output of a training of which one process is killed once there is a checkpoint."""
    job = subprocess.Popen(
        [*command, "--save-seconds=0"], env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    wait_for_a_checkpoint(folder, job)
    os.kill(children_of(job.pid)[-1], signal.SIGKILL)
    output, _ = job.communicate()
    return job.returncode, output


@contextmanager
def started(*commands):
    """Processes side by side, which write to files; those that still run at the end are ended."""
    with ExitStack() as stack:
        jobs = []
        for command in commands:
            output = stack.enter_context(TemporaryFile("w+"))
            job = subprocess.Popen(command, env=ONE_THREAD, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(job.wait)
            stack.callback(job.terminate)
            jobs.append((job, output))
        yield jobs


def waits_for_a_signal(process, number):
    """Whether a signal has been sent to a process that is stopped, and so has not seen it."""
    status = Path(f"/proc/{process}/status").read_text().splitlines()
    pending = next(line for line in status if line.startswith("ShdPnd:"))
    return bool(int(pending.split()[1], 16) >> (number - 1) & 1)


def weights(folder):
    return load_model(folder / "model.safetensors").state_dict()


def same(found, expected):
    return found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


# Each launch starts three interpreters, and each of them takes seconds to begin.
@pytest.mark.full
@pytest.mark.timeout(900)
class TestTorchrun:
    @pytest.fixture(scope="class")
    @classmethod
    def undisturbed(cls, text, tmp_path_factory):
        """The folder of a model that `tidegate train --nproc 2` has trained, with MASTER_PORT taken by another."""
        folder = tmp_path_factory.mktemp("nproc")
        with taken_port() as port, pytest.MonkeyPatch.context() as patch:
            patch.setitem(ONE_THREAD, "MASTER_PORT", str(port))
            finished([sys.executable, *TRAIN, "--data", text, "--tokens=19200", "--out", folder, "--nproc=2"])
        return folder

    def test_ends_with_the_model_of_nproc(self, undisturbed, text, tmp_path):
        done = finished([*TORCHRUN, *TRAIN, "--data", text, "--tokens=19200", "--out", tmp_path])
        assert done.stdout.count("Model:") == 1
        assert same(weights(tmp_path), weights(undisturbed))

    def test_goes_on_by_itself_after_a_process_was_killed(self, undisturbed, text, tmp_path):
        command = [*TORCHRUN, "--max-restarts=1", *TRAIN, "--data", text, "--tokens=19200", "--out", tmp_path]
        code, output = killed_after_a_checkpoint(command, tmp_path)
        assert code == 0, output
        assert "exitcode: -9" in output
        assert same(weights(tmp_path), weights(undisturbed))
        assert not (tmp_path / "checkpoints").exists()

    @pytest.mark.skipif(sys.platform != "linux", reason="the signals a process waits for are read from Linux's /proc")
    def test_of_two_machines_goes_on_although_only_one_counts_a_restart(self, undisturbed, text, tmp_path):
        # The store at which the machines meet is here, so that its port is never free for others.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{store.port}", "--rdzv-conf=is_host=0"]
        machine = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", *where]
        training = [*TRAIN, "--data", text, "--tokens=19200", "--out", tmp_path, "--save-seconds=0"]
        command = [*machine, "--max-restarts=1", *training]
        with started(command, command) as jobs:
            wait_for_a_checkpoint(tmp_path, *(job for job, _ in jobs))
            lost, healthy = (children_of(job.pid)[0] for job, _ in jobs)
            # A stopped process cannot fail too: its machine restarts it because the other waits; that is not counted.
            os.kill(healthy, signal.SIGSTOP)
            os.kill(lost, signal.SIGKILL)
            wait_until(lambda: waits_for_a_signal(healthy, signal.SIGTERM), "the signal to the healthy process")
            os.kill(healthy, signal.SIGCONT)
            for job, output in jobs:
                job.wait(timeout=LIMIT_IN_SECONDS)
                output.seek(0)
                assert job.returncode == 0, output.read()
        assert same(weights(tmp_path), weights(undisturbed))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_process_that_is_killed_ends_all_with_one_message_and_a_checkpoint_to_go_on_from(text, tmp_path):
    command = [sys.executable, *TRAIN, "--data", text, "--tokens=19200", "--out", tmp_path]
    code, output = killed_after_a_checkpoint([*command, "--nproc=2"], tmp_path)
    assert code == 1, output
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, output
    assert "ended early, by SIGKILL. The checkpoint of step" in errors[0]
    assert "Traceback" not in output
    # A single process resumes.
    finished(command)
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("start", "going_on"),
    [
        pytest.param([sys.executable, *TRAIN, "--nproc=2"], "resume with: tidegate train", id="nproc"),
        pytest.param([*TORCHRUN, *TRAIN], "resume with: the same torchrun command", id="torchrun", marks=FULL),
    ],
)
@pytest.mark.parametrize(
    "sent", [pytest.param(signal.SIGINT, id="ctrl-c"), pytest.param(signal.SIGTERM, id="terminated", marks=FULL)]
)
def test_processes_that_are_stopped_say_once_how_to_go_on(text, tmp_path, start, going_on, sent):
    command = [*start, "--data", text, "--tokens=1920000", "--save-seconds=0", "--out", tmp_path]
    job = subprocess.Popen(
        command, env=ONE_THREAD, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    wait_for_a_checkpoint(tmp_path, job)
    # A terminal sends Ctrl-C to all processes; a scheduler sends SIGTERM to the parent.
    os.killpg(job.pid, sent) if sent == signal.SIGINT else job.send_signal(sent)
    output, _ = job.communicate()
    assert output.count("Interrupted. ") == output.count(going_on) == 1, output
    if "--nproc=2" in start:
        assert (job.returncode, "Traceback" in output) == (130, False), output
    assert list(tmp_path.glob("checkpoints/*.safetensors"))


@pytest.mark.timeout(300)
def test_processes_whose_launcher_is_killed_save_and_end_and_the_same_command_resumes(text, tmp_path):
    command = [sys.executable, *TRAIN, "--data", text, "--tokens=1920000", "--save-seconds=0", "--out", tmp_path]
    with started([*command, "--nproc=2"]) as [(job, _)]:
        wait_for_a_checkpoint(tmp_path, job)
        workers = children_of(job.pid)
        job.kill()
        wait_until(lambda: not any(map(psutil.pid_exists, workers)), "the end of both workers")
    folder = TrainingFolder(tmp_path)
    (saved,) = saved_runs(folder.checkpoints)
    assert saved_step(folder.checkpoints, saved) > 0
    with folder.records.lock():
        assert folder.records.read() == []


def test_processes_that_meet_at_a_port_in_use_say_so(monkeypatch):
    with taken_port() as port:
        around = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": "0", "WORLD_SIZE": "2"}
        for name, value in around.items():
            monkeypatch.setenv(name, value)
        message = f"cannot meet at 127.0.0.1:{port}, MASTER_ADDR and MASTER_PORT: .*in use.* Choose a port that is free"
        with pytest.raises(ConnectionError, match=message), joined_processes("ddp", "cpu"):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nproc", "8", "--parallel", "tp"], "--nproc must be a divisor of the 4 heads of"),
        (["--nproc", "3"], "--nproc must be a divisor of the rows of a part of a batch, 4 in 1 parts, got 3"),
        (["--parallel", "tp"], "--parallel must be left out for a single process, got 'tp'"),
        (["--max-restarts", "2"], "--max-restarts must be 0 without --nproc"),
    ],
)
def test_more_processes_than_can_share_the_work_are_refused_before_any_starts(text, tmp_path, options, message):
    done = CliRunner().invoke(app, ["train", *SIZES, "--data", str(text), "--out", str(tmp_path / "out"), *options])
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()
