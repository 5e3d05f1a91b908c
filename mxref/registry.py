"""Ops and kernels: one reference function an op, and whoever can compute the same bits faster.

An op is a reference function; its name, signature and docstring are the contract. A kernel is another function with
that signature, offered by an installed package through an entry point of the group `mxref.kernels`, with the name
`<op>.<backend>` and the value `module:KERNEL`, a `Kernel` record. Nothing is imported until it is asked for, and the
reference answers unless a caller opts in:

    with mxref.use("triton"):                  # or MXREF_BACKENDS=triton in the environment
        y = mxref.qdq(x, "mxfp4")

A kernel that cannot take a call says why in a sentence; then the reference answers and the reason is logged once
(`strict=True`: it is raised). `check=True`, or MXREF_CHECK=1, runs both and compares every bit. The selection is a
context variable: threads and tasks do not see each other's.
"""

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch
from torch.autograd import forward_ad

from mxref.comparison import difference, tensors

OPS: dict[str, Callable] = {}
_NAMES: dict[str, tuple[str, ...]] = {}  # of the parameters of each op
GROUP = "mxref.kernels"
REFERENCE = "reference"
CONTRACTS = ("bitexact", "certified", "bounded")

_log = logging.getLogger("mxref")
_SUBNORMAL = sys.float_info.min / 2  # a variable, so that no compiler folds the product below


def _nothing_missing() -> str | None:
    return None


