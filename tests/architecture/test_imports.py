"""Every import obeys the two tables of docs/architecture.md, which are the only copy of the rules."""

import ast
import re
import sys
from collections import namedtuple
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tidegate"
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ITEM = re.compile(r"(?P<name>.+?)(?P<lazily> lazily)?(?: in (?P<files>`.+`))?")


Allowed = namedtuple("Allowed", "name is_own lazily files")
"""What a row admits: a room or a file of the package as a path, or another library's name."""


def cells(first: str) -> list[list[str]]:
    """The rows of the table whose first heading is `first`."""
    lines = MAP[MAP.index(f"\n| {first} |") + 1 :].split("\n\n")[0].splitlines()[2:]
    return [re.split(r" *\| *", line.strip()[1:-1].strip(" ")) for line in lines]


GROUPS = {row[0]: row[1] for row in cells("group")}


def allowed(cell: str) -> list[Allowed]:
    """What one cell admits, groups replaced by their members."""
    found = []
    for item in filter(None, cell.split(", ")):
        name, lazily, files = ITEM.fullmatch(item).groups()
        if name in GROUPS:
            found += allowed(GROUPS[name])
        else:
            within = tuple(re.findall("`(.+?)`", files or ""))
            is_own = name.startswith("`") or name == "everything"
            found.append(Allowed(name.strip("`").replace("everything", "*"), is_own, bool(lazily), within))
    return found


ROOMS, RULES = {}, {}
for names, _about, *columns in cells("room"):
    first, *others = re.findall("`(.+?)`", names)
    ROOMS |= dict.fromkeys((first, *others), first)
    RULES[first] = [rule for column in columns for rule in allowed(column)]


def room_of(path: str) -> str | None:
    """The row of a path below the package's root: the longest that matches."""
    parts = path.removesuffix(".py").split("/")
    return next((ROOMS[row] for n in range(len(parts), 0, -1) if (row := "/".join(parts[:n])) in ROOMS), None)


def imports(node: ast.AST, package: list[str], *, lazily: bool = False):
    """Each import as (absolute dotted name, whether it is lazy); `from a import b` is `a.b`, as b may be a module."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, lazily) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = package[: len(package) + 1 - node.level] if node.level else []
        yield from ((".".join([*base, *filter(None, [node.module]), alias.name]), lazily) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
        name = getattr(node.args[0], "value", None)
        yield name if isinstance(name, str) else "a computed name", lazily
    for field, child in ast.iter_fields(node):
        is_type_check = isinstance(node, ast.If) and field == "body" and "TYPE_CHECKING" in ast.unparse(node.test)
        inside = lazily or is_type_check or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for part in child if isinstance(child, list) else [child]:
            if isinstance(part, ast.AST):
                yield from imports(part, package, lazily=inside)


def violations(file: str, source: str) -> list[str]:
    """The imports of a file, named from the package's root, that its row does not allow."""
    room = room_of(file)
    package = ["tidegate", *file.split("/")[:-1]]
    found = []
    for name, lazily in imports(ast.parse(source), package):
        top, _, rest = name.partition(".")
        is_own = top == "tidegate"
        path = rest.replace(".", "/")
        target = room_of(path)
        rules = [
            rule
            for rule in RULES[room]
            if rule.is_own == is_own
            and (lazily or not rule.lazily)
            and (not rule.files or any(fnmatchcase(file, f"{room}/{pattern}") for pattern in rule.files))
        ]
        if is_own:
            fits = target == room or any(
                fnmatchcase(target or "", rule.name)
                if "*" in rule.name
                else f"{path}/".startswith(f"{rule.name}/") and target == room_of(rule.name)
                for rule in rules
            )
        else:
            fits = top in sys.stdlib_module_names or any(top == rule.name for rule in rules)
        if not fits:
            found.append(name)
    return found


def test_a_file_imports_only_what_its_row_allows():
    found = {file: violations(file, (SOURCE / file).read_text(encoding="utf-8")) for file in FILES}
    assert {file: names for file, names in found.items() if names} == {}


def test_every_folder_and_every_file_at_the_root_has_a_row_and_every_row_is_one():
    folders = {file.rpartition("/")[0] or file.removesuffix(".py") for file in FILES}
    assert folders == set(ROOMS)


@pytest.mark.parametrize(
    ("file", "source", "name"),
    [
        ("gate.py", "import math\nimport numpy", "numpy"),
        ("sizes.py", "from . import gate", "tidegate.gate"),
        ("__init__.py", "from .tensors import softmax", "tidegate.tensors.softmax"),
        ("tensors/softmax.py", "def f():\n    import torch", "torch"),
        ("tensors/autodiff.py", "import jax", "jax"),
        ("tensors/random.py", "if TYPE_CHECKING:\n    import jax\nelse:\n    import torch", "torch"),
        ("tensors/softmax.py", "import importlib\nimportlib.import_module('ray')", "ray"),
        ("tensors/gating.py", "from tidegate import Gate", "tidegate.Gate"),
        ("flax/gate.py", "from tidegate import torch", "tidegate.torch"),
        ("torch/gate.py", "from tidegate.torch.retrofit import x", "tidegate.torch.retrofit.x"),
        ("lab/judging/judge.py", "from tidegate.lab.training import run", "tidegate.lab.training.run"),
        ("lab/compare/run.py", "from tidegate.report import html", "tidegate.report.html"),
        ("lab/studies/depth/run.py", "from tidegate.lab.studies.sinks import run", "tidegate.lab.studies.sinks.run"),
        ("cli/app.py", "from tidegate.lab.compare import run", "tidegate.lab.compare.run"),
    ],
)
def test_the_walk_can_fail(file, source, name):
    assert violations(file, source) == [name]
