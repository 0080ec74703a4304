"""Pages: panels in, one HTML file that needs no network out, with a Markdown and a JSON twin beside it."""

from tidegate.report.html import html_page, write_page
from tidegate.report.markdown import markdown_page

__all__ = ["html_page", "markdown_page", "write_page"]
