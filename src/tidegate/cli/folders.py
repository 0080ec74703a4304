"""Folders that a command is to write to."""

from __future__ import annotations

from pathlib import Path


def require_apart(folder: Path, data: str | None) -> None:
    """Refuse a folder inside that of the data: what is written there would be read as data the next time."""
    if data is None or not Path(data).is_dir():
        return
    if folder.resolve().is_relative_to(Path(data).resolve()):
        raise ValueError(f"--out {folder} lies in the folder of --data {data}. Choose a place outside of it.")


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written to before any work is done; nothing is left behind."""
    nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    if not nearest.is_dir():
        raise ValueError(f"--out {folder} cannot be a folder: {nearest} is a file. Choose another place.")
    probe = nearest / ".tidegate-probe"
    try:
        probe.touch()
        probe.unlink()
    except OSError as problem:
        raise ValueError(f"--out {folder} cannot be written to: {problem.strerror}. Choose another place.") from None


def require_no_comparison(folder: Path) -> None:
    """Refuse the folder of a comparison, whose page would be written over."""
    from tidegate.lab.training.records import records_path

    if records_path(folder).exists():
        raise ValueError(f"--out {folder} holds a comparison, whose page would be lost. Choose another place.")
