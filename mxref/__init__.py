"""mxref: the ground truth of block-scaled number formats (OCP MX and NVFP4), in plain PyTorch."""

from importlib import import_module

from mxref import compiled, functions  # noqa: F401
from mxref.blocks import BlockTensor, dequantize, qdq, quantize
from mxref.elements import decode, encode
from mxref.explain import Explanation, explain
from mxref.formats import BLOCK_FORMATS, ELEMENT_FORMATS, BlockFormat, ElementFormat
from mxref.matmul import block_dot, matmul
from mxref.moe import activate_quantize, combine, moe_experts, route
from mxref.packing import from_layout, pack, to_layout, unpack
from mxref.recipes import RECIPES, Hadamard, Recipe
from mxref.registry import explain_dispatch, use

__version__ = "0.1.0"

__all__ = ["ELEMENT_FORMATS", "BLOCK_FORMATS", "RECIPES", "ElementFormat", "BlockFormat", "Recipe", "Hadamard"]
__all__ += ["encode", "decode", "pack", "unpack", "to_layout", "from_layout", "BlockTensor", "quantize", "dequantize", "qdq"]
__all__ += ["functions", "block_dot", "matmul", "activate_quantize", "route", "moe_experts", "combine"]
__all__ += ["explain", "Explanation", "use", "explain_dispatch"]


def __getattr__(name: str) -> object:
    if name == "load_checkpoint":  # needs an extra: imported when it is looked up
        return import_module("mxref.checkpoints").load_checkpoint
    raise AttributeError(f"module 'mxref' has no attribute {name!r}")
