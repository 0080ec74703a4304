"""Every combination of the options that try several settings makes a page."""

from itertools import product

import pytest
from lab_lines import page_of, replanned, with_seeds, with_trials

from tidegate.lab.compare.answer import answer
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.records import Grid

RATES = {"one rate": (1.0,), "two rates": (0.5, 1.0), "three rates": (0.5, 1.0, 2.0)}
STARTS = {"one init": (0.02,), "two inits": (0.02, "torch"), "three inits": ("torch", 0.05, "fan-in")}
BEST_START = {
    "all choose the first init": lambda starts, variant, block: starts[0],
    "all choose the last init": lambda starts, variant, block: starts[-1],
    "seeds and variants choose other inits": lambda starts, variant, block: starts[
        (block + len(variant)) % len(starts)
    ],
}


@pytest.mark.parametrize("best", BEST_START.values(), ids=BEST_START)
@pytest.mark.parametrize("mode", ["tune", "tune stepwise", "map"])
@pytest.mark.parametrize("diverges", [False, True], ids=["all finish", "one diverges"])
def test_every_grid_makes_a_page(compared, mode, best, diverges):
    for rates, starts, num_seeds in product(RATES.values(), STARTS.values(), (1, 3)):
        search = "stepwise" if mode == "tune stepwise" else "grid"
        grid = Grid(rates=rates, starts=starts, search=search, chooses=mode != "map")

        def loss(variant, block, rate, start, grid=grid):
            chosen = best(grid.starts, variant, block)
            if grid.search == "stepwise" and rate != grid.middle and start != chosen:
                return "not tried"
            if diverges and (variant, block, rate) == ("g1", 0, max(grid.rates)):
                return None
            return 2.0 + 0.1 * block + 0.5 * (start != chosen) + 0.01 * abs(rate - 1)

        lines = replanned(with_trials(with_seeds(compared, num_seeds), grid, loss), grid=grid)
        titles = [section.title for section in page_of(lines).sections]
        assert len(titles) == len(set(titles)) > 5
        assert answer(summarise(lines))
