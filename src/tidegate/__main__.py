"""`python -m tidegate`, and the command `tidegate`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or name the missing package."""
    try:
        from tidegate.cli import app
    except ModuleNotFoundError as problem:
        sys.exit(f"error: {problem}. The command line needs the extra lab: pip install 'tidegate[lab]'")
    app()


if __name__ == "__main__":
    main()
