import pytest
import torch


@pytest.fixture
def fresh_compiler():
    """Reset the compiler: after another test, a second size of the same code would be symbolic."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
