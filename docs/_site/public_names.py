"""The public names of the library, and which of them a page of the reference describes. Nothing is imported for it.

A package's `__all__` says what is public; its imports say which module a name comes from. A page describes names by
lines `.. public:: package module`: all public names of the package that come from the module, in the source's order.
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
"""What is used from the command line alone."""
DIRECTIVE = re.compile(r"^\.\. public:: (\S+) (\S+)$", re.MULTILINE)


class Origin(NamedTuple):
    """Where a name is defined."""

    module: str
    name: str


class PublicName(NamedTuple):
    """A name that users import, by one of the addresses that it has."""

    package: str
    """The package, or the module, whose `__all__` has it."""
    name: str
    origin: Origin

    def __str__(self) -> str:
        return f"{self.package}.{self.name}"


class Definition(NamedTuple):
    """What the source says of a name."""

    line: int
    kind: str
    """What Sphinx calls it: function, class or data."""
    docstring: str
    has_bases: bool = False


@cache
def public_names() -> tuple[PublicName, ...]:
    """The names of every `__all__`, sorted by their addresses."""
    modules = (dotted(file) for file in sorted(SOURCE.rglob("*.py")))
    return tuple(
        PublicName(module, name, origin_of(module, name))
        for module in modules
        if module not in LEFT_OUT
        for name in exported(module)
    )


@cache
def addresses() -> dict[Origin, str]:
    """Under which address the reference describes each thing."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    return {name.origin: str(name) for page in pages for name in described_by(page)}


def described_by(page: str) -> Iterator[PublicName]:
    """The names that the text of a page of the reference describes."""
    for package, module in DIRECTIVE.findall(page):
        yield from names_from(package, module)


def names_from(package: str, module: str) -> list[PublicName]:
    """The public names of a package that are defined in a module or below it, in the order of the source.

    Those that a package above exports as well belong there.
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
    """What a module imports from others of tidegate, by the name that it gives it."""
    return {
        alias.asname or alias.name: Origin(node.module, alias.name)
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tidegate")
        for alias in node.names
    }


@cache
def definition_of(origin: Origin) -> Definition:
    """Where and as what a module defines a name, with the docstring that stands below a constant."""
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
    """Return what a module's `__all__` lists, or, where that is derived, what it imports as `name as name`."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            if isinstance(node.value, ast.List):
                return ast.literal_eval(node.value)
            imports = (line.names for line in parsed(module).body if isinstance(line, ast.ImportFrom))
            return [alias.name for names in imports for alias in names if alias.name == alias.asname]
    return []


@cache
def parsed(module: str) -> ast.Module:
    """The syntax tree of a module."""
    path = SOURCE.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def dotted(file: Path) -> str:
    """The dotted name of a module's file."""
    return ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
