"""Settings of a process that change what others compute: a kernel has to leave them as it found them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from mxref.registry import flushes_subnormals


def _determinism() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_determinism(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)  # None: without a mode that every call goes through


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "flush_denormal": (flushes_subnormals, torch.set_flush_denormal),
    "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default_device": (torch.get_default_device, _set_default_device),
    "num_threads": (torch.get_num_threads, torch.set_num_threads),
    "grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "deterministic_algorithms": (_determinism, _set_determinism),
    "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
}  # by the names that torch has for them: how each is read and set


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
    except KeyboardInterrupt:
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
            changed.append(f"{name} from {before[name]} to {now}")
    return changed
