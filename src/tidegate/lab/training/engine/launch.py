"""Start the processes that train one model together on this machine, as torchrun does."""

from __future__ import annotations

import logging
import os
import secrets
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

LAUNCHED = "TIDEGATE_LAUNCHED"
"""Set in the environment of processes that were started here: whoever started them says what ended them."""


class ProcessLost(RuntimeError):  # noqa: N818, it tells of a process that is gone
    """One of the processes ended before the training did; the others were ended too."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code
        """With which the process ended; negative for a signal."""


def launch(arguments: list[str], *, num_processes: int, max_restarts: int = 0) -> None:
    """Run `python -m tidegate ARGUMENTS` in several processes that know one another, and wait for their end.

    max_restarts : times that all are started anew after one was lost; they go on from their last checkpoint

    Raises:
        ProcessLost: after one of them has ended early, and all others were ended.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, when all of them have saved what they had and ended.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_processes,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        # A port that is free.
        rdzv_endpoint="127.0.0.1:0",
        max_restarts=max_restarts,
        monitor_interval=0.2,
    )
    for name in ("torch.distributed.elastic", "torch.distributed.run"):
        # They log a page for each loss.
        logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ[LAUNCHED] = "1"
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