def _accepts_all(*args, **kwargs) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op.

    `function` has the reference's signature. `contract`: `bitexact` (every bit of every output) or, of a matmul alone,
    `certified` (every bit where no order of additions can round) or `bounded` (within a proven bound). `devices`: torch
    device types; `dtypes`: of the first argument; `formats`: names of element or block formats, None: any. Every format of
    a call has to be among them: each argument `format`, `element` or `..._format`, `..._element`, unless it is None, and
    that of each argument that is a BlockTensor. Only the name counts: `accepts` sees records of one's own under such a name.
    `requires()` says what the machine lacks, `accepts(...)`, called with the op's arguments, what the kernel does not do;
    each is None or a sentence.

    A result has the reference's values, dtypes and shapes, lies in memory of its own where the reference's does, and asks
    for no gradient; its strides are the kernel's choice. What a kernel is given stays as it is.
    """

    op: str
    backend: str
    function: Callable
    contract: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    formats: tuple[str, ...] | None = None
    requires: Callable[[], str | None] = _nothing_missing
    accepts: Callable[..., str | None] = _accepts_all

    def __post_init__(self):
        if self.contract not in CONTRACTS:
            raise ValueError(f"contract={self.contract!r}: expected one of {', '.join(CONTRACTS)}")
        if self.contract != "bitexact" and self.op != "matmul":
            raise ValueError(
                f"a kernel for {self.op} declares contract={self.contract!r}: expected 'bitexact'; only matmul has others"
            )
        for name in ("requires", "accepts"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected a function")
        for name, kind in (("devices", str), ("dtypes", torch.dtype), ("formats", str)):
            given = getattr(self, name)
            if name == "formats" and given is None:
                continue
            if not isinstance(given, tuple) or not all(isinstance(item, kind) for item in given):
                raise TypeError(f"{name}={given!r}: expected a tuple of {kind.__name__}")


@dataclass(frozen=True)
class Dispatch:
    """Which backend answers a call, and why those asked before it do not."""

    op: str
    backend: str
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        return "\n".join([*(f"{backend}: {reason}" for backend, reason in self.refusals), f"{self.op}: {self.backend}"])


@dataclass
class Calls:
    """How many calls of an op a kernel answered, how many of these were compared with the reference and had its bits, and
    how many no kernel took, so that the reference answered."""

    answered: int = 0
    compared: int = 0
    refused: int = 0


@dataclass(frozen=True)
class _Selection:
    backends: tuple[str, ...] = ()
    strict: bool = False
    check: bool = False
    calls: dict[str, Calls] | None = None  # where they are counted


def _from_environment() -> _Selection:
    names = os.environ.get("MXREF_BACKENDS", "").replace(",", " ").split()
    return _Selection(tuple(names), check=_environment_checks())


def _environment_checks() -> bool:
    given, on, off = os.environ.get("MXREF_CHECK", ""), ("1", "true", "yes", "on"), ("0", "false", "no", "off")
    if given and given.lower() not in (*on, *off):
        raise ValueError(f"MXREF_CHECK={given!r} in the environment: expected one of {', '.join((*on, *off))}, or nothing")
    return given.lower() in on


call_in_graph: Callable[[str, tuple, dict], Any] | None = None  # how a traced or mapped call is made: mxref.compiled

_SELECTIONS: ContextVar[tuple[_Selection, ...]] = ContextVar("mxref_selections", default=(_from_environment(),))


def op(reference: Callable) -> Callable:
    """Mark `reference` as an op: calls go to the selected kernel that takes them, or to `reference`."""
    return _op(reference, has_gradient=True)


def op_without_gradient(reference: Callable) -> Callable:
    """As `op`, of a function whose result autograd knows no gradient of: a kernel may answer even where it watches."""
    return _op(reference, has_gradient=False)


def _is_mapped() -> bool:
    """Whether `torch.vmap` is what calls, whose tensors show the shapes of one call and hold many."""
    transform = torch._C._functorch.peek_interpreter_stack()
    return transform is not None and transform.key() == torch._C._functorch.TransformType.Vmap


def _op(reference: Callable, has_gradient: bool) -> Callable:
    name = reference.__name__
    if name in OPS:
        raise ValueError(f"op {name!r} is defined twice")

    @functools.wraps(reference)
    def call(*args, **kwargs):
        if torch.compiler.is_compiling() or _is_mapped():
            return call_in_graph(name, args, kwargs)
        require_subnormals()
        function, selection = reference, _selection()
        if selection.backends and not (has_gradient and _records_gradients(args, kwargs)):
            try:
                kernel, refusals = _choose(name, selection.backends, args, kwargs)
            except AskingFailed:
                with use():
                    reference(*args, **kwargs)  # which says what is wrong with the arguments, if that is why
                raise
            if selection.calls is not None:
                _count(selection.calls[name], kernel, selection.check)
            if kernel is None:
                _no_kernel(name, refusals, selection.strict)
            else:
                function = functools.partial(_checked, kernel) if selection.check else kernel.function
        if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
            with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):  # it would cast products
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    call.has_gradient = has_gradient
    OPS[name] = call
    _NAMES[name] = tuple(inspect.signature(reference).parameters)
    return call


@contextlib.contextmanager
def use(*backends: str, strict: bool = False, check: bool = False) -> Iterator[None]:
    """Within the `with` block ops go to the kernels of `backends`, the first that takes a call; with none, to the reference.

    `strict`: raise RuntimeError with every reason where no kernel takes a call, instead of running the reference.
    `check`, or MXREF_CHECK=1: run the reference too and raise AssertionError at the first differing bit. Raises ValueError
    for a backend that no installed package offers, TypeError for what is no name, RuntimeError for a backend whose entry
    points cannot be kernels'.

    >>> with use():
    ...     pass
    """
    for backend in backends:
        if not isinstance(backend, str):
            raise TypeError(f"backend={backend!r}: expected names, each an argument of its own, of {_known_backends()}")
        _check_backend(backend)
    with _select(_Selection(backends, strict, check or _environment_checks())):
        yield


@contextlib.contextmanager
def _select(selection: _Selection) -> Iterator[None]:
    """Within it the last selection that was made and has not ended counts, in whatever order they end."""
    _SELECTIONS.set((*_SELECTIONS.get(), selection))
    try:
        yield
    finally:
        _SELECTIONS.set(tuple(other for other in _SELECTIONS.get() if other is not selection))


def _selection() -> _Selection:
    return _SELECTIONS.get()[-1]


@contextlib.contextmanager
def counted() -> Iterator[dict[str, Calls]]:
    """Within the `with` block the present selection's calls are counted, by op, but not those that autograd records.

    >>> with counted() as calls:
    ...     dict(calls)
    {}
    """
    calls = defaultdict(Calls)
    with _select(replace(_selection(), calls=calls)):
        yield calls


def _count(calls: Calls, kernel: Kernel | None, check: bool) -> None:
    if kernel is None:
        calls.refused += 1
        return
    calls.answered += 1
    calls.compared += check and kernel.contract == "bitexact"


def explain_dispatch(op: str | Callable, *args, **kwargs) -> Dispatch:
    """Which backend would answer `op(*args, **kwargs)` under the present selection, without running it.

    >>> print(explain_dispatch("exp", torch.ones(2)))
    exp: reference
    """
    name = getattr(op, "__name__", op)
    if not isinstance(name, str):
        raise TypeError(f"op={op!r}: expected an op or its name, one of {', '.join(sorted(OPS))}")
    _check_op(name)
    if OPS[name].has_gradient and _records_gradients(args, kwargs):
        why = "autograd records the call; within it, and without autograd, a kernel may answer"
        return Dispatch(name, REFERENCE, tuple((backend, why) for backend in _selection().backends))
    kernel, refusals = _choose(name, _selection().backends, args, kwargs)
    return Dispatch(name, REFERENCE if kernel is None else kernel.backend, tuple(refusals))


def selected() -> tuple[str, ...]:
    """The backends that ops are sent to at present; none: the reference.

    >>> with use():
    ...     selected()
    ()
    """
    return _selection().backends


def backends() -> tuple[str, ...]:
    """Names of the backends that installed packages offer."""
    return tuple(sorted({backend for (_, backend), offer in _offers().items() if not isinstance(offer, str)}))


def offers() -> tuple[tuple[str, str], ...]:
    """The (op, backend) of every kernel that installed packages offer, loaded or not, also of those that are broken."""
    return tuple(sorted(_offers()))


def kernels(backend: str) -> tuple[Kernel, ...]:
    """The kernels of `backend`, loaded. Raises ValueError for an unknown backend, RuntimeError for a broken one."""
    _check_backend(backend)
    return tuple(kernel(op, b) for op, b in offers() if b == backend)


@functools.cache
def kernel(op: str, backend: str) -> Kernel | None:
    """The kernel of one op and backend, imported and checked; None where the backend offers none.

    Raises RuntimeError, with the cause, if it cannot be imported or is not what its entry point says.
    """
    offer = _offers().get((op, backend))
    if isinstance(offer, str):
        raise RuntimeError(offer)
    _check_op(op)
    _check_backend(backend)
    if offer is None:
        return None
    source = f"kernel {op}.{backend} ({offer.value}, from {_package(offer)})"
    try:
        with use():  # ops that its module calls are the reference's
            found = offer.load()
    except KeyboardInterrupt:
        raise
    except BaseException as failure:  # a module may ask to exit, or a test in it to be skipped
        raise RuntimeError(f"{source} cannot be loaded: {told(failure)}") from failure
    if not isinstance(found, Kernel):
        raise RuntimeError(f"{source} is a {type(found).__name__}: expected a mxref.registry.Kernel")
    if (found.op, found.backend) != (op, backend):
        raise RuntimeError(f"{source} says that it is {found.op}.{found.backend}")
    try:
        expected, given = _parameters(OPS[op]), _parameters(found.function)
    except (TypeError, ValueError) as failure:  # of no function, or of one that is not written in Python
        raise RuntimeError(f"{source}: {failure}") from failure
    if expected != given:
        raise RuntimeError(f"{source} has the signature {given}: expected that of mxref's {op}, {expected}")
    return found


@functools.cache
def _offers() -> dict[tuple[str, str], EntryPoint | str]:
    """The entry points of all installed packages by (op, backend); what is wrong with one, where it can be no kernel's."""
    found: dict[tuple[str, str], EntryPoint | str] = {}
    for offer in entry_points(group=GROUP):
        op, _, backend = offer.name.partition(".")
        other = found.setdefault((op, backend), offer)
        if not op or not backend or "." in backend or backend == REFERENCE:
            found[op, backend] = f"entry point {offer.name!r} of {_package(offer)}: expected a name <op>.<backend>"
        elif op not in OPS:
            known = ", ".join(sorted(OPS))
            found[op, backend] = f"entry point {offer.name!r} of {_package(offer)}: op={op!r}: expected one of {known}"
        elif not isinstance(other, str) and (other.value, _package(other)) != (offer.value, _package(offer)):
            both = f"{_package(other)} and {_package(offer)}"
            found[op, backend] = f"{both} both offer {offer.name}: uninstall one of them"
    return found


