"""Sphinx's settings: the site that `make docs` builds from the Markdown files of this repository.

The source folder is the root of the repository, so that every link leads where it leads on GitHub.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs" / "_site")]

project = "Tidegate"
author = "The Tidegate authors"
copyright = author  # noqa: A001
root_doc = "README"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "docs/*.md", "docs/**/*.md"]
exclude_patterns = ["docs/_site", "docs/records"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "contents", "explore_page", "mathml", "reference", "search_words"]
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
myst_dmath_double_inline = True
suppress_warnings = ["myst.strikethrough"]

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_type_aliases = {"Array": "Array", "GateLike": "GateLike", "Namespace": "Namespace"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
python_display_short_literal_types = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = "Tidegate"
html_static_path = ["_site/static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
# Summaries are fetched, which a browser refuses on file://.
html_show_search_summary = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6a8a", "color-brand-content": "#0b6a8a"},
    "dark_css_variables": {"color-brand-primary": "#6cc3de", "color-brand-content": "#6cc3de"},
}
