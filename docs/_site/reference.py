"""The API reference: the directive `public`, which describes the names of a module, and links to them from pages."""

import ast
import inspect
import re
from typing import Any

from docstrings import Link, to_rst
from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList
from public_names import PublicName, addresses, definition_of, names_from, parsed, public_names
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform
from sphinx.util import logging
from sphinx.util.nodes import nested_parse_with_titles

logger = logging.getLogger(__name__)

LEARN = "docs/learn/"
"""Pages on which a word such as `entropy` means the function of that name in `tidegate.tensors`."""


class Public(Directive):
    """`.. public:: package module`: the module's docstring, then all names that the package exports from it."""

    required_arguments = 2

    def run(self) -> list[nodes.Node]:
        """Pass the names to autodoc one by one."""
        package, module = self.arguments
        lines = to_rst(ast.get_docstring(parsed(module)) or "", links_from(package))
        for name in names_from(package, module):
            lines += described(name)
        section = nodes.section()
        section.document = self.state.document
        nested_parse_with_titles(self.state, StringList(lines, source=f"{module}:docstring"), section)
        return section.children


def described(name: PublicName) -> list[str]:
    """Return the lines that describe one name."""
    definition = definition_of(name.origin)
    if definition.kind == "data":
        docstring = to_rst(definition.docstring, links_from(name.package))
        return [f".. py:data:: {name}", "", *(f"   {line}" for line in [*docstring, *other_addresses(name)]), ""]
    options = ["   :members:"] if definition.kind == "class" else []
    options += ["   :show-inheritance:"] if definition.has_bases else []
    return [f".. auto{definition.kind}:: {name}", *options, ""]


def other_addresses(name: PublicName) -> list[str]:
    """Return a line with the other packages that export the same object, except those inside its own."""
    same = (other for other in public_names() if other.origin == name.origin)
    others = [f"``{other}``" for other in same if not f"{other.package}.".startswith(f"{name.package}.")]
    return ["", f"Also {', '.join(others)}.", ""] if others else []


def links_from(package: str) -> Link:
    """Return a function that finds names as written in a package: its own first, then those of other packages."""
    by_name: dict[str, str] = {}
    for name in sorted(public_names(), key=lambda name: (name.package != package, name.package.count("."))):
        if name.origin in addresses():
            by_name.setdefault(name.name, addresses()[name.origin])

    def link(code: str) -> str | None:
        first, dot, rest = code.partition(".")
        return f"{by_name[first]}{dot}{rest}" if first in by_name and rest.isidentifier() >= bool(dot) else None

    return link


class LinkNames(SphinxTransform):
    """Link code in the text of a page to the reference if it is an unmistakable public name."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Wrap the names; Sphinx resolves them once all pages are read."""
        page = self.env.docname
        link = links_from("tidegate.tensors") if page.startswith(LEARN) else unmistakable
        for code in list(self.document.findall(nodes.literal)):
            inside = isinstance(code.parent, nodes.title | nodes.reference | addnodes.pending_xref)
            address = None if inside or code.get("classes") else link(code.astext())
            if address is not None:
                reference = addnodes.pending_xref(
                    "", refdoc=page, refdomain="py", reftype="obj", reftarget=address, refexplicit=True, refwarn=False
                )
                code.replace_self(reference)
                reference += code


def unmistakable(code: str) -> str | None:
    """Return the address of a name that only one object has and that is not a common word."""
    common = code.islower() and "_" not in code
    things = {name.origin for name in public_names() if name.name == code}
    return addresses().get(things.pop()) if len(things) == 1 and not common else None


def translate_docstring(app: Sphinx, kind: str, address: str, value: object, options: Any, lines: list[str]) -> None:
    """Translate the Markdown of a docstring for autodoc, in place; a class also gets its constructor's."""
    names = {str(name): name for name in public_names()}
    package = address.rsplit(".", 1)[0] if address in names else address.rsplit(".", 2)[0]
    constructor = vars(value).get("__init__") if inspect.isclass(value) else None
    texts = ("\n".join(lines), getattr(constructor, "__doc__", None) or "")
    lines[:] = [line for text in texts for line in to_rst(inspect.cleandoc(text), links_from(package))]
    if address in names:
        lines += other_addresses(names[address])


def plain_signature(
    app: Sphinx, kind: str, address: str, value: object, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """Shorten modules and functions that are default values, and aliases in a union, to their names."""
    return _by_name(signature), _by_name(result)


def _by_name(text: str | None) -> str | None:
    objects = r"<module '([\w.]+)' from '[^']*'>|<function ([\w.]+)[^>]*>|TypeAliasForwardRef\('(\w+)'\)"
    return text and re.sub(objects, r"\1\2\3", text)


def name_what_is_missing(app: Sphinx) -> None:
    """Warn of public names that no page describes, which fails the build."""
    for name in public_names():
        if name.origin not in addresses():
            logger.warning("%s is public, and no page of docs/reference describes %s", name, name.origin.module)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_directive("public", Public)
    app.add_transform(LinkNames)
    app.connect("builder-inited", name_what_is_missing)
    app.connect("autodoc-process-docstring", translate_docstring)
    app.connect("autodoc-process-signature", plain_signature)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
