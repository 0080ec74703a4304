import lab_runs
import pytest
import torch

from tidegate.lab.compare.run import compare
from tidegate.lab.training.executors.executor import SerialExecutor


@pytest.fixture(autouse=True)
def few_threads():
    """A run sets the number of threads; the tests after it have what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def task(tmp_path):
    return lab_runs.text_of(tmp_path)


@pytest.fixture
def miniatures(monkeypatch):
    """The preset `tiny` is a miniature, and costs are made up; gives the function that sets them."""
    return lab_runs.patch_miniatures(monkeypatch)


@pytest.fixture(scope="session")
def in_miniature():
    """The function that makes the preset `tiny` a miniature by a patch, for fixtures that several tests share."""
    return lab_runs.patch_miniatures


@pytest.fixture(scope="session")
def compared(tmp_path_factory):
    """The lines of a miniature comparison of three variants under three seeds."""
    folder = tmp_path_factory.mktemp("compared")
    with pytest.MonkeyPatch.context() as patch:
        lab_runs.patch_miniatures(patch, layers=True)
        request = lab_runs.request_of(lab_runs.text_of(folder), "none,g1,bma-query", command="tidegate compare")
        lines = compare(request, folder / "out", executor=SerialExecutor(), on_event=lambda _: None)
    return tuple(lines)
