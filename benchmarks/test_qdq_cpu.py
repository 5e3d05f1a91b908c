"""CPU: quantize-dequantize of [4096, 4096], beside other libraries and a copy, in one run.

    make bench

Contenders are timed in turn within one process, so their ratios can be compared; absolute times depend on the
machine. A gate checks each of ours before it is timed. AMD Quark is timed where it is installed (`amd-quark`, with a C++
compiler and ninja: it builds its kernel when it is imported).
"""

import importlib.util
from functools import partial

import pytest
import torch

import mxref
from mxref.comparison import difference

torchao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
ct = pytest.importorskip("compressed_tensors.quantization")
ct_forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
ct_helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")


def mxref_qdq(format: str, recipe: str, *backends: str):
    def run(x: torch.Tensor) -> torch.Tensor:
        with mxref.use(*backends, strict=bool(backends)):
            return mxref.qdq(x, format, recipe=recipe)

    return run


def torchao_mxfp4(x: torch.Tensor) -> torch.Tensor:
    return torchao.MXTensor.to_mx(x, torch.float4_e2m1fn_x2, 32).dequantize(x.dtype)


def torchao_nvfp4(x: torch.Tensor) -> torch.Tensor:
    scale = nvfp4.per_tensor_amax_to_scale(x.abs().max())
    return nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale).dequantize(x.dtype)


def compressed_tensors(preset: str):
    arguments = ct.preset_name_to_scheme(preset, targets=["Linear"]).weights

    def run(x: torch.Tensor) -> torch.Tensor:
        global_scale = None
        if preset == "NVFP4":
            low, high = torch.aminmax(x)
            global_scale = ct_helpers.generate_gparam(low, high)
        module = torch.nn.Module()
        scale, zero_point = ct_helpers.compute_dynamic_scales_and_zp(x, arguments, module, global_scale=global_scale)
        return ct_forward.fake_quantize(x, scale, zero_point, arguments, global_scale=global_scale)

    return run


def quark_mxfp4(mode: str):
    """Quark's C++ kernel between its torch operations."""
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx
    from quark.torch.quantization.config.type import Dtype

    return partial(fake_quantize_mx, axis=-1, block_size=32, scale_calculation_mode=mode, mx_element_dtype=Dtype.fp4)


CONTENDERS = {
    "copy": torch.clone,
    "mxfp4 mxref ocp": mxref_qdq("mxfp4", "ocp"),
    "mxfp4 mxref ocp_even": mxref_qdq("mxfp4", "ocp_even"),
    "mxfp4 inductor ocp": mxref_qdq("mxfp4", "ocp", "inductor"),
    "mxfp4 inductor quark_even": mxref_qdq("mxfp4", "quark_even", "inductor"),
    "mxfp4 torchao": torchao_mxfp4,
    "mxfp4 compressed-tensors": compressed_tensors("MXFP4"),
    "nvfp4 mxref nvidia": mxref_qdq("nvfp4", "nvidia"),
    "nvfp4 inductor nvidia": mxref_qdq("nvfp4", "nvidia", "inductor"),
    "nvfp4 torchao": torchao_nvfp4,
    "nvfp4 compressed-tensors": compressed_tensors("NVFP4"),
}

if importlib.util.find_spec("quark"):
    CONTENDERS |= {"mxfp4 quark floor": quark_mxfp4("floor"), "mxfp4 quark even": quark_mxfp4("even")}
IN_BFLOAT16 = [name for name in CONTENDERS if name == "copy" or "inductor" in name or "quark" in name]


def gate(name: str, run, matrix: torch.Tensor) -> None:
    """What is timed must be right: ours equals dequantize(quantize), MXFP4 equals torchao's floor rule, and Quark's."""
    sample = matrix[:64]
    if "mxref" in name or "inductor" in name:
        format, _, recipe = name.split()
        expected = mxref.dequantize(mxref.quantize(sample, format, recipe=recipe), sample.dtype)
        assert difference(run(sample), expected) is None
    if name == "mxfp4 mxref ocp":
        assert torch.equal(run(sample), torchao_mxfp4(sample))
    if name == "mxfp4 quark even":
        assert torch.equal(run(sample), mxref.qdq(sample, "mxfp4", recipe="quark_even"))


@pytest.mark.parametrize(
    "name, dtype", [(name, "float32") for name in CONTENDERS] + [(name, "bfloat16") for name in IN_BFLOAT16]
)
def test_qdq(benchmark, matrix, name, dtype):
    run, x = CONTENDERS[name], matrix.to(getattr(torch, dtype))
    gate(name, run, x)
    benchmark.extra_info.update(op="qdq", contender=name, shape=[4096, 4096], dtype=dtype, device="cpu")
    benchmark.pedantic(run, args=(x,), rounds=7, warmup_rounds=1)
