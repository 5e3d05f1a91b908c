"""Shared fixtures: the public cases and the compact golden archives."""

import json
from pathlib import Path

import numpy as np
import pytest

DATA = Path(__file__).parent / "data"


def load_cases() -> dict:
    """The public cases by id."""
    return {case["id"]: case for case in json.loads((DATA / "cases.json").read_text())}


@pytest.fixture(scope="session")
def cases() -> dict:
    return load_cases()


@pytest.fixture
def rng(request) -> np.random.Generator:
    """A generator seeded by the test's own name: the same numbers whatever runs before."""
    return np.random.default_rng(list(request.node.nodeid.encode()))
