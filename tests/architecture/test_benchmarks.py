"""Benchmarks are too long to run here; at least everything that they import of the library must be there."""

import ast
import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def missing_names(source: str) -> list[str]:
    """The names of the library that a source imports and that do not exist."""
    found = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tidegate"
        for alias in node.names
    ]
    return [f"{module}.{name}" for module, name in found if not _exists(module, name)]


def _exists(module: str, name: str) -> bool:
    try:
        package = importlib.import_module(module)
        return hasattr(package, name) or bool(importlib.import_module(f"{module}.{name}"))
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("file", sorted(BENCHMARKS.glob("*.py")), ids=lambda file: file.name)
def test_what_a_benchmark_imports_of_the_library_is_there(file):
    assert missing_names(file.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_seen():
    source = "from tidegate.gate import Gate, Lock\nfrom tidegate.lab.gone import run"
    assert missing_names(source) == ["tidegate.gate.Lock", "tidegate.lab.gone.run"]
