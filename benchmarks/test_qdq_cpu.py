"""CPU: quantize-dequantize of [4096, 4096] float32, beside other libraries and a copy, in one run.

    make bench

Contenders are timed in turn within one process, so their ratios can be compared; absolute times depend on the
machine. A gate checks each of ours before it is timed.
"""

import pytest
import torch

import mxref

torchao = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
ct = pytest.importorskip("compressed_tensors.quantization")
ct_forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
ct_helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")


def mxref_qdq(format: str, recipe: str):
    return lambda x: mxref.qdq(x, format, recipe=recipe)


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


CONTENDERS = {
    "copy": torch.clone,
    "mxfp4 mxref ocp": mxref_qdq("mxfp4", "ocp"),
    "mxfp4 mxref ocp_even": mxref_qdq("mxfp4", "ocp_even"),
    "mxfp4 torchao": torchao_mxfp4,
    "mxfp4 compressed-tensors": compressed_tensors("MXFP4"),
    "nvfp4 mxref nvidia": mxref_qdq("nvfp4", "nvidia"),
    "nvfp4 torchao": torchao_nvfp4,
    "nvfp4 compressed-tensors": compressed_tensors("NVFP4"),
}


def gate(name: str, run, matrix: torch.Tensor) -> None:
    """What is timed must be right: ours equals dequantize(quantize), MXFP4 equals torchao's floor rule."""
    sample = matrix[:64]
    if "mxref" in name:
        format, _, recipe = name.split()
        assert torch.equal(run(sample), mxref.dequantize(mxref.quantize(sample, format, recipe=recipe)))
    if name == "mxfp4 mxref ocp":
        assert torch.equal(run(sample), torchao_mxfp4(sample))


@pytest.mark.parametrize("name", CONTENDERS)
def test_qdq(benchmark, matrix, name):
    run = CONTENDERS[name]
    gate(name, run, matrix)
    benchmark.extra_info.update(op="qdq", contender=name, shape=[4096, 4096], dtype="float32", device="cpu")
    benchmark.pedantic(run, args=(matrix,), rounds=7, warmup_rounds=1)
