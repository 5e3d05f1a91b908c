"""Benchmarks: every record says what it ran on and against which floor; nothing is timed before it is checked."""

import datetime
import importlib.metadata
import platform
import subprocess

import pytest
import torch

PEERS = ("torchao", "compressed-tensors", "amd-quark")


def pytest_benchmark_update_machine_info(config, machine_info):
    """Processor, versions, commit and date, and nothing else."""
    cpu = machine_info["cpu"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    machine_info.clear()
    machine_info.update(
        device=cpu.get("brand_raw", platform.machine()),
        cores=cpu.get("count"),
        threads=torch.get_num_threads(),
        system=platform.system(),
        python=platform.python_version(),
        torch=torch.__version__,
        **{name: version for name in PEERS if (version := _version(name))},
        commit=commit,
        date=datetime.date.today().isoformat(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@pytest.fixture(scope="session")
def matrix() -> torch.Tensor:
    """Float32 `[4096, 4096]`, normal."""
    return torch.randn(4096, 4096, generator=torch.Generator().manual_seed(0))
