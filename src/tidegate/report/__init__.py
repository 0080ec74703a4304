"""Pages: panels in; a self-contained HTML file, the same page in Markdown, and its data in JSON out."""

from tidegate.report.html import html_page, write_page
from tidegate.report.markdown import markdown_page

__all__ = ["html_page", "markdown_page", "write_page"]
