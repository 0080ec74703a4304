"""`tidegate explore`: an interactive page."""

from __future__ import annotations

import webbrowser
from dataclasses import dataclass
from pathlib import Path

from tidegate._files import write_content
from tidegate._validation import InputError
from tidegate.cli.console import new_console, print_json
from tidegate.cli.options import JsonOutput, option, verb


@dataclass(frozen=True, kw_only=True)
class ExploreOptions(JsonOutput):
    """Options of `tidegate explore`."""

    out: Path = option(Path("explore.html"), "File to write.")
    open_page: bool = option(True, "Open the page in the browser.", "--open/--no-open")


@verb
def explore(options: ExploreOptions) -> None:
    """Write an interactive page about gated attention and open it: one file, readable offline.

    Move a query among keys and watch scores, Gibbs weights, a sink and two gates. Rotate a surface whose curvature
    grows with the gate. Build a gate and see its spelling, parameters, cost and code.

    Example: tidegate explore --out notes/explore.html --no-open
    """
    from tidegate.explore import explore_page

    out = options.out
    if out.is_dir():
        raise InputError("out", expected="a file name", got=out, hint=f"Use {out / 'explore.html'}.")
    out.parent.mkdir(parents=True, exist_ok=True)
    write_content(out, explore_page().encode())
    opened = options.open_page and webbrowser.open(out.resolve().as_uri())
    if options.as_json:
        print_json({"page": str(out), "opened": bool(opened)})
        return
    console = new_console()
    console.print(f"Page: {out}", soft_wrap=True)
    if options.open_page and not opened:
        console.print("No browser found; open the file by hand.", soft_wrap=True)
