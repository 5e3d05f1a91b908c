"""Scripts that run kernels in a process of their own: in Triton's interpreter, which an import chooses, or on a GPU."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def says_the_same(script: str, device: str) -> None:
    """Run `script` with `{device}` in it replaced; it ends with "the same" if it finds what it looks for."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0", "PYTHONWARNINGS": "ignore"}
    run = [sys.executable, "-c", script.replace("{device}", device)]
    result = subprocess.run(run, env=environment, capture_output=True, text=True)
    assert result.stdout.strip() == "the same", result.stderr[-2000:]
