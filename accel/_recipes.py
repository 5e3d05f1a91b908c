"""Which values of a recipe's fields the kernels know, whatever mxref may learn besides."""

from mxref.faults import FAULTS
from mxref.recipes import Recipe

_KNOWN = {
    "scale_rule": ("floor", "even", "ceil", "rceil", "amax"),
    "encode_order": ("nvidia", "vllm_torch", "vllm_triton", "exact"),
    "decode_order": ("block_times_tensor", "block_over_tensor"),
    "scale_min": (None,),
    "element_max": (None,),
    "amax_dtype": ("float32",),
    "rounding": ("nearest_even", "toward_zero", "ties_away", "away_from_zero", "stochastic"),
    "overflow": ("saturate", "special"),
    "negative_zero": ("keep", "drop_quotient", "drop"),
    "zero_block": ("zero_code", "one"),
    "inf": ("nan", "saturate"),
    "search": ("none", "mse", "four_over_six_mse", "four_over_six_mae"),
}


def unknown_to_encode(recipe: Recipe) -> str | None:
    """Why no kernel encodes by a recipe, or None."""
    if recipe.faults:
        return "a producer's faults are reproduced by the reference alone"
    for name, values in _KNOWN.items():
        if getattr(recipe, name) not in values:
            return f"{name}={getattr(recipe, name)!r} is the reference's alone"
    return None


def unknown_to_decode(recipe: Recipe) -> str | None:
    """Why no kernel decodes what a recipe made, or None."""
    if any(FAULTS[name].decodes for name in recipe.faults):
        return "a producer's own way to decode is reproduced by the reference alone"
    known = recipe.decode_order in _KNOWN["decode_order"]
    return None if known else f"decode_order={recipe.decode_order!r} is the reference's alone"


def unknown_rounding(rounding: str) -> str | None:
    """Why no kernel rounds elements so, or None."""
    return None if rounding in _KNOWN["rounding"] else f"rounding={rounding!r} is the reference's alone"
