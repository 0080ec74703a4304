"""docs/architecture.md tells where things live; here it is compared with the tree."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "tidegate"
MAP = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def paths_of_the_tree(text: str) -> set[str]:
    """The files and folders, relative to the package, that the drawn tree names."""
    drawn = text.split("```")[1].splitlines()[2:]
    found, above = set(), []
    for line in drawn:
        indent, names = re.match(r"((?:│   |    )*)[├└]── (.*)", line).groups()
        above = above[: len(indent) // 4]
        words = re.split(r"  +", names)[0].split()
        found |= {"/".join([*above, word.rstrip("/")]) for word in words}
        above.append(words[0].rstrip("/"))
    return found


def rooms() -> set[str]:
    """Every public folder but the single studies and what lies inside a room, and every file at the root."""
    folders = {path.parent.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")} - {"."}
    inner = {"lab/training/executors"}
    files = {path.name for path in SOURCE.glob("*.py") if not path.name.startswith("__")}
    return files | {folder for folder in folders - inner if not folder.startswith("lab/studies/")}


def named_files(text: str) -> set[str]:
    """The paths of Python files that stand in backquotes."""
    return set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))


def exists(file: str) -> bool:
    return (SOURCE / file).is_file() or (ROOT / file).is_file()


def test_the_tree_names_every_room_and_nothing_else():
    assert paths_of_the_tree(MAP) == rooms()


def test_a_missing_room_and_a_stale_one_are_seen():
    assert paths_of_the_tree(MAP.replace("judging/", "guessing/")) - rooms() == {"lab/guessing"}
    assert rooms() - paths_of_the_tree(MAP.replace("judging/", "guessing/")) == {"lab/judging"}


def test_every_file_that_the_map_names_is_there():
    # The table of imports names files by where they are in their room.
    named = named_files(MAP.split("## What a room may import")[0])
    assert len(named) > 20
    assert not [file for file in named if not exists(file)]


def test_a_file_that_is_gone_is_seen():
    assert named_files("see `lab/compare/gone.py`") == {"lab/compare/gone.py"}
    assert not exists("lab/compare/gone.py")
