"""Running cases: the reference on the CPU says what is right, the subject runs on its device."""

import contextlib
import copy
import difflib
import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch

import mxref
from mxref import registry
from mxref.blocks import BlockTensor
from mxref.commands import Terminated
from mxref.comparison import difference, parts, tensors
from mxref.conformance import inputs
from mxref.conformance.cases import LEVELS, OPS, Case, cases
from mxref.conformance.contracts import CONTRACTS
from mxref.conformance.failure import Failure, first_block
from mxref.conformance.known import read_known_failures
from mxref.conformance.processes import TIMEOUT, Group, run_shared
from mxref.conformance.report import ConformanceReport, Outcome, environment
from mxref.conformance.settings import SettingsChanged, settings_kept
from mxref.formats import FLOAT_SMALLEST, check_number
from mxref.registry import REFERENCE, kernels

POISON_BYTES = 64 << 20
TOGETHER = 32  # cases: the last groups to begin are soon done, and a process begins few anew
FRAME = 64  # elements of poison before and behind every argument
COMPARED_AT_ONCE = 1 << 26  # elements of a repeated result
CPU_BYTES = 1 << 30  # of one case
REFERENCE_BYTES = 56  # of temporaries an element, for the reference on a device


def verify(
    backend: str = REFERENCE,
    *,
    ops: Sequence[str] | None = None,
    level: int = 1,
    device: str = "cpu",
    workers: int = 0,
    commit: str | None = None,
    known_failures: str | Path | Mapping[tuple[str, str], str] | None = None,
    strict: bool = False,
    timeout: float = TIMEOUT,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> ConformanceReport:
    """Run every case of `ops` (None: all that the backend offers) up to `level` on `device`, and compare all bits, or what
    else a kernel's contract promises.

    Each case runs twice, some three times, its memory poisoned before, so that unwritten outputs and chance show. A call
    that a kernel refuses before it runs is counted as refused, with its reason; it neither passes nor fails (`strict`: it
    fails). A kernel that raises on a call it accepted fails, as does one that changes a setting of the process
    (`settings.py`), which is put back, writes into or around its arguments, or returns memory that is not its result's own.
    Some cases are calls that the reference refuses: they pass if the call, by whomever it is answered, raises that error.
    `known_failures`: reasons by (op, case id), or a file of them
    (`read_known_failures`): such a case counts as known if it fails, and fails if it passes.

    `workers` processes share the work, since most of it is compiling kernels; what is repeated on the device runs after
    all else in one, so that it finds the memory. A case whose process dies, or has no result after `timeout` seconds, fails.
    0: everything runs in this process, without a limit of time; a kernel may end it, though not by Python's `os._exit`.
    `commit` is what the record names (None: what git says). `on_progress(op, done, cases)` is called as
    work proceeds. Raises ValueError for unknown names, a file that cannot be read and a known failure that no case of this
    run has, RuntimeError for a backend that cannot be loaded.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: expected one of {LEVELS}")
    with settings_kept(f"importing the kernels of {backend}"):
        offered = OPS if backend == REFERENCE else [k.op for k in kernels(backend)]
    chosen = list(offered if ops is None else ops)
    if not chosen:
        raise ValueError(f"ops is empty: expected some of {', '.join(op for op in OPS if op in offered)}")
    if isinstance(ops, str):
        raise ValueError(f"ops={ops!r}: expected names in a list, such as [{ops!r}], or None")
    for op in chosen:
        if op not in OPS or op not in offered:
            raise ValueError(f"op={op!r}: expected one of {', '.join(op for op in OPS if op in offered)}")
    check_number("workers", workers, 0)
    check_number("timeout", timeout, FLOAT_SMALLEST, expected="seconds > 0")
    check_device(device)
    if isinstance(known_failures, (str, Path)):
        known = read_known_failures(known_failures)
    else:
        known = {} if known_failures is None else known_failures
        if not isinstance(known, Mapping) or not all(isinstance(key, tuple) and len(key) == 2 for key in known):
            accepted = "reasons by (op, case id), a file's name or None"
            raise ValueError(f"known_failures={known_failures!r}: expected {accepted}")
    present = [case for op in chosen for case in cases(op, level)]
    unmatched = sorted(known.keys() - {(case.op, case.id) for case in present})
    if unmatched:
        listed = ", ".join(" ".join(key) for key in unmatched)
        raise ValueError(f"known failures: no case of this run (ops {', '.join(chosen)}; level {level}) is {listed}")

    sizes = _groups(present)
    totals = Counter(case.op for case in present)
    run = partial(_run_group, level=level, backend=backend, device=device, strict=strict)
    died = partial(_died, level, backend, device)
    done: Counter[str] = Counter()
    found = {}
    small, repeated = ([group for group in sizes if group[3] == many] for many in (False, True))
    if workers:
        shared = [({group: sizes[group] for group in part}, count) for part, count in ((small, workers), (repeated, 1))]
        results = itertools.chain.from_iterable(run_shared(part, count, run, died, timeout) for part, count in shared)
    else:
        results = ((group, list(run(group))) for group in (*small, *repeated))
    for group, outcomes in results:
        found[group] = [_expect(outcome, known.get((outcome.op, outcome.id)), backend, device) for outcome in outcomes]
        done[group[0]] += len(outcomes)
        if on_progress is not None:
            on_progress(group[0], done[group[0]], totals[group[0]])
    ordered = tuple(outcome for group in sizes for outcome in found[group])
    return ConformanceReport(backend=backend, level=level, outcomes=ordered, **environment(device, commit))


def _kind(case: Case) -> tuple[str, str, str, bool]:
    return case.op, case.format, case.dtype, case.repeats > 1


def _groups(present: Sequence[Case]) -> dict[Group, int]:
    """Cases that a process runs together, and how many: up to `TOGETHER` of one op, format and dtype, repeated or not."""
    kinds = Counter(map(_kind, present))
    return {
        (*kind, first): min(TOGETHER, count - first) for kind, count in kinds.items() for first in range(0, count, TOGETHER)
    }


def _cases_of(group: Group, level: int) -> list[Case]:
    *kind, first = group
    return [case for case in cases(group[0], level) if _kind(case) == tuple(kind)][first : first + TOGETHER]


def _run_group(group: Group, first: int = 0, *, level: int, backend: str, device: str, strict: bool) -> Iterator[Outcome]:
    """The outcomes of a group's cases from number `first` on."""
    for case in _cases_of(group, level)[first:]:
        yield run_case(case, backend, device, strict)


def _died(level: int, backend: str, device: str, group: Group, number: int, why: str) -> Outcome:
    """The outcome of a case that killed its process, or that was not run because others did."""
    return _lost(_cases_of(group, level)[number], why, backend, device)


def _lost(case: Case, why: str, backend: str, device: str) -> Outcome:
    failure = Failure(why, "", _command(case.op, case.id, backend, device))
    return Outcome(case.op, case.id, case.format, case.dtype, failure=failure)


def run_case_apart(case: Case, backend: str, device: str, strict: bool = False, timeout: float = TIMEOUT) -> Outcome:
    """As `run_case`, in a process of its own: a kernel that ends it, or takes longer than `timeout` seconds, has failed."""
    check_number("timeout", timeout, FLOAT_SMALLEST, expected="seconds > 0")
    run = partial(_run_one, id=case.id, backend=backend, device=device, strict=strict)
    died = lambda group, number, why: _lost(case, why, backend, device)  # noqa: E731
    ((_, (outcome,)),) = run_shared(_groups([case]), 1, run, died, timeout)
    return outcome


def _run_one(group: Group, first: int, *, id: str, backend: str, device: str, strict: bool) -> Iterator[Outcome]:
    if first == 0:
        yield run_case(find_case(group[0], id), backend, device, strict)


def _expect(outcome: Outcome, reason: str | None, backend: str, device: str) -> Outcome:
    """`outcome`, known if it is listed and fails; failed if it is listed and passes."""
    if reason is not None and outcome.kind == "passed":
        passed = f"it passes, though listed as a known failure ({reason}): remove its line"
        return replace(outcome, failure=Failure(passed, "", _command(outcome.op, outcome.id, backend, device)))
    return replace(outcome, known=reason if outcome.failure else None)


def run_case(case: Case, backend: str, device: str, strict: bool = False) -> Outcome:
    """Run one case and compare."""
    subject = () if backend == REFERENCE else (backend,)
    promised = _contract(case.op, backend)
    with mxref.use(*subject):  # raises for an unknown backend
        pass
    with mxref.use():
        args, kwargs = case.arguments()
        if case.raises is None:
            expected = registry.OPS[case.op](*args, **kwargs)
        elif (taken := _taken(case, (), args, kwargs)) is not None:
            raise RuntimeError(f"case {case.op} {case.id}, by the reference: {taken}")
        refused, found, block, left = None, None, "", False
        try:
            if case.raises is None:
                refused, found, block = _compared(case, backend, subject, args, kwargs, expected, promised, device)
            else:
                args, kwargs = to_device((args, kwargs), device)
                left = _leaves(case.op, subject, args, kwargs)
                found = None if left else _taken(case, subject, args, kwargs)
        except (KeyboardInterrupt, Terminated):
            raise
        except SettingsChanged as changed:
            found, block = str(changed), "" if changed.__context__ is None else _traceback(changed.__context__)
        except BaseException as error:  # of the kernel, which may ask to exit, or of the device when its result is read
            found, said = f"it raised {registry.told(error)}", traceback.format_exception_only(error)[0]
            block = _traceback(error).removesuffix(said.rstrip()).rstrip()
    if refused is not None and not strict:
        return Outcome(case.op, case.id, case.format, case.dtype, refused=refused)
    found = found if refused is None else f"refused: {refused}"
    failure = None if found is None else Failure(found, block, _command(case.op, case.id, backend, device))
    return Outcome(case.op, case.id, case.format, case.dtype, failure=failure, left=left)


def _compared(case, backend, subject, args, kwargs, expected, promised, device) -> tuple[str | None, str | None, str]:
    """(why the kernel does not run, what differs, the first block that does)."""
    refused = _too_large(case, args, expected, backend, device)
    if refused is not None:
        return refused, None, ""
    lent = _lent(expected, args, kwargs)
    args, kwargs = to_device((args, kwargs), device)
    refused = _refusal(case.op, subject, args, kwargs)
    if refused is not None:
        return refused, None, ""
    if case.repeats > 1:
        return None, *_run_repeated(case, subject, args, kwargs, to_device(expected, device))
    return None, *_run_again(case, subject, args, kwargs, expected, promised, lent, device)


def _refusal(op: str, subject: tuple[str, ...], args: tuple, kwargs: dict) -> str | None:
    with mxref.use(*subject), settings_kept("asking whether it takes the call"):
        reasons = mxref.explain_dispatch(op, *args, **kwargs).refusals
    return "; ".join(why for _, why in reasons) or None


def _leaves(op: str, subject: tuple[str, ...], args: tuple, kwargs: dict) -> bool:
    """Whether a kernel leaves a call to the reference."""
    try:
        return _refusal(op, subject, args, kwargs) is not None
    except registry.AskingFailed:
        return True


def _taken(case: Case, subject: tuple[str, ...], args: tuple, kwargs: dict) -> str | None:
    """How a call ends that must be refused, unless it is."""
    must = f"expected {case.raises.__name__}, as of the reference"
    try:
        _call(case.op, subject, args, kwargs)
    except case.raises:
        return None
    except SettingsChanged:
        raise
    except Exception as error:
        return f"it raised {registry.told(error)}; {must}"
    return f"it gave a result; {must}"


def _traceback(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-4)).rstrip()