def _package(offer: EntryPoint) -> str:
    return f"{offer.dist.name} {offer.dist.version}" if offer.dist else "an unknown package"


def _parameters(function: Callable) -> str:
    """The signature without annotations."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def _check_op(name: str) -> None:
    if name not in OPS:
        raise ValueError(f"op={name!r}: expected one of {', '.join(sorted(OPS))}")


def _check_backend(name: str) -> None:
    for (_, backend), offer in _offers().items():
        if backend == name and isinstance(offer, str):
            raise RuntimeError(offer)
    if name not in backends():
        raise ValueError(f"backend={name!r}: expected one of {_known_backends()}")


def _known_backends() -> str:
    return ", ".join(backends()) or "(no package offers kernels)"


def _records_gradients(args: tuple, kwargs: dict) -> bool:
    """Whether autograd watches the call: then the reference records it, and enters the op again without autograd."""
    backward, forward = torch.is_grad_enabled(), forward_ad._current_level >= 0
    if not backward and not forward:
        return False
    given = (*args, *kwargs.values())
    listed = (part for a in given if isinstance(a, (list, tuple)) for part in a)
    tensors = [a for a in (*given, *listed) if isinstance(a, torch.Tensor)]
    watched = backward and any(a.requires_grad for a in tensors)
    return watched or (forward and any(forward_ad.unpack_dual(a).tangent is not None for a in tensors))


def _choose(name: str, backends: tuple[str, ...], args: tuple, kwargs: dict) -> tuple[Kernel | None, list[tuple[str, str]]]:
    refusals = []
    for backend in backends:
        candidate = kernel(name, backend)
        reason = f"it has no kernel for {name}" if candidate is None else _refusal(candidate, args, kwargs)
        if reason is None:
            return candidate, refusals
        refusals.append((backend, reason))
    return None, refusals


def _refusal(kernel: Kernel, args: tuple, kwargs: dict) -> str | None:
    missing = _missing(kernel)
    if missing is not None:
        return missing
    subject = args[0] if args else kwargs.get(_NAMES[kernel.op][0])
    tensor = getattr(subject, "packed", subject)
    if isinstance(tensor, torch.Tensor):
        if tensor.device.type not in kernel.devices:
            return f"{kernel.op} is on {tensor.device.type}: the kernel runs on {', '.join(kernel.devices)}"
        if tensor.dtype not in kernel.dtypes:
            return f"{kernel.op} of {tensor.dtype}: the kernel takes {', '.join(map(str, kernel.dtypes))}"
    for format in _formats(kernel.op, args, kwargs) if kernel.formats is not None else ():
        if format not in kernel.formats:
            return f"{kernel.op} of {format}: the kernel takes {', '.join(kernel.formats)}"
    return ask(kernel, "accepts", *args, **kwargs)


def _formats(op: str, args: tuple, kwargs: dict) -> Iterator[str]:
    """Names of the formats of a call."""
    for name, value in (*zip(_NAMES[op], args), *kwargs.items()):
        named = name.endswith(("format", "element"))
        format = value if named else getattr(value, "format", None) if hasattr(value, "packed") else None
        if format is not None:
            yield getattr(format, "name", format)


@functools.cache
def _missing(kernel: Kernel) -> str | None:
    return ask(kernel, "requires")


class AskingFailed(RuntimeError):
    """A kernel raised, or gave no answer, when asked whether it takes a call."""


def told(error: BaseException) -> str:
    """Type and text of an exception of somebody else's code, whose text may not be readable, or not be text."""
    try:
        text = str(error)
    except Exception as problem:
        text = f"its text cannot be read: {type(problem).__name__}"
    return f"{type(error).__name__}: {text}".encode("utf-8", "backslashreplace").decode()


