"""Find the public names of the library, and the pages of the reference that describe them, without importing anything.

A package's `__all__` lists its public names; its imports give the module of each. A line `.. public:: package module`
of a page describes all public names of the package that come from the module, in the order of the source.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
REFERENCE = ROOT / "docs" / "reference"
LEFT_OUT = ("tidegate.cli",)
"""Packages that are only used from the command line."""
DIRECTIVE = re.compile(r"^\.\. public:: (\S+) (\S+)$", re.MULTILINE)


class Origin(NamedTuple):
    """Where a name is defined."""

    module: str
    name: str


class PublicName(NamedTuple):
    """A name that users import, by one of its addresses."""

    package: str
    """The package, or the module, whose `__all__` has it."""
    name: str
    origin: Origin

    def __str__(self) -> str:
        return f"{self.package}.{self.name}"


class Definition(NamedTuple):
    """The definition of a name in the source."""

    line: int
    kind: str
    """Sphinx's word: function, class or data."""
    docstring: str
    has_bases: bool = False


@cache
def public_names() -> tuple[PublicName, ...]:
    """Return the names of every `__all__`, sorted by address."""
    modules = (dotted(file) for file in sorted(SOURCE.rglob("*.py")))
    return tuple(
        PublicName(module, name, origin_of(module, name))
        for module in modules
        if module not in LEFT_OUT
        for name in exported(module)
    )


@cache
def addresses() -> dict[Origin, str]:
    """Return the address under which the reference describes each object."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    return {name.origin: str(name) for page in pages for name in described_by(page)}


def described_by(page: str) -> Iterator[PublicName]:
    """Yield the names that a page of the reference describes."""
    for package, module in DIRECTIVE.findall(page):
        yield from names_from(package, module)


def names_from(package: str, module: str) -> list[PublicName]:
    """Return the public names of a package that are defined in a module or below it, in the order of the source.

    Names that an outer package also exports belong to that package.
    """
    above = {name.origin for name in public_names() if package.startswith(f"{name.package}.")}
    found = [
        name
        for name in public_names()
        if name.package == package and name.origin not in above and f"{name.origin.module}.".startswith(f"{module}.")
    ]
    return sorted(found, key=lambda name: (name.origin.module, definition_of(name.origin).line))


def origin_of(module: str, name: str) -> Origin:
    """Follow the imports of tidegate from module to module."""
    imported = imports_of(module).get(name)
    return Origin(module, name) if imported is None else origin_of(*imported)


@cache
def imports_of(module: str) -> dict[str, Origin]:
    """Return the imports of a module from other modules of tidegate, by local name."""
    return {
        alias.asname or alias.name: Origin(node.module, alias.name)
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tidegate")
        for alias in node.names
    }


@cache
def definition_of(origin: Origin) -> Definition:
    """Return line, kind and docstring of a name; the docstring of a constant follows it."""
    body = parsed(origin.module).body
    for place, node in enumerate(body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == origin.name:
            kind = "class" if isinstance(node, ast.ClassDef) else "function"
            return Definition(node.lineno, kind, ast.get_docstring(node) or "", bool(getattr(node, "bases", ())))
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == origin.name for target in targets):
            below = ast.Module(body=body[place + 1 :], type_ignores=[])
            return Definition(node.lineno, "data", ast.get_docstring(below) or "")
    raise LookupError(f"{origin.module} does not define {origin.name}.")


def exported(module: str) -> list[str]:
    """Return the names in a module's `__all__`, or, if that is computed, those imported as `name as name`."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            if isinstance(node.value, ast.List):
                return ast.literal_eval(node.value)
            imports = (line.names for line in parsed(module).body if isinstance(line, ast.ImportFrom))
            return [alias.name for names in imports for alias in names if alias.name == alias.asname]
    return []


@cache
def parsed(module: str) -> ast.Module:
    """Return the syntax tree of a module."""
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def dotted(file: Path) -> str:
    """Return the dotted name of a module's file."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
