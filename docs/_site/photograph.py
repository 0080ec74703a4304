"""Take a screenshot of a part of a page: `python docs/_site/photograph.py explore.html '#gate' gate.png`."""

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from browser import launch_chromium  # noqa: E402


def photograph(page: Path, part: str, picture: Path, *, width: int, height: int, edge: int) -> None:
    """Open the page from disk with the network off, and write the visible part as a PNG.

    Args:
        page: The HTML file.
        part: A CSS selector.
        picture: The PNG file.
        width: Width of the window.
        height: Maximum height of the picture.
        edge: Margin around the part, in pixels.
    """
    with launch_chromium() as browser:
        context = browser.new_context(viewport={"width": width, "height": 2 * height}, device_scale_factor=1)
        context.set_offline(True)
        context.set_default_timeout(240_000)
        opened = context.new_page()
        opened.goto(page.resolve().as_uri())
        opened.wait_for_load_state("networkidle")
        box = opened.locator(part).first.bounding_box()
        if box is None:
            raise ValueError(f"{part} of {page} is not visible. Select another part.")
        clip = {
            "x": box["x"] - edge,
            "y": box["y"] - edge,
            "width": box["width"] + 2 * edge,
            "height": min(height, box["height"] + 2 * edge),
        }
        opened.screenshot(path=picture, clip=clip, full_page=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("part", help="a CSS selector")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1000, help="width of the window")
    parser.add_argument("--height", type=int, default=900, help="maximum height of the picture")
    parser.add_argument("--edge", type=int, default=20, help="margin around the part, in pixels")
    asked = parser.parse_args()
    photograph(asked.page, asked.part, asked.picture, width=asked.width, height=asked.height, edge=asked.edge)
