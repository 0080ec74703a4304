"""Check the pages of the built site: every link leads to an existing file and anchor, and pages load offline.

`python docs/_site/check_links.py site` prints broken links page by page, and then exits with 1. External links are not
followed; external pictures, styles and scripts are errors.
"""

import sys
from collections.abc import Callable, Iterator
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LINKS = {"a": "href", "link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src", "object": "data"}


class Page(HTMLParser):
    """The links and anchors of a page."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links: list[tuple[str, str]] = []
        self.anchors: set[str] = {"", "top"}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect one element."""
        values = dict(attrs)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        if values.get(LINKS.get(tag, "")) is not None:
            self.links.append((tag, values[LINKS[tag]]))


def complaints(site: Path) -> Iterator[str]:
    """Yield the broken links of all pages, as `page: link: fault`."""
    read = cache(Page)
    for file in sorted(site.rglob("*.html")):
        for tag, link in read(file).links:
            fault = fault_of(tag, link, file, read)
            if fault:
                yield f"{file.relative_to(site)}: {link}: {fault}"


def fault_of(tag: str, link: str, file: Path, read: Callable[[Path], Page]) -> str | None:
    """Return why a link of a page is broken; None if it works."""
    parts = urlsplit(link)
    if parts.scheme in ("data", "mailto"):
        return None
    if parts.scheme or parts.netloc:
        return None if tag == "a" else "is fetched from the network"
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return "no such file"
    if target.suffix == ".html" and unquote(parts.fragment) not in read(target).anchors:
        return "no such anchor"
    return None


def main(site: Path) -> int:
    """Print the broken links, and return the exit code."""
    found = list(complaints(site))
    pages = len(list(site.rglob("*.html")))
    if not pages:
        found = [f"{site}: there are no pages"]
    print("\n".join(found) or f"{pages} pages, no broken link")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
