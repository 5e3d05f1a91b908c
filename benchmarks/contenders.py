"""What a benchmark times: who does what to how much, how it is known to be right, and the floor that it is held against.

The reference is held to the tests' oracles, which are exact rationals and numpy, on a part of its result; a kernel to
the conformance cases of what is timed and to the reference's result, bit for bit. What another library computes need not be
what mxref computes: where the result can be compared, the record says whether it has the same bits.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from oracles import mx, nvfp4
from oracles.elements import ELEMENTS
from oracles.products import FORMATS, Operand, operand

import mxref
from mxref import registry
from mxref.blocks import BlockTensor
from mxref.comparison import difference
from mxref.conformance import Case, cases
from mxref.conformance.runner import run_case

COPY = "torch copy"
REFERENCE = "mxref reference"
BLOCK_FORMATS = ("mxfp4", "nvfp4", "mxfp8_e4m3", "mxfp6_e2m3", "mxint8")
ORACLE_ROWS, ORACLE_COLUMNS = 2, 128  # that are compared with the oracle's


@dataclass(frozen=True)
class Contender:
    """One row of a record to be.

    `prepare` makes the inputs and returns what is timed; `wrong` says of its first result what is wrong with it, None if
    nothing is. With `ours` a wrong result ends the benchmark; without, the row says that its bits are others. `floor`: the
    contender of the same op, dtype and size that the time is held against. `dtype`: of the values that go in or come out.
    `counts_memory`: the record says what the first run has in memory at most.
    """

    op: str
    format: str
    dtype: str
    size: tuple[int, ...]
    who: str = REFERENCE
    prepare: Callable[[], Callable[[], Any]] | None = None
    wrong: Callable[[Any], str | None] | None = None
    ours: bool = True
    floor: str | None = None
    recipe: str | None = None
    moved_bytes: int | None = None
    flops: int | None = None
    counts_memory: bool = False

    def __str__(self) -> str:
        return "-".join(part for part in (self.op, self.format, self.dtype, "x".join(map(str, self.size)), self.who))

    def facts(self) -> dict[str, Any]:
        """What a record says of it beside its times."""
        facts = {"op": self.op, "format": self.format, "dtype": self.dtype, "contender": self.who, "device": "cpu"}
        facts |= {"size": list(self.size), "floor": self.floor, "recipe": self.recipe}
        facts |= {"moved_bytes": self.moved_bytes, "flops": self.flops}
        return {name: value for name, value in facts.items() if value is not None}


def of_op(
    row: Contender, arguments: Callable[[], tuple[tuple, dict]], oracle: Callable[[Any], str | None]
) -> Iterator[Contender]:
    """The reference, held to `oracle`, and every installed kernel that runs here, held to the reference."""
    yield replace(row, who=REFERENCE, prepare=functools.partial(_call, row.op, (), arguments), wrong=oracle)
    for backend in backends_of(row.op):
        prepare = functools.partial(_call, row.op, (backend,), arguments)
        yield replace(
            row, who=f"mxref {backend}", prepare=prepare, wrong=functools.partial(_unlike, row, backend, arguments)
        )


def peer(row: Contender, who: str, prepare: Callable[[], Callable[[], Any]], expected: Callable | None = None) -> Contender:
    """Another library's way; `expected()`: mxref's result, where theirs can be compared with it."""
    wrong = None if expected is None else lambda result: difference(result, expected())
    return replace(row, who=who, prepare=prepare, wrong=wrong, ours=False, recipe=None)


def copying(op: str, dtype: str, size: tuple[int, ...]) -> Contender:
    """The floor of what moves values: a copy of as many of `dtype`."""
    moved = 2 * int(np.prod(size)) * getattr(torch, dtype).itemsize
    return Contender(op, "-", dtype, size, COPY, lambda: normal(size, dtype).clone, moved_bytes=moved)


@functools.lru_cache(maxsize=4)
def normal(size: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator).to(getattr(torch, dtype))


def backends_of(op: str) -> list[str]:
    """Those with a kernel for `op` that runs on this CPU."""
    found = [(backend, registry.kernel(op, backend)) for backend in registry.backends()]
    return [b for b, kernel in found if kernel is not None and "cpu" in kernel.devices and kernel.requires() is None]


def _call(op: str, backends: tuple[str, ...], arguments: Callable[[], tuple[tuple, dict]]) -> Callable[[], Any]:
    (args, kwargs), function = arguments(), registry.OPS[op]

    def call() -> Any:
        with mxref.use(*backends, strict=bool(backends)):
            return function(*args, **kwargs)

    return call


def _unlike(row: Contender, backend: str, arguments: Callable[[], tuple[tuple, dict]], result: Any) -> str | None:
    """What differs from the reference in conformance's cases of the same op, format, dtype and recipe, or in `result`."""
    outcomes = [run_case(case, backend, "cpu") for case in cases(row.op) if _concerns(case, row)]
    for outcome in outcomes:
        if outcome.failure is not None:
            return f"{outcome.id}: {outcome.failure}"
    if not any(outcome.kind == "passed" for outcome in outcomes):
        return "no conformance case is of what is timed"
    if registry.kernel(row.op, backend).contract != "bitexact":
        return None  # the cases hold it to what it promises
    return difference(result, _call(row.op, (), arguments)())


def _concerns(case: Case, row: Contender) -> bool:
    with_recipes = row.op in ("quantize", "qdq")
    id = f"{row.format}-{row.recipe}-" if with_recipes else ""
    formats = f"{row.format} {row.format}" if row.op == "matmul" else row.format
    wanted = (formats, row.dtype, None)
    return (case.format, case.dtype, case.raises) == wanted and case.id.startswith(id)


# ---- by the oracles -------------------------------------------------------------------------------------------------


def corner(x: torch.Tensor) -> torch.Tensor:
    """The part of values that is compared."""
    return x[:ORACLE_ROWS, :ORACLE_COLUMNS]


def quantized_corner(x: torch.Tensor, format: str) -> Operand:
    """The corner of `x` in the default recipe of `format`; a tensor scale is of all of it."""
    rows = corner(x).float().numpy()
    if format == "nvfp4":
        q = nvfp4.quantize(rows, "nvidia", amax=nvfp4.finite_amax(x.float().numpy()))
        return operand(format, q.codes, q.scales, q.tensor_scale)
    element = FORMATS[format][0]
    return operand(format, *mx.quantize_rows(rows, ELEMENTS[element]))


def as_operand(q: BlockTensor) -> Operand:
    """A block tensor `[R, K]` as the oracles take it."""
    scale = None if q.tensor_scale is None else q.tensor_scale.numpy()
    return operand(q.format.name, q.codes.numpy(), q.scales.numpy(), scale)


def values(array: np.ndarray, dtype: str) -> torch.Tensor:
    """What an oracle found, each value already one of `dtype`."""
    return torch.from_numpy(np.float32(array)).to(getattr(torch, dtype))


def unlike_corner(result: BlockTensor, expected: Operand) -> str | None:
    """What differs from the oracle's corner."""
    found = as_operand(result[:ORACLE_ROWS])
    blocks = expected.scales.shape[1]
    found = replace(found, codes=found.codes[:, :ORACLE_COLUMNS], scales=found.scales[:, :blocks])
    for name in ("codes", "scales", "tensor_scale"):
        got, wanted = getattr(found, name), getattr(expected, name)
        if (got is None) != (wanted is None) or (
            got is not None and not np.array_equal(np.squeeze(got), np.squeeze(wanted))
        ):
            return f"{name} differ from the oracle's"
    return None
