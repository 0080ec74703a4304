"""Several processes that train one model together, by PyTorch's own engines."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.fsdp import fully_shard
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tidegate._validation import InputError
from tidegate.lab.tasks.task import Batch
from tidegate.lab.training.model import build_model
from tidegate.lab.training.run import Run
from tidegate.torch.parallel import shard_heads, tensor_parallel_plan
from tidegate.torch.weights import Model

LAUNCHED = "TIDEGATE_LAUNCHED"
"""Environment variable with the process id of `launch`, in the processes that it starts."""
Parallel: TypeAlias = Literal["ddp", "fsdp", "tp"]
"""Replicated weights; weights sharded and gathered block by block; heads sharded."""
_SECONDS_BETWEEN_ANSWERS = 0.05
_SECONDS_BETWEEN_LOOKS = 0.5
_SECONDS_TO_SAVE = 600
"""Time limit for a step and a checkpoint after the launcher is gone."""


@final
class Processes:
    """One of the processes that train a model together. All must call the same methods in the same order."""

    def __init__(self, kind: Parallel, device: str) -> None:
        self.kind: Parallel = kind
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._mesh = init_device_mesh(torch.device(device).type, (self.size,))
        self._computing: Any = None

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and reports."""
        return self.rank == 0

    @property
    def shares_rows(self) -> bool:
        """Whether each process has its own rows of a batch; otherwise each has the whole batch and its own heads."""
        return self.kind != "tp"

    def distribute(self, model: Model) -> nn.Module:
        """Distribute a model, in place; return the module that computes its logits."""
        if self.kind == "ddp":
            self._computing = DistributedDataParallel(model)
            return self._computing
        if self.kind == "tp":
            shard_heads(model, self._mesh)
        else:
            for block in model.stack.blocks:
                fully_shard(block, mesh=self._mesh)
            fully_shard(model, mesh=self._mesh)
        self._computing = model
        return model

    def own_rows(self, batch: Batch) -> Batch:
        """Return the rows of a batch that this process computes."""
        if not self.shares_rows:
            return batch
        return Batch(batch.inputs.tensor_split(self.size)[self.rank], batch.targets.tensor_split(self.size)[self.rank])

    @property
    def gradient_weight(self) -> int:
        """Factor of a process's part of a loss, since gradients of rows are averaged instead of summed."""
        return self.size if self.shares_rows else 1

    def exchange_gradients(self, wanted: bool) -> None:
        """Set whether the next backward pass synchronizes gradients; only that of the last micro-batch must."""
        if self.kind == "ddp":
            self._computing.require_backward_grad_sync = wanted
        elif self.kind == "fsdp":
            self._computing.set_requires_gradient_sync(wanted)

    def mean(self, figure: Tensor) -> Tensor:
        """Return the mean of a number over all processes."""
        total = figure.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def any(self, *flags: bool) -> tuple[bool, ...]:
        """Return for each flag whether it is set in any process."""
        raised = torch.tensor(flags, dtype=torch.int32, device=self._mesh.device_type)
        dist.all_reduce(raised, op=dist.ReduceOp.MAX)
        return tuple(map(bool, raised.tolist()))

    def wait(self) -> None:
        """Wait until all processes call this."""
        dist.barrier()

    def close(self) -> None:
        """Release the process group, with the model that was distributed.

        PyTorch's reducer would otherwise be the last to hold the group and free it with the GIL held, while a thread of
        the group waits for the GIL: a deadlock (pytorch/pytorch#56297).
        """
        if self.kind == "ddp" and self._computing is not None:
            self._computing.reducer = self._computing.logger = self._computing.process_group = None
        del self._computing, self._mesh