def _call(op: str, subject: tuple[str, ...], args: tuple, kwargs: dict) -> Any:
    quiet = numpy.errstate(all="ignore")  # kernels that compute in numpy, as Triton's interpreter does, meet NaN on purpose
    with quiet, mxref.use(*subject), registry.counted() as calls, settings_kept(), _exit_raises():
        found = registry.OPS[op](*args, **kwargs)
    if subject and calls[op].answered == 0:
        raise RuntimeError("it refused a call that it had said to take")
    return found


@contextlib.contextmanager
def _exit_raises() -> Iterator[None]:
    """Within it `os._exit` in this process, which would end it as if all were well, raises SystemExit."""
    leave, here = os._exit, os.getpid()

    def raises(status: int) -> None:
        if os.getpid() != here:
            leave(status)  # a process that a kernel has forked
        raise SystemExit(f"os._exit({status})")

    os._exit = raises
    try:
        yield
    finally:
        os._exit = leave


def _run_again(case, subject, args, kwargs, expected, promised, lent, device) -> tuple[str | None, str]:
    """(what differs, the first block that does)."""
    memory = [_memory(x) for x in tensors((args, kwargs))]
    before, kept = [x.clone() for x in memory], {}
    for _ in range(case.calls):
        poison(device)
        actual = _call(case.op, subject, args, kwargs)
        found = promised(actual, expected, case)
        if found is not None:
            return found, first_block(case, actual, expected)
        found = difference(memory, before)
        if found is not None:
            return f"it wrote into or beside an argument; of all bytes of tensor {found}", ""
        own = {_address(x): x for name, x in parts(actual).items() if name not in lent and x.numel()}
        if own.keys() & set(map(_address, memory)):
            return "its result lies in the memory of an argument", ""
        if own.keys() & kept.keys():
            return "its results of two calls lie in the same memory", ""
        kept |= own  # alive, so that its memory is not given out again
    return None, ""


