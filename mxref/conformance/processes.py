"""Groups of cases shared among processes, which may die: then the case that was running is known, and the others go on."""

import contextlib
import math
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait

import torch

from mxref.conformance.report import Outcome

Group = tuple[str, str, str, bool, int]
_FINISHED, _BEGUN = None, "begun"  # what a process sends when a group is done, and before its first
TIMEOUT = 1800.0  # seconds for a case
LONGEST_WAIT = 3600.0  # seconds; then it is waited again
DEATHS = 3  # of one group's processes; then the rest of it is not run


def run_shared(
    groups: Mapping[Group, int],
    workers: int,
    run: Callable[[Group, int], Iterator[Outcome]],
    died: Callable[[Group, int, str], Outcome],
    timeout: float = TIMEOUT,
) -> Iterator[tuple[Group, list[Outcome]]]:
    """The outcomes of each group, as `workers` processes finish them. `groups`: how many cases each has.

    `run(group, first)` gives the outcomes from the case of number `first` on; it and its groups are pickled. A process
    that dies is replaced: `died(group, number, why)` is the outcome of the case that it ran; after `DEATHS` of them in a
    group, of the rest of it too. One whose case takes longer than `timeout` seconds is killed. What `run` raises is raised.
    RuntimeError if a process dies before it begins.
    """
    waiting, busy = deque(groups), {}
    with contextlib.ExitStack() as ending:

        def start() -> "_Worker":
            worker = _Worker(run, workers, timeout)
            ending.callback(worker.process.join)  # so that its memory on a device is free
            ending.callback(worker.process.kill)
            return worker

        for _ in range(min(workers, len(groups))):
            worker = start()
            worker.give(waiting.popleft())
            busy[worker.connection] = worker
        while busy:
            soonest = min(worker.deadline for worker in busy.values())
            ready = wait(list(busy), min(max(soonest - time.monotonic(), 0.0), LONGEST_WAIT))
            for connection, worker in busy.items():
                if connection not in ready and time.monotonic() > worker.deadline:
                    worker.late = True
                    worker.process.kill()  # its end is seen when it is waited for
            for connection in ready:
                worker = busy.pop(connection)
                try:
                    sent = connection.recv()
                except (EOFError, ConnectionResetError):
                    if not worker.begun:
                        guard = 'a script that calls this needs `if __name__ == "__main__":`'
                        raise RuntimeError(f"a process for cases died {worker.end()} before it began; {guard}") from None
                    worker = _after_death(worker, start(), groups[worker.group], died)
                else:
                    if isinstance(sent, Exception):
                        raise sent
                    if sent == _BEGUN:
                        worker.begun = True
                        worker.allow()
                    elif sent is _FINISHED:
                        yield worker.group, worker.outcomes
                        if not waiting:
                            continue
                        worker.give(waiting.popleft())
                    else:
                        worker.outcomes.append(sent)
                        worker.allow()
                busy[worker.connection] = worker


class _Worker:
    """A process, the group that it runs, its outcomes so far, and how many processes died of it."""

    def __init__(self, run: Callable, workers: int, timeout: float):
        spawning = multiprocessing.get_context("spawn")
        self.connection, theirs = spawning.Pipe()
        self.process = spawning.Process(target=_serve, args=(theirs, run, workers), daemon=True)
        self.process.start()
        theirs.close()  # so that its end is seen when the process ends
        self.begun = self.late = False
        self.timeout, self.deadline = timeout, math.inf  # to begin takes what it takes
        self.group: Group | None = None
        self.outcomes: list[Outcome] = []
        self.deaths = 0

    def give(self, group: Group, outcomes: Sequence[Outcome] = (), deaths: int = 0) -> None:
        """Have it run a group, of which it skips the cases that have outcomes."""
        self.group, self.outcomes, self.deaths = group, list(outcomes), deaths
        if self.begun:
            self.allow()
        with contextlib.suppress(BrokenPipeError):  # its end is seen when it is waited for
            self.connection.send((group, len(self.outcomes)))

    def allow(self) -> None:
        """Give the case that begins its seconds."""
        self.deadline = time.monotonic() + self.timeout

    def end(self) -> str:
        """How the process died."""
        self.process.join()
        if self.late:
            return f"by SIGKILL: no result within {self.timeout:g} seconds"
        code = self.process.exitcode
        names = {number.value: number.name for number in signal.Signals}  # of real-time signals it has the ends alone
        return f"by {names.get(-code, f'signal {-code}')}" if code < 0 else f"with exit code {code}"


def _after_death(
    dead: "_Worker", replacement: "_Worker", cases: int, died: Callable[[Group, int, str], Outcome]
) -> "_Worker":
    """`replacement`, which goes on with the group behind the case that was running, or that was the last to run."""
    group, deaths, number = dead.group, dead.deaths + 1, min(len(dead.outcomes), cases - 1)
    outcomes = [*dead.outcomes[:number], died(group, number, f"the process that ran it died {dead.end()}")]
    if deaths == DEATHS:
        why = f"not run: {deaths} processes had died of cases like it"
        outcomes += [died(group, number, why) for number in range(len(outcomes), cases)]
    replacement.give(group, outcomes, deaths)
    return replacement


def _serve(connection: Connection, run: Callable[[Group, int], Iterator[Outcome]], workers: int) -> None:
    """In a process of its own: outcomes of the groups that `connection` asks for, one of `workers` that share the cores."""
    os.dup2(2, 1)  # what a kernel prints is no part of a report on stdout
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: it is for the process that asks, which ends this one
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, max(2, threads // workers)))  # two: a kernel may share its work among them
    with contextlib.suppress(EOFError, ConnectionError):  # nothing more is asked, or nobody asks
        connection.send(_BEGUN)
        while True:
            group, first = connection.recv()
            try:
                for outcome in run(group, first):
                    connection.send(outcome)
            except Exception as problem:
                connection.send(problem)
            else:
                connection.send(_FINISHED)
