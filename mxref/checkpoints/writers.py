"""What each dialect's files hold beside the rows of its table: tensors of a weight in place, and the configs.

The way back of `checkpoint.py`, which places what it reads by the same rows, and of the config readers in `dialects.py`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mxref.checkpoints.dialects import CONTAINERS, DIALECTS, TORCHAO_DTYPES, Layout
from mxref.checkpoints.files import Output
from mxref.packing import to_layout

# Activations that the configs of a dialect can go with each format of weights; the first is what a model in floats gets.
_SAME_OR_NONE = {name: (name, None) for name in ("mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8_e4m3")}
ACTIVATIONS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "compressed-tensors": {"nvfp4": (None, "nvfp4"), **{name: _SAME_OR_NONE[name] for name in ("mxfp4", "mxfp8_e4m3")}},
    "modelopt": {"nvfp4": (None, "nvfp4"), "mxfp4": (None,), "mxfp8_e4m3": ("mxfp8_e4m3",)},
    "quark": {"nvfp4": (None, "nvfp4"), **_SAME_OR_NONE, "mxfp4": ("mxfp4", None, "mxfp6_e2m3", "mxfp6_e3m2")},
    "gpt-oss": {"mxfp4": (None,)},
    "torchao": {name: (name,) for name in ("mxfp4", "mxfp8_e4m3", "mxfp8_e5m2")},
}
FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}  # formats of the plain dialect

# Names of an expert's gate, up and down, by model type where they are not the usual ones, and the dialects that keep them.
_USUAL = ("gate_proj", "up_proj", "down_proj")
_EXPERT_NAMES = {"mixtral": (("w1", "w3", "w2"), ("plain", "modelopt", "quark"))}
# Models whose experts are one stack `[experts, in, out]` in floats, gate and up rows interleaved.
STACKING_MODELS = ("gpt_oss",)
_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)\.(\w+)(?=\.|$)")


@dataclass(frozen=True)
class Scheme:
    """What a written checkpoint is: its dialect, the formats of its weights and activations."""

    dialect: str
    format: str
    activations: str | None = None

    def layout(self, stacked: bool) -> Layout | None:
        """The row by which weights are written; None for floats, or where the dialect has none."""
        rows = [row for row in DIALECTS[self.dialect] if row.format == self.format and row.stacked == stacked]
        return rows[0] if rows else None

    def __str__(self) -> str:
        """In one word, as `Checkpoint.scheme`."""
        if self.dialect == "plain":
            return self.format
        return f"w_{self.format}_a_{self.activations}" if self.activations else f"w_{self.format}"


def placed(layout: Layout, packed: torch.Tensor, scales: torch.Tensor, tensor_scale, input_scale) -> dict[str, torch.Tensor]:
    """The tensors of one weight by suffix, from what a `BlockTensor` and a `QuantizedWeight` hold. Looks at no value."""
    if layout.code_blocks:
        bytes_a_block = layout.block.block_size * layout.block.element.bits // 8
        codes = packed.unflatten(-1, (-1, bytes_a_block))
    else:
        codes = packed.movedim(-1, layout.axis)
    parts = {layout.codes: codes, layout.scales: scales.movedim(-1, layout.axis)}
    if layout.scale_layout == "tile_128x4":  # torchao gives a tile the shape [32, 16]
        tiles = [-(-size // tile) * width for size, tile, width in zip(scales.shape, (128, 4), (32, 16))]
        parts[layout.scales] = to_layout(scales, layout.scale_layout).view(tiles)
    dtypes = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
    dtypes["U8"] = torch.uint8
    for suffix, dtype in ((layout.codes, layout.codes_dtype), (layout.scales, layout.scales_dtype[0])):
        parts[suffix] = parts[suffix].contiguous().view(dtypes[dtype])
    for suffix, scale in ((layout.tensor_scale, tensor_scale), (layout.input_scale, input_scale)):
        if suffix is not None and scale is not None:
            parts[suffix] = scale.reshape(layout.scalar) if scale.numel() == 1 else scale
    return parts


def expert_module(module: str, dialect: str, model_type: object) -> str:
    """The name of a module of an expert, or of a tensor of one, as `dialect` calls it; others as they are."""
    names, dialects = _EXPERT_NAMES.get(model_type if isinstance(model_type, str) else "", (_USUAL, ()))
    wanted, given = (names, _USUAL) if dialect in dialects else (_USUAL, names)

    def renamed(match: re.Match) -> str:
        part = match[2]
        return f"{match[1]}.{wanted[given.index(part)] if part in given else part}"

    return _EXPERT.sub(renamed, module)


def quantization_configs(scheme: Scheme, skipped: Sequence[str]) -> tuple[dict | None, dict | None]:
    """quantization_config of config.json, and hf_quant_config.json. `skipped`: modules of matrices that stay floats."""
    write = _CONFIGS.get(scheme.dialect)
    return (None, None) if write is None else write(scheme, list(skipped))


def _compressed_tensors(scheme: Scheme, skipped: list[str]) -> tuple[dict, None]:
    container = CONTAINERS[scheme.format]
    group = {
        "format": container,
        "targets": ["Linear"],
        "weights": _ct_arguments(scheme.format, dynamic=False),
        "input_activations": scheme.activations
        and _ct_arguments(scheme.activations, dynamic="local" if scheme.activations == "nvfp4" else True),
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": container,
        "config_groups": {"group_0": group},
        "ignore": skipped,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }, None


def _ct_arguments(name: str, dynamic: bool | str) -> dict:
    row = Scheme("compressed-tensors", name).layout(stacked=False)
    return {
        "num_bits": row.block.element.bits,
        "type": "float",
        "strategy": "tensor_group" if row.tensor_scale else "group",
        "group_size": row.block.block_size,
        "symmetric": True,
        "dynamic": dynamic,
        "scale_dtype": "torch.float8_e4m3fn" if row.tensor_scale else "torch.uint8",
        "zp_dtype": None,
        "actorder": None,
        "block_structure": None,
    }


MODELOPT = {"name": "modelopt", "version": "0.47.0"}  # whose layout it is: readers ask for the name


def _modelopt(scheme: Scheme, skipped: list[str]) -> tuple[dict, dict]:
    if scheme.format == "nvfp4":
        algorithm = "NVFP4" if scheme.activations else "W4A16_NVFP4"
    else:
        algorithm = {"mxfp4": "mxfp4", "mxfp8_e4m3": "MXFP8"}[scheme.format]
    block = Scheme("modelopt", scheme.format).layout(stacked=False).block
    size = {"group_size": block.block_size}
    group_size = size if scheme.format != "mxfp4" else {}
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": skipped, "producer": MODELOPT}
    if scheme.format != "mxfp8_e4m3":  # whose name says it all
        arguments = {"dynamic": False, "num_bits": block.element.bits, "type": "float", **size}
        group = {"input_activations": arguments if scheme.activations else None, "weights": arguments, "targets": ["Linear"]}
        config["config_groups"] = {"group_0": group}
    settings = {"quant_algo": algorithm, "kv_cache_quant_algo": None, **group_size, "exclude_modules": skipped}
    return config, {"producer": MODELOPT, "quantization": settings}


def _quark(scheme: Scheme, skipped: list[str]) -> tuple[dict, None]:
    whole = {
        "weight": _quark_spec(scheme.format, dynamic=False),
        "input_tensors": scheme.activations and _quark_spec(scheme.activations, dynamic=True),
        "output_tensors": None,
        "bias": None,
        "target_device": None,
    }
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": whole,
        "exclude": skipped,
        "algo_config": None,
        "softmax_quant_spec": None,
        "layer_type_quant_config": {},
        "layer_quant_config": {},
        "kv_cache_quant_config": {},
        "kv_cache_post_rope": False,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
    }, None


def _quark_spec(name: str, dynamic: bool) -> dict | list[dict]:
    row = Scheme("quark", name).layout(stacked=False)
    has_tensor_scale = row.tensor_scale is not None
    dtypes = {"nvfp4": "fp4", "mxfp8_e4m3": "fp8_e4m3"}
    spec = {
        "dtype": dtypes.get(name, name.removeprefix("mx")),
        "is_dynamic": dynamic,
        "qscheme": "per_group",
        "ch_axis": -1,
        "group_size": row.block.block_size,
        "block_size": None,
        "symmetric": None,
        "round_method": "half_even",
        "scale_type": "float32" if has_tensor_scale else "float",
        "zero_point_type": "int32",
        "scale_format": "float32" if has_tensor_scale else "e8m0",
        "scale_calculation_mode": None if has_tensor_scale else "even",
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "is_scale_quant": False,
        "enable_buffer_reuse": False,
        "max_input_numel": 1 << 22,
    }
    if not has_tensor_scale:
        return spec
    of_scales = dict(dtype="fp8_e4m3", is_dynamic=False, qscheme="per_tensor", ch_axis=None, group_size=None, symmetric=True)
    return [spec, spec | of_scales | dict(scale_format=None, observer_cls="PerTensorMinMaxObserver", is_scale_quant=True)]


def _gpt_oss(scheme: Scheme, skipped: list[str]) -> tuple[dict, None]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": skipped}, None


def _tagged(kind: str, data: object) -> dict:
    """A value in torchao's JSON."""
    return {"_type": kind, "_data": data}