def ask(kernel: Kernel, what: str, *args, **kwargs) -> str | None:
    """What a kernel answers when asked whether it takes a call (`accepts`) or what it lacks (`requires`)."""
    try:
        answer = getattr(kernel, what)(*args, **kwargs)
    except (Exception, SystemExit) as problem:
        said, cause = f"raises {told(problem)}", problem
    else:
        if answer is None or (isinstance(answer, str) and answer):
            return answer
        said, cause = f"returns {answer!r}: expected None or a sentence that says why not", None
    raise AskingFailed(f"kernel {kernel.op}.{kernel.backend}: {what} {said}") from cause


def _no_kernel(name: str, refusals: list[tuple[str, str]], strict: bool) -> None:
    message = f"no selected kernel takes this call of {name}: " + "; ".join(f"{b}: {why}" for b, why in refusals)
    if strict:
        raise RuntimeError(message)
    _log_once(message)


@functools.cache
def _log_once(message: str) -> None:
    _log.warning("%s; the reference answers", message)


def _checked(kernel: Kernel, *args, **kwargs) -> Any:
    """The kernel's result, after the reference's has been found to be the same, and the arguments to be what they were."""
    with use():
        expected = OPS[kernel.op](*args, **kwargs)
    given = [x.detach() for x in tensors((args, kwargs))]
    before = [x.clone() for x in given]
    actual = kernel.function(*args, **kwargs)
    found = difference(given, before)
    if found is not None:
        raise AssertionError(f"{kernel.op}.{kernel.backend} overwrote a tensor that it was given: {found}")
    found = difference(actual, expected)
    if found is not None and kernel.contract == "bitexact":
        raise AssertionError(f"{kernel.op}.{kernel.backend} differs from the reference: {found}")
    return actual


def flushes_subnormals() -> bool:
    """Whether this thread flushes subnormal numbers to zero.

    >>> flushes_subnormals()
    False
    """
    return _SUBNORMAL * 1.0 == 0.0


def require_subnormals() -> None:
    """Raise RuntimeError if this thread flushes subnormal numbers to zero: no bit could be promised."""
    if flushes_subnormals():
        raise RuntimeError(
            "subnormal numbers are being flushed to zero on this thread; mxref's results are defined with IEEE 754 "
            "subnormals: call torch.set_flush_denormal(False)"
        )
