"""Element formats: encode and decode of a matrix, beside torch's casts, torchao's and a copy."""

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
from oracles.elements import ELEMENTS, decode_float64, encode_float64

import mxref
from benchmarks.contenders import COPY, ORACLE_ROWS, Contender, copying, normal, of_op, peer, values
from mxref.comparison import difference

FORMATS = ("e2m1", "e2m3", "e4m3", "int8")


def contenders(quick: bool) -> Iterator[Contender]:
    size = (8, 64) if quick else (2048, 4096)
    count = size[0] * size[1]
    for op in ("encode", "decode"):
        yield copying(op, "float32", size)
        for format in FORMATS:
            row = Contender(op, format, "float32", size, floor=COPY, moved_bytes=5 * count)
            given = partial(_arguments, op, format, size)
            yield from of_op(row, given, partial(_unlike_oracle, op, format, given))
            yield from peers(row)


def peers(row: Contender) -> Iterator[Contender]:
    """Torch's casts, and torchao's functions, which take and give what ours do."""
    given = partial(_arguments, row.op, row.format, row.size)

    def expected() -> torch.Tensor:
        return getattr(mxref, row.op)(*given()[0])

    if row.format == "e4m3":
        dtype = torch.float8_e4m3fn

        def encode():
            x = given()[0][0]
            return lambda: x.to(dtype).view(torch.uint8)

        def decode():
            codes = given()[0][0].view(dtype)
            return lambda: codes.to(torch.float32)

        yield peer(row, "torch cast", encode if row.op == "encode" else decode, expected)
    with contextlib.suppress(ImportError):
        from torchao.prototype.mx_formats import kernels

        names = {"e2m1": ("f32_to_f4_unpacked", "f4_unpacked_to_f32")}
        names["e2m3"] = ("f32_to_f6_e2m3_unpacked", "f6_e2m3_unpacked_to_f32")
        if row.format in names:
            function = getattr(kernels, names[row.format][row.op == "decode"], None)
            if function is not None:
                yield peer(row, "torchao", lambda: partial(function, given()[0][0]), expected)


def _arguments(op: str, format: str, size: tuple[int, ...]) -> tuple[tuple, dict]:
    if op == "encode":
        return (normal(size), format), {}
    codes = torch.arange(size[0] * size[1], dtype=torch.int32) % mxref.ELEMENT_FORMATS[format].code_count
    return (codes.to(torch.uint8).reshape(size), format), {}


def _unlike_oracle(op: str, format: str, given, result: torch.Tensor) -> str | None:
    x = given()[0][0][:ORACLE_ROWS].numpy()
    if op == "encode":
        return difference(result[:ORACLE_ROWS], torch.from_numpy(encode_float64(x, ELEMENTS[format])))
    return difference(result[:ORACLE_ROWS], values(decode_float64(x, ELEMENTS[format]), "float32"))


def test_elements(timed, contender):
    timed(contender)
