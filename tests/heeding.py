"""Processes that tests send signals to."""

import signal
import subprocess


def start(command: list[str], **options) -> subprocess.Popen:
    """A process that heeds SIGINT and SIGHUP even where this one does not, as under nohup or in the background."""
    names = [name for name in ("SIGINT", "SIGHUP") if hasattr(signal, name)]
    ignored = [number for number in (getattr(signal, name) for name in names) if signal.getsignal(number) == signal.SIG_IGN]
    try:
        for number in ignored:
            signal.signal(number, signal.SIG_DFL)
        return subprocess.Popen(command, **options)
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
