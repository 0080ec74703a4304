"""Map search queries to the page that answers them.

Sphinx's search sorts pages of equal score by title. An index entry that equals the query comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

WORDS = {
    "docs/start/which-gate": (
        "which gate should I use",
        "which gate",
        "choose a gate",
        "recommended gate",
        "best gate",
    ),
    "docs/start/ten-minutes": ("install", "quickstart", "tutorial"),
    "docs/names-elsewhere": ("qwen3-next", "gpt-oss", "x-transformers"),
    "docs/coming-from": ("multiheadattention", "migrate"),
    "docs/gates": (
        "g1",
        "g1-head",
        "g2",
        "g3",
        "g4",
        "g5",
        "bma",
        "bma-query",
        "vga",
        "sink",
        "off-by-one",
        "twosigmoid",
    ),
    "docs/how-to/add-a-task": ("custom task", "custom dataset", "own dataset", "own data"),
    "docs/how-to/add-a-gate": ("custom gate", "own gate"),
    "docs/cluster": ("gpu", "gpus", "several gpus", "ray", "slurm", "torchrun"),
}
"""The queries of each page. They are not in the pages because GitHub would show an index directive as code."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", add_words)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def add_words(_app: Sphinx, page: str, source: list[str]) -> None:
    """Insert a page's queries below its title, as main entries of the index."""
    if page in WORDS:
        title, rest = source[0].split("\n", 1)
        entries = ", ".join(f"! {word}" for word in WORDS[page])
        source[0] = f"{title}\n\n```{{index}} {entries}\n```\n{rest}"
