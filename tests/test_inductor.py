"""The inductor backend: the reference's bits from compiled code, one compilation for all sizes, refusals with a reason."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

import mxref
from accel.inductor import _launch
from mxref.comparison import difference
from mxref.conformance.cases import cases
from mxref.registry import kernel

LACKS = kernel("qdq", "inductor").requires()
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
compiles = pytest.mark.skipif(LACKS is not None, reason=str(LACKS))


def compiled(op, *args, **kwargs):
    with mxref.use("inductor", strict=True):
        return op(*args, **kwargs)


def failures(op: str, prefix: str, dtypes: str) -> dict[str, str]:
    """What differs, by case, among those whose id starts with `prefix`."""
    found = {}
    for case in cases(op):
        rotated = "hadamard" in case.id  # which inductor leaves to others
        if case.id.startswith(prefix) and case.dtype in dtypes.split() and not rotated:
            (args, kwargs), function = case.arguments(), getattr(mxref, op)
            found[case.id] = difference(compiled(function, *args, **kwargs), function(*args, **kwargs))
    assert len(found) >= 3
    return {id: text for id, text in found.items() if text is not None}


@compiles
@pytest.mark.parametrize(
    "format, dtypes",
    [
        ("mxfp4", "float32 bfloat16 float16"),
        ("mxfp6_e2m3", "float16"),
        ("mxfp6_e3m2", "bfloat16"),
        ("mxfp8_e4m3", "float32"),
        ("mxfp8_e5m2", "float16"),
        ("mxint8", "bfloat16"),
        ("nvfp4", "float32"),
    ],
)
def test_qdq_has_the_reference_bits(format, dtypes):
    assert failures("qdq", f"{format}-{mxref.BLOCK_FORMATS[format].default_recipe}-", dtypes) == {}


@compiles
@pytest.mark.parametrize("recipe", ("quark_even", "ocp_toward_zero"))
def test_qdq_with_another_recipe(recipe):
    assert failures("qdq", f"mxfp4-{recipe}-", "float32") == {}


@compiles
@pytest.mark.parametrize("format, dtype", [("mxfp4", "bfloat16"), ("mxfp6_e3m2", "float32"), ("mxint8", "float16")])
def test_quantize_has_the_reference_bits(format, dtype):
    assert failures("quantize", f"{format}-ocp-", dtype) == {}


@compiles
@pytest.mark.parametrize("format, dtype", [("mxfp6_e2m3", "float32"), ("nvfp4", "bfloat16"), ("mxfp4", "float32")])
def test_dequantize_has_the_reference_bits(format, dtype):
    assert failures("dequantize", f"{format}-", dtype) == {}


@compiles
@pytest.mark.parametrize(
    "format, dtype",
    [("mxfp4", torch.float32), ("mxfp4", torch.bfloat16), ("mxfp4", torch.float16), ("nvfp4", torch.bfloat16)],
)
def test_subnormals_zeros_and_nans(format, dtype):
    info = torch.finfo(dtype)
    tiny = info.smallest_normal * info.eps  # the smallest subnormal
    edges = torch.tensor([tiny, -tiny, info.smallest_normal, -0.0, 0.0, info.max, -info.max, torch.nan, torch.inf, 1e-3])
    size = mxref.BLOCK_FORMATS[format].block_size
    x = torch.zeros(12, size)
    x[:10, 1] = x[10, :10] = edges
    x[11, :2] = torch.tensor([tiny, -tiny / 2])
    x[:, 2] = -0.0
    x = x.to(dtype)
    for scale in ("none", None) if format == "nvfp4" else (None,):
        expected = mxref.qdq(x, format, tensor_scale=scale)
        assert difference(compiled(mxref.qdq, x, format, tensor_scale=scale), expected) is None
        assert expected[7].isnan().all() and expected[0, 2].signbit()


@compiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ("mxfp4", "nvfp4"))
def test_every_byte_under_every_scale(format, dtype):
    """256 bytes by 256 or 128 scales: NaN, products that overflow, subnormal ones; in several pieces."""
    block = mxref.BLOCK_FORMATS[format]
    packed = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None] & (255 if format == "mxfp4" else 127)
    scales = scales.expand(-1, 512 // block.block_size).contiguous()
    for tensor_scale in (None,) if format == "mxfp4" else (torch.tensor(3e38), torch.tensor(1e-44)):
        q = mxref.BlockTensor(packed, 512, scales, tensor_scale, format, block.default_recipe)
        assert difference(compiled(mxref.dequantize, q, dtype), mxref.dequantize(q, dtype)) is None


@compiles
@pytest.mark.parametrize("shape", [(300, 512), (3, 70), (5, 33), (2, 3, 64), (0, 64)])
def test_codes_are_packed_as_the_reference_packs_them(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for axis in (-1, -2):
        assert difference(compiled(mxref.quantize, x, "mxfp4", axis=axis), mxref.quantize(x, "mxfp4", axis=axis)) is None


@compiles
@pytest.mark.parametrize("format", ("mxfp4", "nvfp4"))
def test_a_new_size_compiles_nothing(format):
    torch._dynamo.reset()  # whatever other tests have compiled
    _launch._compiled.cache_clear()
    for x in (torch.randn(4, 64)[1:], torch.randn(0, 64)):  # within its memory; empty, which has a scale of its own
        compiled(mxref.qdq, x, format)
    before = counters["stats"]["unique_graphs"]
    for shape in ((5, 64), (128, 32), (2, 3, 70), (1, 1), (0, 32), (3, 0), (64,)):
        for x in (torch.randn(shape), torch.randn(2, *shape)[1]):
            assert difference(compiled(mxref.qdq, x, format), mxref.qdq(x, format)) is None
    assert counters["stats"]["unique_graphs"] == before


@compiles
def test_gradients_pass_through():
    x = torch.randn(4, 64, requires_grad=True)
    compiled(mxref.qdq, x, "mxfp4").sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))


def test_without_a_compiler_it_says_so():
    before = torch._inductor.config.cpp.cxx
    with torch._inductor.config.patch({"cpp.cxx": (None, "no-such-compiler")}):  # monkeypatch would delete what it sets back
        assert "no-such-compiler" in kernel("qdq", "inductor").requires()
    assert torch._inductor.config.cpp.cxx == before  # other tests of this process compile


KNOWN = [("ocp_mse", "searches"), ("ocp_ceil", None), ("ocp_even", None), ("quark_even_mxfp8", None)]
PRODUCERS = [("torchao_floor", "a producer's faults"), ("compressed_tensors_mxfp8", "a producer's faults")]


@pytest.mark.parametrize("recipe, reason", KNOWN + PRODUCERS)
def test_refusals_say_why(recipe, reason):
    found = kernel("quantize", "inductor").accepts(torch.zeros(1, 32), "mxfp8_e4m3", recipe=recipe)
    assert found is None if reason is None else reason in found


@pytest.mark.parametrize("backend", ["inductor", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("op", ["quantize", "qdq"])
@pytest.mark.parametrize(
    "field, value",
    [("rounding", "ties_toward_zero"), ("scale_rule", "rfloor"), ("scale_rule", "even_one_bit")]
    + [("encode_order", "modelopt"), ("scale_min", 0.5), ("element_max", 4.0), ("search", "four_over_six_max")],
)
def test_kernels_refuse_what_they_do_not_know(backend, op, field, value):
    base = "ocp" if field in ("rounding", "scale_rule") else "nvidia"
    recipe = replace(mxref.RECIPES[base], name="mine", **{field: value})
    format = "mxfp4" if base == "ocp" else "nvfp4"
    refused = kernel(op, backend).accepts(torch.zeros(1, 32), format, recipe=recipe)
    assert field in refused or "searches" in refused


@pytest.mark.parametrize("backend", ["inductor", pytest.param("triton", marks=needs_triton)])
def test_kernels_refuse_a_producers_own_way_to_decode(backend):
    x = torch.randn(2, 32)
    for format, recipe in (("nvfp4", "modelopt_nvfp4"), ("mxfp4", "triton_kernels_git_up")):
        q = mxref.quantize(x, format, recipe=recipe)
        assert "own way to decode" in kernel("dequantize", backend).accepts(q)
    q = mxref.quantize(x, "mxfp4", recipe="torchao_floor")
    assert kernel("dequantize", backend).accepts(q) is None
