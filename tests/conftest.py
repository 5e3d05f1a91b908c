"""What all tests share: a thread each, and a generator of numbers."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: the cores are shared by processes that test

import numpy as np  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name: the same numbers whatever runs before."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
