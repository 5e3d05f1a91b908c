"""Calls that the reference refuses: of a valid call of each op, some arguments replaced by what is wrong."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import inf, nan

import torch

import mxref
from mxref.conformance import inputs

Wrong = dict[str, tuple[type[Exception], dict]]  # by label: the error, and the arguments that are replaced


def wrong_calls(op: str) -> Iterator[tuple[str, type[Exception], str, dict]]:
    """(label, error, format, arguments by name) of the calls of `op` that must be refused; none for an op without them."""
    if op in _WRONG:
        valid, wrong = _WRONG[op]()
        for label, (error, changes) in wrong.items():
            arguments = valid | changes
            yield label, error, str(arguments.get("format") or arguments.get("element") or "-"), arguments


def _stochastic(recipe: str) -> mxref.Recipe:
    return replace(mxref.RECIPES[recipe], name="stochastic", rounding="stochastic")


def _encode() -> tuple[dict, Wrong]:
    x = inputs.spread_normal(4, 64, seed=82)
    return {"x": x, "element": "e2m1"}, {
        "float64": (TypeError, {"x": x.double()}),
        "nan": (ValueError, {"x": x.masked_fill(x > 1, nan)}),
        "special": (ValueError, {"overflow": "special"}),
        "no_seed": (ValueError, {"rounding": "stochastic"}),
        "seed_of_nearest": (ValueError, {"seed": 1}),
        "seed_of_65_bits": (ValueError, {"rounding": "stochastic", "seed": 1 << 64}),
        "float_seed": (TypeError, {"rounding": "stochastic", "seed": 1.0}),
    }


def _decode() -> tuple[dict, Wrong]:
    codes = torch.arange(16, dtype=torch.uint8)
    return {"codes": codes, "element": "e2m1"}, {
        "int32": (TypeError, {"codes": codes.int()}),
        "code_16": (ValueError, {"codes": codes + 1}),
    }


def _quantize() -> tuple[dict, Wrong]:
    x, scales = inputs.spread_normal(4, 64, seed=82), torch.ones(4)
    return {"x": x, "format": "nvfp4"}, {
        "float64": (TypeError, {"x": x.double()}),
        "no_axes": (ValueError, {"x": x[0, 0]}),
        "axis": (ValueError, {"axis": 2}),
        "recipe": (ValueError, {"recipe": "ocp"}),
        "nan": (
            ValueError,
            {"x": x.masked_fill(x > 1, nan), "recipe": replace(mxref.RECIPES["nvidia"], name="no", nan="raise")},
        ),
        "tensor_scale_of_mx": (ValueError, {"format": "mxfp4", "tensor_scale": scales[0]}),
        "tensor_scale_nan": (ValueError, {"tensor_scale": scales[0] * nan}),
        "tensor_scale_0": (ValueError, {"tensor_scale": scales.index_fill(0, torch.tensor(3), 0.0)}),
        "tensor_scale_shape": (ValueError, {"tensor_scale": scales[:3]}),
        "tensor_scale_float64": (TypeError, {"tensor_scale": scales[0].double()}),
        "no_seed": (ValueError, {"recipe": _stochastic("nvidia")}),
        "seed_of_nearest": (ValueError, {"seed": 1}),
        "seed_of_65_bits": (ValueError, {"recipe": _stochastic("nvidia"), "seed": 1 << 64}),
    }


def _qdq() -> tuple[dict, Wrong]:
    valid, wrong = _quantize()
    return valid, wrong | {"gradient": (ValueError, {"gradient": "none"})}


def _dequantize() -> tuple[dict, Wrong]:
    return {"q": mxref.quantize(inputs.spread_normal(4, 64, seed=82), "nvfp4")}, {
        "float64": (TypeError, {"dtype": torch.float64}),
        "int32": (TypeError, {"dtype": torch.int32}),
        "tensor": (TypeError, {"q": torch.ones(4, 32, dtype=torch.uint8)}),
    }


def _function() -> tuple[dict, Wrong]:
    return {"x": torch.ones(4, 8)}, {"float64": (TypeError, {"x": torch.ones(4, 8, dtype=torch.float64)})}


def _swiglu() -> tuple[dict, Wrong]:
    gate = torch.ones(4, 8)
    return {"gate": gate, "up": gate}, {
        "float64": (TypeError, {"gate": gate.double(), "up": gate.double()}),
        "shapes": (ValueError, {"up": gate[:, :1]}),
        "dtypes": (ValueError, {"up": gate.half()}),
    }


def _swiglu_oai() -> tuple[dict, Wrong]:
    valid, wrong = _swiglu()
    wrong |= {f"alpha_{value}": (ValueError, {"alpha": value}) for value in (nan, inf, 10**39)}
    wrong |= {f"limit_{value}": (ValueError, {"limit": value}) for value in (nan, -1.0, -inf)}
    return valid, wrong | {"alpha_text": (TypeError, {"alpha": "1.702"}), "limit_none": (TypeError, {"limit": None})}


def _activate_quantize() -> tuple[dict, Wrong]:
    hidden = inputs.spread_normal(4, 64, seed=82)
    wrong = {name: given for name, given in _quantize()[1].items() if "x" not in given[1] and name != "axis"}
    return {"hidden": hidden, "format": "nvfp4"}, wrong | {
        "float64": (TypeError, {"hidden": hidden.double()}),
        "odd": (ValueError, {"hidden": hidden[:, 1:]}),
        "activation": (ValueError, {"activation": "swish"}),
        "gate_up": (ValueError, {"gate_up": "stacked"}),
    }


def _to_layout() -> tuple[dict, Wrong]:
    scales = torch.ones(8, 4, dtype=torch.uint8)
    return {"tensor": scales, "layout": "tile_128x4"}, {
        "int32": (TypeError, {"tensor": scales.int()}),
        "one_axis": (ValueError, {"tensor": scales[0]}),
    }


def _block_dot() -> tuple[dict, Wrong]:
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    return {"a_codes": codes, "b_codes": codes, "a_element": "e2m1", "b_element": "e2m1"}, {
        "int32": (TypeError, {"a_codes": codes.int()}),
        "code_16": (ValueError, {"b_codes": codes + 1}),
        "lengths": (ValueError, {"b_codes": codes[:, 1:]}),
    }


def _matmul() -> tuple[dict, Wrong]:
    x = inputs.spread_normal(4, 64, seed=82)
    a, b = mxref.quantize(x, "mxfp4"), mxref.quantize(x[:3], "mxfp4")
    return {"a": a, "b": b}, {
        "lengths": (ValueError, {"a": mxref.quantize(x[:, :32], "mxfp4")}),
        "lengths_of_rows": (ValueError, {"a": x[:, :32]}),
        "float64": (TypeError, {"a": x.double()}),
        "plain_b": (TypeError, {"b": x}),
        "out_dtype": (TypeError, {"out_dtype": torch.float64}),
        "bias_shape": (ValueError, {"bias": torch.ones(4)}),
        "bias_int32": (TypeError, {"bias": torch.ones(3, dtype=torch.int32)}),
        "semantics": (ValueError, {"semantics": "rowwise"}),
    }


def _route() -> tuple[dict, Wrong]:
    logits = inputs.spread_normal(4, 8, seed=82)
    return {"logits": logits, "k": 2}, {
        "k": (ValueError, {"k": 9}),
        "nan": (ValueError, {"logits": logits.masked_fill(logits > 1, nan)}),
    }


def _moe_experts() -> tuple[dict, Wrong]:
    x, ids, weights = inputs.spread_normal(4, 64, seed=82), torch.arange(8).reshape(4, 2) % 2, torch.ones(4, 2)
    w13, w2 = (mxref.quantize(inputs.spread_normal(2, rows, k, seed=83), "mxfp4") for rows, k in ((64, 64), (64, 32)))
    valid = {"x": x, "w13": w13, "w2": w2, "topk_ids": ids, "topk_weights": weights, "act_format": "mxfp4"}
    return valid, {
        "float64": (TypeError, {"x": x.double()}),
        "shapes": (ValueError, {"x": x[:, :32]}),
        "expert_2": (ValueError, {"topk_ids": ids + 1}),
        "expert_-1": (ValueError, {"topk_ids": ids - 1}),
        "expert_map": (ValueError, {"expert_map": torch.tensor([0, 2])}),
        "ids_of_others": (ValueError, {"topk_ids": ids[:3]}),
        "weights_bfloat16": (TypeError, {"topk_weights": weights.bfloat16()}),
        "bias13": (ValueError, {"bias13": torch.ones(2, 32)}),
        "top_2_on_input": (ValueError, {"apply_router_weight_on_input": True}),
        "tensor_scales_of_mx": (ValueError, {"act_tensor_scales": (weights[0, 0], weights[0, 0])}),
        "tensor_scale_nan": (ValueError, {"act_format": "nvfp4", "act_tensor_scales": (weights[0, 0], weights[0, 0] * nan)}),
        "act_format": (ValueError, {"act_format": "mxfp5"}),
        "out_dtype": (TypeError, {"out_dtype": torch.float64}),
    }


_WRONG: dict[str, Callable[[], tuple[dict, Wrong]]] = {
    "encode": _encode,
    "decode": _decode,
    "quantize": _quantize,
    "qdq": _qdq,
    "dequantize": _dequantize,
    **dict.fromkeys(("exp", "sigmoid", "silu", "gelu_tanh", "relu2"), _function),
    "swiglu": _swiglu,
    "swiglu_oai": _swiglu_oai,
    "activate_quantize": _activate_quantize,
    "to_layout": _to_layout,
    "block_dot": _block_dot,
    "matmul": _matmul,
    "route": _route,
    "moe_experts": _moe_experts,
}
