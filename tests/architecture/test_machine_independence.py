"""Tests depend on nothing that a machine may lack: no long sleeps, no fixed ports, no hard-coded temporary paths."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
LONGEST_SLEEP = 1
TEMPORARY = re.compile(r"/tmp(/|$)")
PORT = re.compile(r"(localhost|127\.0\.0\.1|\[::1\]):[1-9]\d*")


def dependences(source: str) -> list[str]:
    """Sleeps of more than a second or of unknown length, paths in /tmp and fixed ports, each as `line: what`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name == "sleep" and not _is_short(node.args[0]):
                found.append(f"{node.lineno}: sleep({ast.unparse(node.args[0])})")
            if name in {"bind", "create_server", "create_connection"} and re.search(r", [1-9]\d*\)", ast.unparse(node)):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if TEMPORARY.match(node.value):
                found.append(f"{node.lineno}: {node.value!r}")
            found += [f"{node.lineno}: port {match[0]}" for match in PORT.finditer(node.value)]
    return found


def _is_short(duration: ast.expr) -> bool:
    return isinstance(duration, ast.Constant) and duration.value <= LONGEST_SLEEP


def test_no_test_depends_on_the_machine():
    files = [path for path in TESTS.rglob("*.py") if path != Path(__file__)]
    assert len(files) > 100
    found = {path.relative_to(TESTS): dependences(path.read_text(encoding="utf-8")) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "time.sleep(1.5)",
        "sleep(random())",
        "Path('/tmp/ray')",
        "tempfile.mkdtemp(dir='/tmp')",
        "server.bind(('127.0.0.1', 29500))",
        "address = 'localhost:6379'",
    ],
)
def test_a_dependence_on_the_machine_is_seen(line):
    assert len(dependences(line)) == 1


@pytest.mark.parametrize("line", ["time.sleep(0.05)", "bind(('127.0.0.1', 0))", "at = f'127.0.0.1:{port}'", "'/tmpl'"])
def test_other_lines_pass(line):
    assert dependences(line) == []
