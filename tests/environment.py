"""What a record of a level-2 run says about where it ran."""

import datetime
import importlib.metadata
import platform
import subprocess

import torch


def environment(device: str, commit: str | None, *packages: str) -> dict[str, str | None]:
    """Device name, versions, date and commit (`commit`, or what git says about the working tree)."""
    if commit is None:
        asked = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
        commit = asked.stdout.strip() or None
    return {
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.processor() or "cpu",
        "torch": torch.__version__,
        **{package: importlib.metadata.version(package) for package in packages},
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "commit": commit,
    }
