"""Producers: the quantizers of other projects as rows of data.

What a producer chose is a field of its row like any other recipe's; what is wrong in it is among its `faults`, steps of
`mxref.faults`. Every row gives what the producer gave, bit for bit; `benchmarks/results/producers.json` is the record.
"""

from typing import Any

_VLLM = dict(scale_rule="amax", decode_order="block_over_tensor", inf="saturate", negative_zero="drop_quotient")
_TORCHAO = dict(inf="saturate", format=("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"),
                faults=("inf_as_exponent_128", "half_at_scale_byte_0", "torchao_nan"))  # fmt: skip
_CT = dict(inf="saturate", faults=("rounds_to_inf", "nan_block_scale_0"))
_ZERO_TENSOR = ("nan_reaches_tensor_scale", "tensor_scale_0")

_QUARK = (
    ("", ("log2_power_of_input",), ", and no negative zeros",
     dict(negative_zero="drop", format=("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2"))),
    ("_mxfp8", ("log2_power_of_input",), "", dict(format=("mxfp8_e4m3", "mxfp8_e5m2"))),
    ("_mxint8", ("log2_power_of_input", "int8_step_is_normal"), "", dict(format="mxint8")),
)  # fmt: skip

_TE = dict(scale_rule="amax", negative_zero="drop_quotient", format="nvfp4",
           faults=("nan_reaches_tensor_scale", "largest_float_at_scale_0", "nan_tensor"))  # fmt: skip
_TE_SEARCH = dict(encode_order="four_over_six", faults=(*_TE["faults"], "error_by_amax"))
_FOUROVERSIX = dict(scale_rule="amax", encode_order="four_over_six", negative_zero="drop_quotient", format="nvfp4",
                    faults=("nan_reaches_tensor_scale", "tensor_scale_overflows", "divided_by_0", "unclamped",
                            "nan_tensor_negative"))  # fmt: skip
_46 = dict(scale_max=256.0, faults=(*_FOUROVERSIX["faults"], "error_unclamped"))
_TRITON = {
    "formats": ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2"),
    "up": ("scale_byte_1_or_more", "special_times_0", "scale_bytes_as_float_bits"),
    "down": ("zeros_at_scale_byte_0", "special_times_0", "scale_bytes_as_float_bits"),
}
_MICROXCALING = dict(scale_rule="floor", negative_zero="drop_quotient")
_MICROXCALING_LOG2 = ("log2_of_input", "zeros_as_smallest_normal", "element_power_overflows")