def whole_tensor(value: Tensor) -> Tensor:
    """Return a full tensor; if it is sharded, all processes must call this."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


def copy_whole(whole: Tensor, target: Tensor) -> None:
    """Copy a full tensor into another; if that is sharded, only this process's shard."""
    if isinstance(target, DTensor):
        part = distribute_tensor(whole.to(target.device), target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(whole)


@contextmanager
def joined_processes(kind: Parallel, device: str) -> Generator[Processes]:
    """Join the processes that torchrun or `tidegate train --nproc` started together with this one."""
    if (launcher := os.environ.get(LAUNCHED)) is not None:
        threading.Thread(target=_end_with_launcher, args=(int(launcher),), daemon=True).start()
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        store, rank, size = next(iter(rendezvous("env://")))
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _own_part(store, rank, size)
        backend = "nccl" if place.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
    except RuntimeError as problem:
        meeting = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise ConnectionError(
            f"the processes of this training cannot meet at {meeting}, MASTER_ADDR and MASTER_PORT: "
            f"{str(problem).splitlines()[0]} Nothing has started. Choose a port that is free."
        ) from problem
    processes = Processes(kind, device)
    try:
        yield processes
    finally:
        processes.close()
        dist.destroy_process_group()


def _end_with_launcher(launcher: int) -> None:
    """End this process by SIGTERM, after which it saves a checkpoint, when its launcher is gone, as after SIGKILL.

    Otherwise it would keep its lock, and the same command could not resume.
    """
    while os.getppid() == launcher:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    os.kill(os.getpid(), signal.SIGTERM)
    # If another process ended without saving, a collective operation with it blocks.
    time.sleep(_SECONDS_TO_SAVE)
    os.kill(os.getpid(), signal.SIGKILL)


def _own_part(store: Any, rank: int, size: int) -> Any:
    """Return a part of torchrun's store that only the processes of this start use.

    torchrun keeps its store when it restarts processes, with the addresses of lost ones, and each machine counts its
    own restarts. So the first process chooses a name, and sends it to each process that asks with its own random key.
    """
    own = secrets.token_hex(8)
    if rank:
        store.set(f"call/{rank}", own)
        name = store.get(f"answer/{own}").decode()
        store.add(f"{name}/met", 1)
    else:
        name, calls = own, [f"call/{other}" for other in range(1, size)]
        end = time.monotonic() + store.timeout.total_seconds()
        while store.add(f"{name}/met", 0) < len(calls):
            if time.monotonic() > end:
                raise RuntimeError(f"Not all of the other {len(calls)} processes came in {store.timeout}.")
            made = [call.decode() for call in store.multi_get(calls)]
            store.multi_set([f"answer/{call}" for call in made], [name] * len(made))
            time.sleep(_SECONDS_BETWEEN_ANSWERS)
    return dist.PrefixStore(name, store)  # pyright: ignore[reportPrivateImportUsage]


def world_size() -> int:
    """Return the number of processes that torchrun has started together with this one; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_lost_peer(error: str) -> bool:
    """Return whether the traceback of one of several processes reports only the loss of another one."""
    return "gloo/transport" in error or "torch.distributed.Dist" in error


def require_parallel(run: Run, kind: Parallel, num_processes: int) -> None:
    """Raise InputError for a run that this number of processes cannot train together."""
    training = run.training
    if kind != "tp" and training.batch_size % (num_processes * training.accumulate):
        expected = f"a divisor of the rows of a part of a batch, {training.batch_size} in {training.accumulate} parts"
        raise InputError("nproc", expected=expected, got=num_processes)
    if training.optimizer == "muon" and kind != "ddp":
        hint = "Or use the optimizer adamw."
        raise InputError("parallel", expected="'ddp' for Muon, which needs full matrices", got=kind, hint=hint)
    if run.model.gates.read_other_sequences and kind != "tp":
        expected = f"'tp' with the gate {run.model.gate}, which reads the next sequence of a batch"
        raise InputError("parallel", expected=expected, got=kind)
    if kind == "tp":
        with torch.device("meta"):
            tensor_parallel_plan(build_model(run.model), num_processes)
        if training.compile or run.model.attention_dropout:
            raise InputError("parallel", expected="'ddp' with compile or attention_dropout", got=kind)


class ProcessLost(RuntimeError):  # noqa: N818, it names the event
    """One of the processes ended before the training did; the others were stopped."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
        """The exit code of the process; negative for a signal."""


def launch(arguments: list[str], *, num_processes: int, max_restarts: int = 0) -> None:
    """Run `python -m tidegate ARGUMENTS` in several processes that train together, and wait for their end.

    After one was lost, all are restarted up to `max_restarts` times; they resume from their last checkpoint.

    Raises:
        ProcessLost: One of them ended early, and the others were stopped.
        KeyboardInterrupt: After Ctrl-C or SIGTERM, when all have saved a checkpoint and ended.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        # Port 0 is any free port.
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=max_restarts,
        monitor_interval=0.2,
    )
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        # They log a page for each lost process.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[LAUNCHED] = str(os.getpid())
    try:
        elastic_launch(config, sys.executable)("-m", "tidegate", *arguments)
    except SignalException:
        raise KeyboardInterrupt from None
    except ChildFailedError as problem:
        rank, failure = problem.get_first_failure()
        how = f"by {failure.signal_name()}" if failure.exitcode < 0 else f"with code {failure.exitcode}"
        raise ProcessLost(f"Process {rank} of {num_processes} ended early, {how}.", failure.exitcode) from None
    finally:
        del os.environ[LAUNCHED]
