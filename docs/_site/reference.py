"""The directive `public`, by which a page of the reference describes the public names that come from one module."""

import ast
import inspect
import re
from typing import Any

from docstrings import Link, to_rst
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from public_names import PublicName, definition_of, names_from, parsed, public_names
from sphinx.application import Sphinx
from sphinx.util.nodes import nested_parse_with_titles


class Public(Directive):
    """`.. public:: package module`: what the module is about, then all names that the package takes from it."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Hand the names to autodoc, one by one."""
        package, module = self.arguments
        lines = to_rst(ast.get_docstring(parsed(module)) or "", links_from(package))
        for name in names_from(package, module):
            lines += described(name)
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=f"{module}:docstring"), section)
        return section.children


def described(name: PublicName) -> list[str]:
    """The lines that describe one name."""
    definition = definition_of(name.origin)
    if definition.kind == "data":
        docstring = to_rst(definition.docstring, links_from(name.package))
        return [f".. py:data:: {name}", "", *(f"   {line}" for line in [*docstring, *other_addresses(name)]), ""]
    options = ["   :members:"] if definition.kind == "class" else []
    options += ["   :show-inheritance:"] if definition.has_bases else []
    return [f".. auto{definition.kind}:: {name}", *options, ""]


def other_addresses(name: PublicName) -> list[str]:
    """A line that names the other packages that export the same thing; those inside its own need no mention."""
    same = (other for other in public_names() if other.origin == name.origin)
    others = [f"``{other}``" for other in same if not f"{other.package}.".startswith(f"{name.package}.")]
    return ["", f"Also {', '.join(others)}.", ""] if others else []


def links_from(package: str) -> Link:
    """Find names as they are written in a package: its own first, then those of the others."""
    by_name: dict[str, str] = {}
    for name in sorted(public_names(), key=lambda name: (name.package != package, name.package.count("."))):
        by_name.setdefault(name.name, str(name))

    def link(code: str) -> str | None:
        first, dot, rest = code.partition(".")
        return f"{by_name[first]}{dot}{rest}" if first in by_name and rest.isidentifier() >= bool(dot) else None

    return link


def translate_docstring(app: Sphinx, kind: str, address: str, value: object, options: Any, lines: list[str]) -> None:
    """Turn the Markdown of a docstring into what autodoc expects, in place."""
    names = {str(name): name for name in public_names()}
    package = address.rsplit(".", 1)[0] if address in names else address.rsplit(".", 2)[0]
    lines[:] = to_rst(inspect.cleandoc("\n".join(lines)), links_from(package))
    if address in names:
        lines += other_addresses(names[address])


def name_modules(
    app: Sphinx, kind: str, address: str, value: object, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Write a module that is a default value by its name, and not with the path of its file."""
    shown = None if signature is None else re.sub(r"<module '([\w.]+)' from '[^']*'>", r"\1", signature)
    return shown, result


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("public", Public)
    app.connect("autodoc-process-docstring", translate_docstring)
    app.connect("autodoc-process-signature", name_modules)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
