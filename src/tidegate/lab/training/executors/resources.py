"""What a run needs of a cluster, and how many runs fit on it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tidegate._validation import InputError, require_size
from tidegate.lab.training.parallel import require_parallel
from tidegate.lab.training.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResources:
    """What is reserved for each run."""

    cpus: int | None = None
    """Cores, and threads; None takes the run's threads for each process."""
    gpus: int = 0
    """Devices of type `cuda`: none, or one per process."""
    processes: int = 1
    """Processes among which the rows of a batch are divided."""

    def __post_init__(self) -> None:
        require_size("processes", self.processes)
        require_size("cpus", self.cpus, optional=True)
        if self.cpus is not None and self.cpus % self.processes:
            raise InputError("cpus", expected=f"a multiple of processes={self.processes}", got=self.cpus)
        if isinstance(self.gpus, bool) or self.gpus not in (0, self.processes):
            raise InputError("gpus", expected=f"0 or processes={self.processes}", got=self.gpus)

    @property
    def threads(self) -> int | None:
        """Threads per process; None takes the run's."""
        return None if self.cpus is None else self.cpus // self.processes

    def of_process(self, run: Run) -> dict[str, int]:
        """Return what each process of a run needs, by Ray's names."""
        return {"CPU": self.threads or run.training.num_threads, "GPU": self.gpus // self.processes}

    def require(self, run: Run) -> None:
        """Raise InputError for a run that cannot use these resources."""
        device = run.training.device
        if self.gpus and device != "cuda":
            hint = "They are for the device cuda, of which Ray chooses one."
            raise InputError("gpus", expected=f"0 for runs on {device}", got=self.gpus, hint=hint)
        if device.startswith("cuda") and not self.gpus:
            hint = "Ray hides devices from others."
            raise InputError("gpus", expected=f"at least 1 for runs on {device}", got=0, hint=hint)
        if self.processes > 1:
            require_parallel(run, "ddp", self.processes)

    def num_places(self, run: Run, machines: Iterable[Mapping[str, float]]) -> int:
        """Return how many runs like this one fit at once: one process on one machine, several on any.

        Args:
            run: The run.
            machines: The total resources of each machine, by Ray's names.
        """
        needs = {name: count for name, count in self.of_process(run).items() if count}
        places = [min(int(machine.get(name, 0) // count) for name, count in needs.items()) for machine in machines]
        return sum(places) // self.processes

    def describe(self, run: Run) -> str:
        """Describe what a run needs."""
        needs = describe({name: self.processes * count for name, count in self.of_process(run).items()})
        return f"{needs}, in {self.processes} processes" if self.processes > 1 else needs


def describe(counts: Mapping[str, float]) -> str:
    """Describe cores and GPUs, given by Ray's names."""
    cpus, gpus = counts.get("CPU", 0), counts.get("GPU", 0)
    devices = f" and {gpus:g} GPU{'' if gpus == 1 else 's'}" if gpus else ""
    return f"{cpus:g} core{'' if cpus == 1 else 's'}{devices}"