def _torchao_settings(format: str, of_elements: str) -> dict:
    """What torchao's config and its tensors both say; `of_elements`: the name of the key for the elements' dtype."""
    dtype = next(dtype for dtype, name in TORCHAO_DTYPES.items() if name == format)
    return {
        of_elements: _tagged("torch.dtype", dtype),
        "block_size": Scheme("torchao", format).layout(stacked=False).block.block_size,
        "scaling_mode": _tagged("ScaleCalculationMode", "RCEIL"),
        "kernel_preference": _tagged("KernelPreference", "AUTO"),
    }


def _torchao(scheme: Scheme, skipped: list[str]) -> tuple[dict, None]:
    settings = _torchao_settings(scheme.format, "weight_dtype") | _torchao_settings(scheme.activations, "activation_dtype")
    return {
        "quant_method": "torchao",
        "quant_type": {"default": _tagged("MXDynamicActivationMXWeightConfig", settings) | {"_version": 1}},
        "modules_to_not_convert": skipped,
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
    }, None


def header_metadata(scheme: Scheme, dtype: str, outputs: Sequence[Output]) -> dict[str, str]:
    """What a header says of the tensors in its file; `dtype`: of what is decoded. Only torchao's readers ask for it."""
    if scheme.dialect != "torchao":
        return {}
    layout, found = scheme.layout(stacked=False), {}
    inputs = _torchao_settings(scheme.activations, "elem_dtype") | {"is_swizzled_scales": True}
    weight = {key: value for key, value in _torchao_settings(scheme.format, "elem_dtype").items() if key != "scaling_mode"}
    weight |= {"orig_dtype": _tagged("torch.dtype", dtype), "is_swizzled_scales": layout.scale_layout != "linear"}
    weight["act_quant_kwargs"] = _tagged("QuantizeTensorToMXKwargs", inputs)
    described = _tagged("MXTensor", weight) | {"_tensor_data_names": ["qdata", "scale"]}
    for output in outputs:
        stem = output.name.removesuffix(layout.codes).removesuffix(layout.scales)
        is_weight = stem != output.name
        found[stem + layout.weight if is_weight else output.name] = described if is_weight else {"_type": "Tensor"}
    texts = {name: json.dumps(facts) for name, facts in found.items()}
    return texts | {"tensor_names": json.dumps(list(found))}


_CONFIGS: dict[str, Callable[[Scheme, list[str]], tuple[dict, dict | None]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "quark": _quark,
    "gpt-oss": _gpt_oss,
    "torchao": _torchao,
}
