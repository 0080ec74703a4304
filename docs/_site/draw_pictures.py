"""Redraw the pictures of the pages in docs/learn: run each page's code, and keep the figures that it saves.

`python docs/_site/draw_pictures.py` redraws all pages; pass the names of pages to redraw only those.
"""

import os
import shutil
import sys
import tempfile
from contextlib import chdir
from pathlib import Path

import matplotlib as mpl

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures" / "learn"
sys.path.insert(0, str(ROOT / "tests" / "support"))

from documents import run  # noqa: E402

# The same page gives the same file.
os.environ["SOURCE_DATE_EPOCH"] = "0"
mpl.rcParams.update({"svg.hashsalt": "tidegate", "svg.fonttype": "path"})


def draw(page: Path) -> list[Path]:
    """Run one page in its own folder, and move its pictures to the documents."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        run(page)
        PICTURES.mkdir(parents=True, exist_ok=True)
        return [Path(shutil.move(picture, PICTURES / picture.name)) for picture in Path(folder).glob("*.svg")]


if __name__ == "__main__":
    chosen = [Path(name).resolve() for name in sys.argv[1:]] or sorted((ROOT / "docs" / "learn").glob("*.md"))
    for page in chosen:
        print(page.name, *(picture.name for picture in draw(page)))
