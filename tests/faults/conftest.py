import faults
import pytest


@pytest.fixture
def effort(request):
    """How often to try: `effort(few, many)` is `few` in `make test` and `many` in `make torture`."""
    return lambda few, many: many if request.config.getoption("--torture") else few


@pytest.fixture
def report(request):
    """Report the outcome of the test's fault to the file of `--outcomes`; without it, the page must have its row."""
    fault, path = faults.fault_of(request.node), outcomes_path(request.config)

    def note_outcome(*, tried, outcome):
        assert tried > 0, "a fault that was never tried shows nothing"
        if path is None:
            assert fault in faults.rows_of(faults.PAGE.read_text(encoding="utf-8")), "run make torture"
        else:
            faults.note(path, faults.Outcome(fault, tried, outcome))

    return note_outcome


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Report the fault of a skipped test as not tried, so that the page keeps its row."""
    result = yield
    if result.skipped and outcomes_path(item.config) and item.get_closest_marker("fault"):
        faults.note(outcomes_path(item.config), faults.Outcome(faults.fault_of(item), 0, str(result.longrepr[2])))
    return result


def outcomes_path(config):
    """Return the path of `--outcomes`, relative to the starting directory; None without it."""
    given = config.getoption("--outcomes")
    return None if given is None else config.invocation_params.dir / given
