"""Make the tests independent of the environment variables, home folder and temporary folder they are started with."""

import atexit
import os
import shutil
import tempfile

FOREIGN = (
    # Colours and width of what the command line prints.
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "FORCE_COLOR",
    "GITHUB_ACTIONS",
    "LINES",
    "NO_COLOR",
    "PY_COLORS",
    "TERMINAL_WIDTH",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
    "_TYPER_FORCE_DISABLE_TERMINAL",
    # Left by a cluster job: processes that a run would wait for.
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "WORLD_SIZE",
    "RAY_ADDRESS",
    "RAY_TMPDIR",
    # Caches outside the home folder.
    "HF_HOME",
    "MPLCONFIGDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
)
LONGEST_TEMPORARY_PATH = 20
"""A Unix socket's path has at most 107 bytes, of which Ray's session folders take more than 80."""


def isolate() -> None:
    """Drop foreign variables from this process and its children, and give them a new home and a short TMPDIR."""
    for name in FOREIGN:
        os.environ.pop(name, None)
    os.environ["COLUMNS"] = "80"
    if len(tempfile.gettempdir()) > LONGEST_TEMPORARY_PATH:
        os.environ["TMPDIR"] = _new_folder(next(filter(_is_writable, ("/var/tmp", "/dev/shm")), None))
        tempfile.tempdir = None
    os.environ["HOME"] = _new_folder()


def _is_writable(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _new_folder(parent: str | None = None) -> str:
    folder = tempfile.mkdtemp(prefix="tg", dir=parent)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
