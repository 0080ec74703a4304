import faults
import pytest


@pytest.fixture
def effort(request):
    """How often to try: `effort(few, many)` is `few` in `make test` and `many` in `make torture`."""
    return lambda few, many: many if request.config.getoption("--torture") else few


@pytest.fixture
def report(request):
    """Report what came of a fault: to the file of `--outcomes`; without it, the page must have a row for the fault."""
    given = request.config.getoption("--outcomes")
    # A test may be in another folder by the time that it reports.
    path = None if given is None else request.config.invocation_params.dir / given

    def reported(fault, *, tried, outcome):
        assert tried > 0, "a fault that was never tried shows nothing"
        if path is None:
            assert fault in faults.faults_of(faults.PAGE.read_text(encoding="utf-8")), "run make torture"
        else:
            faults.note(path, faults.Outcome(fault, tried, outcome))

    return reported
