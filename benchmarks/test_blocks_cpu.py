"""Block formats: quantize, dequantize and both of a matrix, beside torchao, compressed-tensors, AMD Quark and a copy.

AMD Quark is timed where it is installed (`amd-quark`, with a C++ compiler and ninja: it builds its kernel when it is
imported).
"""

import contextlib
import functools
import importlib.util
from collections.abc import Iterator
from functools import partial

import torch

import mxref
from benchmarks.contenders import (
    BLOCK_FORMATS,
    COPY,
    Contender,
    copying,
    corner,
    normal,
    of_op,
    peer,
    quantized_corner,
    unlike_corner,
    values,
)
from mxref.comparison import difference

DTYPES = {"qdq": ("float32", "bfloat16"), "quantize": ("bfloat16",), "dequantize": ("bfloat16",)}
TORCHAO = {"mxfp4": "float4_e2m1fn_x2", "mxfp8_e4m3": "float8_e4m3fn", "mxfp6_e2m3": "fp6_e2m3"}
PRESETS = {"mxfp4": "MXFP4", "nvfp4": "NVFP4"}  # of compressed-tensors


def contenders(quick: bool) -> Iterator[Contender]:
    size = (8, 128) if quick else (2048, 4096)
    for op, dtypes in DTYPES.items():
        for dtype in dtypes[:1] if quick else dtypes:
            yield copying(op, dtype, size)
            for format in ("mxfp4",) if quick else BLOCK_FORMATS:
                yield from of_format(op, format, dtype, size)


def of_format(op: str, format: str, dtype: str, size: tuple[int, int]) -> Iterator[Contender]:
    """Everyone who does `op` in `format`."""
    block, count, width = mxref.BLOCK_FORMATS[format], size[0] * size[1], getattr(torch, dtype).itemsize
    moved = 2 * count * width if op == "qdq" else count * width + int(count * block.bits_per_element / 8)
    row = Contender(op, format, dtype, size, floor=COPY, recipe=block.default_recipe, moved_bytes=moved)
    given = partial(_arguments, op, format, dtype, size)
    yield from of_op(row, given, partial(_unlike_oracle, op, format, dtype, size))
    x, expected = partial(normal, size, dtype), (lambda: mxref.qdq(normal(size, dtype), format)) if op == "qdq" else None
    for who, function in peers(op, format):
        yield peer(row, who, lambda function=function: function(x()), expected)


def peers(op: str, format: str) -> Iterator[tuple]:
    """Who else, and a function of x that gives what is timed."""
    with contextlib.suppress(ImportError):
        yield from _torchao(op, format)
    with contextlib.suppress(ImportError):
        if op == "qdq" and format in PRESETS:
            yield "compressed-tensors", _compressed_tensors(PRESETS[format])
    if op == "qdq" and format == "mxfp4" and importlib.util.find_spec("quark"):
        from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx
        from quark.torch.quantization.config.type import Dtype

        for mode in ("floor", "even"):
            options = dict(axis=-1, block_size=32, scale_calculation_mode=mode, mx_element_dtype=Dtype.fp4)
            yield f"AMD Quark {mode}", lambda x, options=options: partial(fake_quantize_mx, x, **options)


def _torchao(op: str, format: str) -> Iterator[tuple]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    if format not in (*TORCHAO, "nvfp4"):
        return
    element = TORCHAO.get(format)

    def to_blocks(x: torch.Tensor):
        if format == "nvfp4":
            return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max()))
        return MXTensor.to_mx(x, getattr(torch, element, element), 32)

    runs = {
        "quantize": lambda x: partial(to_blocks, x),
        "dequantize": lambda x: partial(to_blocks(x).dequantize, x.dtype),
        "qdq": lambda x: lambda: to_blocks(x).dequantize(x.dtype),
    }
    yield "torchao", runs[op]


def _compressed_tensors(preset: str):
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils.helpers import compute_dynamic_scales_and_zp, generate_gparam

    arguments = preset_name_to_scheme(preset, targets=["Linear"]).weights

    def run(x: torch.Tensor) -> torch.Tensor:
        of_tensor = generate_gparam(*torch.aminmax(x)) if preset == "NVFP4" else None
        scale, zero = compute_dynamic_scales_and_zp(x, arguments, torch.nn.Module(), global_scale=of_tensor)
        return fake_quantize(x, scale, zero, arguments, global_scale=of_tensor)

    return lambda x: partial(run, x)


@functools.lru_cache(maxsize=2)
def _arguments(op: str, format: str, dtype: str, size: tuple[int, int]) -> tuple[tuple, dict]:
    x = normal(size, dtype)
    return ((mxref.quantize(x, format), x.dtype) if op == "dequantize" else (x, format)), {}


def _unlike_oracle(op: str, format: str, dtype: str, size: tuple[int, int], result) -> str | None:
    expected = quantized_corner(normal(size, dtype), format)
    if op == "quantize":
        return unlike_corner(result, expected)
    return difference(corner(result), values(expected.decoded(dtype), dtype))


def test_blocks(timed, contender):
    timed(contender)
