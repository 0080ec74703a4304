"""Checks of output folders."""

from __future__ import annotations

from pathlib import Path

from tidegate._validation import InputError


def require_output_folder(folder: Path, data: str | None = None) -> None:
    """Raise InputError if the folder is not writable or lies inside the data folder; create nothing.

    Output inside the data folder would be read as data by the next command.
    """
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        raise InputError("out", expected="a folder", got=folder, hint=f"{nearest} is a file.")
    probe = nearest / ".tidegate-probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise InputError("out", expected="writable", got=folder, hint=f"{problem.strerror}.") from None
    if data is not None and Path(data).is_dir() and folder.resolve().is_relative_to(Path(data).resolve()):
        raise InputError("out", expected=f"outside the data folder {data}", got=folder)


def require_page_folder(folder: Path, data: str | None = None) -> None:
    """Raise InputError if `require_output_folder` does, or if a comparison's page would be overwritten."""
    from tidegate.lab.training.records import records_path

    require_output_folder(folder, data)
    if records_path(folder).exists():
        raise InputError("out", expected="a folder without a comparison", got=folder, hint="Choose another one.")