def _memory(x: torch.Tensor) -> torch.Tensor:
    """All bytes of the storage that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def _address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _lent(expected: Any, args: tuple, kwargs: dict) -> set[str]:
    """The parts of a result that the reference has in the memory of an argument: a kernel may too."""
    given = set(map(_address, tensors((args, kwargs))))
    return {name for name, part in parts(expected).items() if _address(part) in given}


def _run_repeated(case, subject, args, kwargs, expected) -> tuple[str | None, str]:
    """The same, of tensors repeated along their first axis: every copy of the result must be `expected`."""
    if case.repeat is None:
        args, kwargs = repeat_rows(args, case.repeats), repeat_rows(kwargs, case.repeats)
    else:
        args, kwargs = case.repeat(args, kwargs, case.repeats)
    actual = _call(case.op, subject, args, kwargs)
    rows = expected.shape[0]
    if actual.shape != (rows * case.repeats, *expected.shape[1:]):
        return f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)} times {case.repeats} along the first axis", ""
    at_once = min(max(1, COMPARED_AT_ONCE // max(expected.shape.numel(), 1)), case.repeats)
    wanted = repeat_rows(expected, at_once)
    for first in range(0, case.repeats, at_once):
        count = min(at_once, case.repeats - first)
        if difference(actual[first * rows : (first + count) * rows], wanted[: count * rows]) is None:
            continue
        for number in range(first, first + count):
            copied = actual[number * rows : (number + 1) * rows]
            found = difference(copied, expected)
            if found is not None:
                return f"copy {number} of {case.repeats}: {found}", first_block(case, copied, to_device(expected, "cpu"))
    return None, ""


def _too_large(case: Case, args: tuple, expected: Any, backend: str, device: str) -> str | None:
    """Why a repeated case does not fit the device, or None."""
    if case.repeats == 1:
        return None
    sizes: list[int] = []
    _each_tensor([args, expected], lambda x: sizes.append(x.numel() * x.element_size()) or x)
    temporaries = REFERENCE_BYTES * expected.shape.numel() if backend == REFERENCE else 0
    needed, available = case.repeats * (sum(sizes) + temporaries), CPU_BYTES
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        available = torch.cuda.mem_get_info(device)[0]
    if needed <= available:
        return None
    return f"needs {needed / 2**30:.0f} GiB on the device; {device} has {available / 2**30:.0f} for it"


def _contract(op: str, backend: str) -> Callable[[Any, Any, Case], str | None]:
    """What the backend's kernel for `op` promises."""
    kernel = None if backend == REFERENCE else registry.kernel(op, backend)
    return CONTRACTS["bitexact" if kernel is None else kernel.contract]


