"""Render formulas as MathML at build time, so that the browser needs no script and no network."""

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from latex import spell_out
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.writers.html5 import HTML5Translator

logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx, as the renderer `mathml`."""
    app.add_html_math_renderer("mathml", inline_renderers=(visit_inline, None), block_renderers=(visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """Write an inline formula."""
    translator.body.append(to_mathml(node, block=False))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula; it scrolls if the page is too narrow."""
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(f"{to_mathml(node, block=True)}</div>\n")
    raise nodes.SkipNode


def to_mathml(node: nodes.Element, *, block: bool) -> str:
    """Translate LaTeX; a formula that cannot be translated is a warning, which fails the build."""
    try:
        # The translator leaves an apostrophe; fonts have a raised prime.
        return tex2mathml(spell_out(node.astext()), as_block=block).replace("<mo>'</mo>", "<mo>′</mo>")
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return ""
