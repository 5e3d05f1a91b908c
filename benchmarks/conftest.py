"""Benchmarks: every record says what it ran on and against which floor; nothing is timed before it is checked."""

import datetime
import platform
import subprocess

import pytest
import torch


def pytest_benchmark_update_machine_info(config, machine_info):
    """Versions and commit beside the machine."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine_info.update(
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        commit=commit,
        date=datetime.date.today().isoformat(),
        python=platform.python_version(),
    )
    machine_info.pop("node", None)


@pytest.fixture(scope="session")
def matrix() -> torch.Tensor:
    """Float32 `[4096, 4096]`, normal."""
    return torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
