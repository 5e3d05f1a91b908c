"""The example package of the documentation, installed into a fresh virtual environment."""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "docs" / "example_kernel"


def test_the_example_package_offers_a_kernel_that_passes(tmp_path):
    def run(*command, **environment):
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, **environment})

    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = str(tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin") / "python")
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    root = Path(__file__).parent.parent  # the dependencies, and mxref itself, from where the tests have them
    (Path(site) / "dependencies.pth").write_text(f"{root}\n{sysconfig.get_path('purelib')}\n")
    copy = tmp_path / "example"
    copy.mkdir()
    for name in ("pyproject.toml", "example_kernel.py"):
        (copy / name).write_text((EXAMPLE / name).read_text())
    installed = run(python, "-m", "pip", "install", "--no-deps", "-q", str(copy))
    assert installed.returncode == 0, installed.stderr

    listed = json.loads(run(python, "-m", "mxref", "kernels", "--json", "-").stdout)
    assert [row["op"] for row in listed if row["backend"] == "example"] == ["relu2"]
    verified = json.loads(run(python, "-m", "mxref", "verify", "example", "--json", "-").stdout)
    assert (verified["passed"], verified["failed"], verified["refused"]) == (10, 0, 2)
    assert [row["reasons"] for row in verified["rows"] if row["refused"]] == [["x is not contiguous"]]
    script = (
        "import torch, mxref\n"
        "with mxref.use('example'):\n"
        "    print(mxref.explain_dispatch('relu2', torch.ones(2)).backend)\n"
        "    print(mxref.explain_dispatch('relu2', torch.ones(2, 2).T))"
    )
    told = run(python, "-c", script)
    assert told.stdout.splitlines() == ["example", "example: x is not contiguous", "relu2: reference"], told.stderr
    told = run(
        python, "-c", "import torch, mxref; mxref.functions.relu2(torch.ones(2))", MXREF_BACKENDS="example", MXREF_CHECK="1"
    )
    assert told.returncode == 0, told.stderr
