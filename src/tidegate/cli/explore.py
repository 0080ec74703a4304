"""`tidegate explore`: a page to play with."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from tidegate._files import write_content
from tidegate.cli.console import new_console, print_json
from tidegate.cli.options import JsonOption


def explore(
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("explore.html"),
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in your browser.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Write a page to play with, and open it: one file that needs no network.

    Move a query among keys and watch scores, Gibbs weights, a sink and two gates. Turn a surface that bends as a gate
    grows stronger, coloured by its curvature. Draw a gate, and see its spelling, parameters, cost and code.

    The page computes every number itself; the tests hold them against the library.

    Example: tidegate explore --out notes/explore.html --no-open
    """
    from tidegate.explore import explore_page

    if out.is_dir():
        raise ValueError(f"--out {out} is a folder. Name the file to write, such as {out / 'explore.html'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_content(out, explore_page().encode())
    opened = open_page and webbrowser.open(out.resolve().as_uri())
    if as_json:
        print_json({"page": str(out), "opened": bool(opened)})
        return
    console = new_console()
    console.print(f"The page: {out}", soft_wrap=True)
    if open_page and not opened:
        console.print("No browser was found here. Open the file in one.", soft_wrap=True)