def _command(op: str, id: str, backend: str, device: str) -> str:
    return f"mxref verify {backend} --device {device} --op {op} --case {id}"


def check_device(device: str) -> None:
    """Raise ValueError unless torch can use `device`."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as problem:
        raise ValueError(f"device={device!r}: {str(problem).splitlines()[0]}") from None


def _each_tensor(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value`, in which `change` has replaced every tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, BlockTensor):
        changed = copy.copy(value)
        changed.__dict__.update({n: change(part) for n, part in vars(value).items() if isinstance(part, torch.Tensor)})
        return changed
    if isinstance(value, dict):
        return {name: _each_tensor(item, change) for name, item in value.items()}
    return type(value)(_each_tensor(item, change) for item in value) if isinstance(value, (tuple, list)) else value


def to_device(value: Any, device: str) -> Any:
    """A copy of the same arguments with every tensor on `device`; strides and alignment are kept, and whether it is negated
    as it is read; what lies between the elements, before and behind is poison."""

    def move(x: torch.Tensor) -> torch.Tensor:
        if x.is_neg():
            return torch._neg_view(move(torch._neg_view(x)))
        extent = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride())) if x.numel() else 0
        start = FRAME + x.storage_offset() % FRAME
        memory = inputs.poison(start + extent + FRAME, x.dtype, device)
        moved = memory.as_strided(x.shape, x.stride(), start)
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())  # of what is expanded
        moved[once].copy_(x[once])
        return moved

    return _each_tensor(value, move)


def repeat_rows(value: Any, times: int) -> Any:
    """The same arguments with every tensor that has axes `times` times along its first."""
    if isinstance(value, BlockTensor):
        return value[torch.arange(value.shape[0], device=value.device).repeat(times)]
    if isinstance(value, torch.Tensor):
        return value.repeat(times, *[1] * (value.ndim - 1)) if value.ndim else value
    if isinstance(value, dict):
        return {name: repeat_rows(item, times) for name, item in value.items()}
    return tuple(repeat_rows(item, times) for item in value) if isinstance(value, tuple) else value


def poison(device: str) -> None:
    """Leave memory of non-zero garbage behind for the next allocations."""
    if device != "cpu":
        for size in (POISON_BYTES, 1 << 8, 1 << 12, 1 << 16, 1 << 20):
            inputs.poison(size, torch.uint8, device)


def find_case(op: str, id: str) -> Case:
    """The case of that id; ValueError if there is none."""
    found = {case.id: case for case in cases(op, max(LEVELS))}
    if id not in found:
        near = difflib.get_close_matches(id, found) or list(found)[:3]
        raise ValueError(f"case={id!r}: {op} has no such case; expected one of its {len(found)}, such as {', '.join(near)}")
    return found[id]
