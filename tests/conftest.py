"""The fixture that all tests share."""

import numpy as np
import pytest


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name: the same numbers whatever runs before."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
