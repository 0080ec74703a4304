import pytest
import torch


@pytest.fixture
def fresh_compiler():
    """Compile as if nothing had been compiled before: a second size of what another test compiled would be symbolic."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
