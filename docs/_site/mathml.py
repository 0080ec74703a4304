"""Write formulas as MathML while the site is built: a browser needs no script and no network to show them."""

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
    """Write a formula of a line."""
    translator.body.append(to_mathml(node, block=False))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """Write a displayed formula, which scrolls where a page is too narrow for it."""
    translator.body.append(translator.starttag(node, "div", CLASS="math"))
    translator.body.append(f"{to_mathml(node, block=True)}</div>\n")
    raise nodes.SkipNode


def to_mathml(node: nodes.Element, *, block: bool) -> str:
    """Translate LaTeX; what cannot be translated is a warning, and so fails the build."""
    try:
        # Fonts have the prime, which the translator leaves an apostrophe, raised already.
        return tex2mathml(spell_out(node.astext()), as_block=block).replace("<mo>'</mo>", "<mo>′</mo>")
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return ""