_ROWS = (
    dict(name="vllm_torch", encode_order="vllm_torch", **_VLLM,
         summary="vLLM's NVFP4 emulation, PyTorch path: reciprocal of a reciprocal; a quotient of -0 becomes +0"),
    dict(name="vllm_triton", encode_order="vllm_triton", **_VLLM,
         summary="vLLM's NVFP4 emulation, Triton path: gs / block scale; a quotient of -0 becomes +0"),
    dict(name="compressed_tensors_mxfp4", scale_rule="even", negative_zero="drop_quotient", format="mxfp4", **_CT,
         summary="as ocp_even; an input of -0 becomes +0"),
    dict(name="compressed_tensors_mxfp6", scale_rule="even", format="mxfp6_e2m3", **_CT, summary="as ocp_even"),
    dict(name="compressed_tensors_mxfp8", scale_rule="even_one_bit", format="mxfp8_e4m3", **_CT,
         summary="as ocp_even with the threshold of FP4, 1.75, instead of 1.9375"),
    dict(name="compressed_tensors_nvfp4", scale_rule="amax", encode_order="compressed_tensors", format="nvfp4",
         decode_order="block_over_tensor", amax_dtype="input", negative_zero="drop_quotient",
         faults=("nan_reaches_tensor_scale", "scale_0_becomes_eighth"),
         summary="divides by scale / (2688 / amax); in bfloat16 and float16 so are the tensor scale and amax / 6"),
    dict(name="microxcaling_nearest", rounding="ties_away", **_MICROXCALING, faults=(*_MICROXCALING_LOG2, "adds_half"),
         summary="as ocp, ties go away from zero; an input of -0 becomes +0"),
    dict(name="microxcaling_even", **_MICROXCALING, faults=(*_MICROXCALING_LOG2, "adds_half"),
         summary="as ocp; an input of -0 becomes +0"),
    dict(name="microxcaling_floor", rounding="toward_zero", **_MICROXCALING,
         faults=(*_MICROXCALING_LOG2, "element_log2_of_input"), summary="as ocp, elements rounded toward zero"),
    dict(name="modelopt_mxfp4", scale_rule="rceil", rounding="ties_toward_zero", format="mxfp4",
         faults=("log2", "zero_is_negative", "special_is_negative_zero"), summary="as ocp_rceil, ties go toward zero"),
    dict(name="modelopt_mxfp8", scale_rule="rceil", inf="saturate", format="mxfp8_e4m3",
         faults=("log2", "nan_block_scale_0"), summary="as ocp_rceil; an Inf becomes the largest element"),
    dict(name="modelopt_nvfp4", scale_rule="amax", encode_order="modelopt", scale_min=2.0**-9, zero_block="one",
         negative_zero="drop_quotient", format="nvfp4",
         faults=(*_ZERO_TENSOR, "nan_is_max", "nan_scale", "negative_zero_decodes_positive"),
         summary="divides by scale * (amax / 2688); no block scale is 0: at least 2^-9, and 1 for a block of zeros"),
    dict(name="quark_even", scale_rule="even", inf="saturate", negative_zero="drop",
         summary="AMD Quark, and vLLM's MXFP4 and MXFP6 emulation, which calls it: even, and no negative zeros"),
    dict(name="quark_even_mxfp8", scale_rule="even", inf="saturate", format=("mxfp8_e4m3", "mxfp8_e5m2"),
         summary="AMD Quark: as ocp_even; an Inf becomes the largest element"),
    dict(name="quark_even_mxint8", scale_rule="even", inf="saturate", format="mxint8", faults=("int8_step_is_normal",),
         summary="AMD Quark: as ocp_even; an Inf becomes the largest element"),
    *(dict(_TE | others, name=f"te_ref{suffix}", summary=f"TransformerEngine's reference: {like}; an input of -0 becomes +0")
      for suffix, like, others in (
          ("", "as nvidia", {}),
          ("_2d", "as nvidia_16x16", dict(block_rows=16)),
          ("_4over6_mae448", "to 6 or 4 by absolute error", dict(_TE_SEARCH, search="four_over_six_mae")),
          ("_4over6_mse256", "to 6 or 4 by squared error", dict(_TE_SEARCH, search="four_over_six_mse", scale_max=256.0)),
      )),
    dict(name="te_ref_pow2", scale_rule="rceil", inf="saturate", negative_zero="drop_quotient", format="mxfp4",
         faults=("log2",), summary="TransformerEngine's reference with power-of-two scales: as ocp_rceil; an Inf saturates"),
    *(dict(_FOUROVERSIX | others, name=f"fouroversix_{mode}", summary=f"fouroversix, NVFP4: {like}")
      for mode, like, others in (
          ("static6", "block maximum to 6", {}),
          ("static4", "block maximum to 4", dict(element_max=4.0)),
          ("static6_2d", "block maximum to 6, one scale for 16 x 16", dict(block_rows=16)),
          ("mse", "to 6 or 4 by squared error", dict(_46, search="four_over_six_mse")),
          ("mse_2d", "to 6 or 4 by squared error, 16 x 16", dict(_46, search="four_over_six_mse", block_rows=16)),
          ("mae", "to 6 or 4 by absolute error", dict(_46, search="four_over_six_mae")),
          ("absmax", "to 6 or 4 by largest error", dict(_46, search="four_over_six_max")),
      )),
    *(dict(name=f"fouroversix_mxfp4_{mode}", scale_rule=rule, negative_zero="drop_quotient", format="mxfp4",
           faults=("scale_byte_1_or_more", "nan_wraps", "inf_over_inf"), summary=f"fouroversix: as {like}")
      for mode, rule, like in (("static6", "rceil", "ocp_rceil"), ("static4", "ceil", "ocp_ceil"))),
    dict(name="flashinfer_mxfp4", scale_rule="rfloor", rounding="ties_toward_zero", negative_zero="drop_quotient",
         zero_block="one", format="mxfp4", faults=("log2", "underflow_is_one", "nan_block_scale_1"),
         summary="FlashInfer's reference: the largest scale with max * scale <= amax; ties go toward zero"),
    dict(name="flashinfer_mxfp8", scale_rule="rfloor", zero_block="one", format="mxfp8_e4m3",
         faults=("log2", "underflow_is_one", "nan_block_scale_1"),
         summary="FlashInfer's reference: the largest scale with max * scale <= amax"),
    dict(name="flashinfer_nvfp4", scale_rule="amax", encode_order="flashinfer", decode_order="block_over_tensor",
         rounding="ties_toward_zero", negative_zero="drop_quotient", format="nvfp4",
         faults=("nan_block_scale_1",),
         summary="FlashInfer's reference: multiplies by the tensor scale, divides by the block's; ties go toward zero"),
    dict(name="gfloat", scale_rule="floor", inf="saturate", nan="raise",
         format=("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3", "mxfp8_e5m2"),
         summary="as ocp; an Inf becomes the largest element, a NaN raises"),
    dict(name="gfloat_mxint8", scale_rule="floor", inf="saturate", nan="raise", format="mxint8",
         faults=("int8_reaches_minus_2",), summary="as ocp; an Inf becomes the largest element, a NaN raises"),
    *(dict(name=f"triton_kernels_{version}", scale_rule=rule, faults=(*_TRITON[mode], *decoded),
           summary=f"triton_kernels: {like}", **others)
      for version, mode, rule, decoded, like, others in (
          ("vllm_up", "up", "rceil", (), "as ocp_rceil, ties go away from zero", dict(rounding="ties_away", format="mxfp4")),
          ("vllm_up_mxfp8", "up", "rceil", (), "as ocp_rceil", dict(format=("mxfp8_e4m3", "mxfp8_e5m2"))),
          ("vllm_down", "down", "rfloor", (), "the largest scale with max * scale <= amax, ties go away from zero",
           dict(rounding="ties_away", format="mxfp4")),
          ("vllm_down_mxfp8", "down", "rfloor", (), "the largest scale with max * scale <= amax",
           dict(format=("mxfp8_e4m3", "mxfp8_e5m2"))),
          ("git_up", "up", "rceil", ("overflow_saturates",), "as ocp_rceil", dict(format=_TRITON["formats"])),
          ("git_down", "down", "floor", ("overflow_saturates",), "as ocp", dict(format=_TRITON["formats"])),
      )),
    *(dict(name=f"quark_{rule}{suffix}", scale_rule=rule, faults=faults, summary=f"AMD Quark: as ocp{like}{more}", **others)
      for rule, like in (("floor", ""), ("ceil", "_ceil")) for suffix, faults, more, others in _QUARK),
    dict(name="torchao_floor", scale_rule="floor", **_TORCHAO, summary="as ocp"),
    dict(name="torchao_ceil", scale_rule="ceil", **_TORCHAO, summary="as ocp_ceil"),
    dict(name="torchao_even", scale_rule="even", **_TORCHAO, summary="as ocp_even"),
    dict(_TORCHAO, name="torchao_rceil", scale_rule="rceil", faults=("log2", "unscaled_at_scale_byte_0", "torchao_nan"),
         summary="as ocp_rceil, eager; an Inf becomes the largest element"),
    dict(name="torchao_nvfp4", scale_rule="amax", encode_order="torchao", scale_min=2.0**-6, format="nvfp4",
         faults=(*_ZERO_TENSOR, "torchao_nan_quotient", "torchao_nan_scale"),
         summary="multiplies by (1 / (amax / 2688)) / scale; block scales from 2^-6 up; one level: tensor_scale='none'"),
)  # fmt: skip

ROWS: dict[str, dict[str, Any]] = {row["name"]: row for row in _ROWS}
