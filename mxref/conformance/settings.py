"""Settings of a process that change what others compute: a kernel has to leave them as it found them."""

import contextlib
import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch

from mxref.commands import Terminated
from mxref.registry import flushes_subnormals


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None: without a mode that every call goes through


def _autocast() -> tuple:
    devices = tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    return *devices, torch.is_autocast_cache_enabled()


def _set_autocast(value: tuple) -> None:
    *devices, cached = value
    for device, enabled, dtype in devices:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    torch.set_autocast_cache_enabled(cached)


def _mkldnn() -> tuple[bool, bool]:
    return torch._C._get_mkldnn_enabled(), torch._C._get_mkldnn_deterministic()


def _set_mkldnn(value: tuple[bool, bool]) -> None:
    torch._C._set_mkldnn_enabled(value[0])
    torch._C._set_mkldnn_deterministic(value[1])


OF_COMPILERS = ("TORCHINDUCTOR_", "_TORCHINDUCTOR_", "TRITON_")  # in such variables torch's note where their files lie


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(OF_COMPILERS)}


def _set_environment(value: dict[str, str]) -> None:
    for name in _environment().keys() - value.keys():
        del os.environ[name]
    os.environ.update(value)


def _set_rng_state(value: bytes) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(value), dtype=torch.uint8))


def _numpy_state() -> tuple:
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest


def _set_numpy_state(value: tuple) -> None:
    name, keys, *rest = value
    numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


_c = ctypes.CDLL("ucrtbase" if sys.platform == "win32" else None)  # which holds C's <fenv.h>

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "flush_denormal": (flushes_subnormals, torch.set_flush_denormal),
    "rounding_mode": (_c.fegetround, _c.fesetround),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default_device": (torch.get_default_device, _set_default_device),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic_algorithms": (_determinism, _set_determinism),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "autocast": (_autocast, _set_autocast),
    "mkldnn": (_mkldnn, _set_mkldnn),
    "rng_state": (lambda: torch.get_rng_state().numpy().tobytes(), _set_rng_state),
    "random.getstate": (random.getstate, random.setstate),
    "numpy.random.get_state": (_numpy_state, _set_numpy_state),
    "numpy.seterr": (numpy.geterr, lambda value: numpy.seterr(**value)),
    "environment": (_environment, _set_environment),
    "working_directory": (os.getcwd, os.chdir),
}  # by the names that torch, or else Python, has for them: how each is read and set
SHOWN = 60  # characters of a value; of what is longer there is the name alone


class SettingsChanged(RuntimeError):
    """A kernel left a setting of the process other than it found it."""


@contextlib.contextmanager
def settings_kept(who: str = "it") -> Iterator[None]:
    """Put `SETTINGS` back at the end. Raises SettingsChanged, which names `who`, if one had been changed, in place of what
    was raised within."""
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    interrupted = False
    try:
        yield
    except (KeyboardInterrupt, Terminated):
        interrupted = True
        raise
    finally:
        changed = _put_back(before)
        if changed and not interrupted:
            raise SettingsChanged(
                f"{who} changed settings of the process, which a kernel has to leave: {', '.join(changed)}"
            )


def _put_back(before: dict[str, Any]) -> list[str]:
    """Set what differs from `before`, and say what did."""
    changed = []
    for name, (read, put) in SETTINGS.items():
        now = read()
        if now != before[name]:
            put(before[name])
            changed.append(_change(name, before[name], now))
    return changed


def _change(name: str, before: Any, now: Any) -> str:
    if name == "environment":
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        return f"{name}: {', '.join(changed)}"
    return name if len(str(before)) > SHOWN else f"{name} from {before} to {now}"
