import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"
FILES = sorted(PurePosixPath(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def public_modules() -> list[str]:
    """The dotted names of all modules that have no underscore in front, the root included."""
    return [name for name in map(dotted, FILES) if not re.search(r"\._", name)]


def dotted(file: PurePosixPath) -> str:
    return ".".join(("tidegate", *file.with_suffix("").parts)).removesuffix(".__init__")


def complaints(module: ModuleType, source: str) -> Iterator[str]:
    """What keeps a module's `__all__` from being its public names, and its public names from being described."""
    defined = definitions(module)
    yield from (f"{name} has no docstring" for name, value in defined.items() if not has_own_docstring(value))
    if not module.__doc__:
        yield "has no docstring"
    names = getattr(module, "__all__", None)
    if names is None:
        yield from ["has no __all__"] * says_what_is_public(module)
        return
    if not says_what_is_public(module):
        yield "has an __all__, though its package says what is public"
    exposed = set(defined) | (package_imports(source, module.__name__) if is_package(module) else set())
    yield from (f"{name} is in __all__ twice" for name in sorted({n for n in names if names.count(n) > 1}))
    yield from (f"{name} is in __all__ but private" for name in names if is_private(name))
    yield from (f"{name} is in __all__ but does not exist" for name in names if not hasattr(module, name))
    yield from (f"{name} is public but not in __all__" for name in sorted(exposed.difference(names)))


def definitions(module: ModuleType) -> dict[str, object]:
    """The public functions and classes that are defined in the module itself."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and value.__module__ == module.__name__
    }


def package_imports(source: str, package: str) -> set[str]:
    """The public names that a package's `__init__` imports from its own modules; those of others are its tools."""
    return {
        alias.asname or alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.level or f"{node.module}.".startswith(f"{package}."))
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }


def is_package(module: ModuleType) -> bool:
    return hasattr(module, "__path__")


def says_what_is_public(module: ModuleType) -> bool:
    """A package does, and two modules that their packages leave out: plots need matplotlib, converters few people."""
    return is_package(module) or module.__name__ in ("tidegate.tensors.plots", "tidegate.torch.convert")


def is_private(name: str) -> bool:
    return name.startswith("_") and name != "__version__"


def has_own_docstring(value: object) -> bool:
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    # A dataclass without a docstring is given its signature for one.
    return bool(text) and not text.startswith(f"{value.__name__}(")


@pytest.mark.parametrize("name", public_modules())
def test_the_public_names_are_all(name):
    module = importlib.import_module(name)
    found = list(complaints(module, inspect.getsource(module)))
    assert not found, "\n".join(f"{name}: {complaint}" for complaint in found)


def test_the_walk_finds_the_public_modules_and_no_others():
    modules = public_modules()
    assert {"tidegate", "tidegate.gate", "tidegate.tensors", "tidegate.tensors.random"} <= set(modules)
    assert "tidegate.tensors._checks" not in modules


def made_of(source: str, *, name: str = "tidegate.tensors.plots", package: bool = False) -> tuple[ModuleType, str]:
    source = textwrap.dedent(source)
    module = ModuleType(name)
    if package:
        module.__path__ = []
    exec(compile(source, "made.py", "exec"), vars(module))
    return module, source


GOOD = '''
"""A module."""
import math
from dataclasses import dataclass
__all__ = ["LIMIT", "Thing", "rank2", "rank10"]
LIMIT = 3
Alias = int | str
def rank2(): "What it does."
def rank10(): "What it does."
def _helper(): pass
@dataclass
class Thing: "What it is."
'''

FAULTS = {
    "has no __all__": ("__all__ = [", "_all = ["),
    "rank2 is in __all__ twice": ('"rank2", ', '"rank2", "rank2", '),
    "_helper is in __all__ but private": ('"Thing", ', '"Thing", "_helper", '),
    "LIMIT is in __all__ but does not exist": ("LIMIT = 3", ""),
    "rank2 is public but not in __all__": ('"rank2", ', ""),
    "Thing is public but not in __all__": ('"Thing", ', ""),
    "rank2 has no docstring": ('def rank2(): "What it does."', "def rank2(): pass"),
    "Thing has no docstring": ('class Thing: "What it is."', "class Thing: size: int"),
    "has no docstring": ('"""A module."""', ""),
}


def test_the_checker_lets_a_tidy_module_pass():
    assert list(complaints(*made_of(GOOD))) == []


@pytest.mark.parametrize(("complaint", "change"), FAULTS.items(), ids=FAULTS)
def test_the_checker_names_each_fault(complaint, change):
    before, after = change
    assert before in GOOD
    assert list(complaints(*made_of(GOOD.replace(before, after)))) == [complaint]


def test_the_checker_compares_a_package_with_its_imports():
    tidy = '''
        """A package."""
        from importlib.metadata import version
        from tidegate.gate import Gate
        from tidegate.tensors.einsum import EINSUM_EXAMPLES, dot_product
        __all__ = ["EINSUM_EXAMPLES", "dot_product"]
    '''
    assert list(complaints(*made_of(tidy, name="tidegate.tensors", package=True))) == []
    untidy = tidy.replace('"EINSUM_EXAMPLES", ', "")
    assert list(complaints(*made_of(untidy, name="tidegate.tensors", package=True))) == [
        "EINSUM_EXAMPLES is public but not in __all__"
    ]
    assert list(complaints(*made_of(untidy))) == []


def test_the_checker_wants_no_list_in_a_module_of_a_package():
    (found,) = complaints(*made_of(GOOD, name="tidegate.torch.made"))
    assert found.startswith("has an __all__")
    assert list(complaints(*made_of(GOOD.replace("__all__ = [", "_all = ["), name="tidegate.torch.made"))) == []
