import faults
import pytest


@pytest.fixture
def effort(request):
    """How often to try: `effort(few, many)` is `few` in `make test` and `many` in `make torture`."""
    return lambda few, many: many if request.config.getoption("--torture") else few


@pytest.fixture
def report(request):
    """Report what came of a fault, for the table of docs/reliability.md."""
    path = request.config.getoption("--outcomes")

    def reported(fault, *, tried, outcome):
        assert tried > 0, "a fault that was never tried shows nothing"
        if path is not None:
            faults.note(path, faults.Outcome(fault, tried, outcome))

    return reported
