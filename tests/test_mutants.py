"""Conformance sees every planted fault: a suite that passes everything proves nothing."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import FAULTS


@pytest.mark.skipif(importlib.util.find_spec("triton") is None or not hasattr(os, "fork"), reason="needs triton and fork")
@pytest.mark.parametrize("part", [0, 1])
def test_every_planted_fault_is_caught(part):
    names = [fault.name for fault in FAULTS[part::2]]
    assert len(FAULTS) >= 25 and len(names) == len(set(names))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.mutants", *names]
    result = subprocess.run(command, env=environment, cwd=Path(__file__).parent.parent, capture_output=True, text=True)
    verdicts = dict(
        line.split(maxsplit=1)[::-1]
        for line in result.stdout.splitlines()
        if line.startswith(("caught", "SURVIVED", "broken"))
    )
    assert verdicts == dict.fromkeys(names, "caught"), result.stdout + result.stderr[-2000:]
    assert result.returncode == 0
