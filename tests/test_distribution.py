"""The wheel contains all data files and works in a new environment."""

import fnmatch
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tidegate"
BUILT = {".pyc"}
"""Suffixes of files that Python generates."""


def test_every_file_of_the_package_that_is_no_source_is_declared_as_its_data():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["tidegate"]
    paths = [path for path in SOURCE.rglob("*") if path.is_file() and path.suffix not in {".py", *BUILT}]
    files = [path.relative_to(SOURCE).as_posix() for path in paths]
    assert files
    assert [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)] == []


def run(*command, cwd=ROOT):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_wheel_compares_in_an_environment_that_has_nothing_else(tmp_path):
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path, "setuptools"]
    if subprocess.run(fetch, capture_output=True, check=False).returncode:
        pytest.skip("pip reaches no package index")
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert list((tmp_path / "dist").glob("*.tar.gz"))
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    binaries, constraints = tmp_path / "venv" / "bin", ROOT / "constraints.txt"
    install = (binaries / "python", "-m", "pip", "install", "--quiet", "--constraint", constraints)
    run(*install, "torch")
    run(*install, f"{wheel}[lab]")
    notes = tmp_path / "notes.txt"
    notes.write_text((ROOT / "README.md").read_text(encoding="utf-8") * 4, encoding="utf-8")
    options = ("--data", notes, "--variants", "none,bma", "--no-placebos", "--seeds", 1, "--tokens", 8192)
    out = run(binaries / "tidegate", "compare", *options, "--out", tmp_path / "out", "--quiet", cwd=tmp_path)
    assert "bma" in out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert "bma" in page
    assert (tmp_path / "out" / "results.json").stat().st_size > 0
