"""Ops in a graph: under `torch.compile` and `torch.export` a call of an op is one opaque node.

The node is the custom op `mxref::call`. When the graph runs, it makes the ordinary call: kernels are chosen then, and the
bits are those of eager by construction. A compiler learns shapes and dtypes from `OUTLINES`, never from data; what is
wrong with a call is said when it runs.

A graph holds tensors, numbers and strings, but no records. A call is therefore written as its tensors, its integers and a
literal that says where they go and spells out every field of a record. Nothing is looked up by a handle, so a graph that
was stored means the same in another process.
"""

import ast
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch

from mxref import registry
from mxref.blocks import BlockTensor, fit_tensor_scale
from mxref.formats import BlockFormat, ElementFormat, block_format
from mxref.grid import Grid
from mxref.moe import ACTIVATIONS
from mxref.recipes import Hadamard, Recipe, resolve_recipe

# ---- what a call returns --------------------------------------------------------------------------------------------


class Outline(NamedTuple):
    """Shape and dtype of a tensor that a call returns, contiguous, on the device of the call's first tensor."""

    shape: Sequence[int]
    dtype: torch.dtype


def _like(x: torch.Tensor) -> Outline:
    return Outline(x.shape, x.dtype)


def _quantize(x, format, *, recipe=None, tensor_scale=None, axis=-1, seed=None) -> BlockTensor:
    return _quantized(tuple(x.shape), format, recipe, tensor_scale, axis)


def _quantized(shape: tuple[int, ...], format, recipe, tensor_scale, axis: int) -> BlockTensor:
    format, axes = block_format(format), len(shape)
    recipe = resolve_recipe(recipe, format)
    grid = Grid(shape, axis if axis < 0 else axis - axes, format.block_size, recipe.block_rows)
    if isinstance(tensor_scale, torch.Tensor):
        stored = Outline(fit_tensor_scale(tensor_scale, grid).shape, torch.float32)
    elif not format.tensor_scale or tensor_scale == "none":
        stored = None
    else:
        shapes = {"per_row": [1 if i == grid.axis else n for i, n in enumerate(shape, -axes)]}
        shapes["per_expert"] = [*shape[:1], *[1] * (axes - 1)]
        stored = Outline(shapes.get(tensor_scale, ()), torch.float32)
    others = [n for i, n in enumerate(shape, -axes) if i != grid.axis]
    packed = Outline((*others, -(-shape[grid.axis] * format.element.bits // 8)), torch.uint8)
    return _block_tensor(packed, shape[grid.axis], Outline(grid.scale_shape, torch.uint8), stored, format, recipe, grid.axis)


def _activate_quantize(hidden, format, *, activation="silu", recipe=None, tensor_scale=None, **_) -> BlockTensor:
    *leading, width = hidden.shape
    shape = (*leading, width // 2 if ACTIVATIONS[activation].gated else width)
    return _quantized(shape, format, recipe, tensor_scale, -1)


def _to_layout(tensor, layout) -> Outline:
    *leading, columns = tensor.shape
    if layout == "tile_128x4":
        return Outline((*leading[:-1], -(-leading[-1] // 128) * -(-columns // 4) * 512), tensor.dtype)
    return Outline((*leading, columns // 32, 16), tensor.dtype) if layout == "ggml_mxfp4" else _like(tensor)


def _moe_experts(x, w13, w2, topk_ids, topk_weights, *, combine=True, out_dtype=None, **_) -> Outline:
    return Outline(x.shape, out_dtype or x.dtype) if combine else Outline((*topk_ids.shape, x.shape[1]), torch.float32)


def _combine(slot_terms, *, out_dtype=torch.float32) -> Outline:
    terms = slot_terms if isinstance(slot_terms, torch.Tensor) else slot_terms[0]
    return Outline((terms.shape[0], terms.shape[2]), out_dtype)


OUTLINES: dict[str, Callable] = {
    "encode": lambda x, element, **_: Outline(x.shape, torch.uint8),
    "decode": lambda codes, element: Outline(codes.shape, torch.float32),
    "pack": lambda codes, bits: Outline((*codes.shape[:-1], -(-codes.shape[-1] * bits // 8)), torch.uint8),
    "unpack": lambda packed, bits, count: Outline((*packed.shape[:-1], count), torch.uint8),
    "to_layout": _to_layout,
    "from_layout": lambda data, layout, shape: Outline(shape, data.dtype),
    "quantize": _quantize,
    "dequantize": lambda q, dtype=torch.float32: Outline(q.shape, dtype),
    "qdq": lambda x, format, **_: _like(x),
    **dict.fromkeys(("exp", "sigmoid", "silu", "gelu_tanh", "relu2"), _like),
    "swiglu": lambda gate, up: _like(gate),
    "swiglu_oai": lambda gate, up, alpha=None, limit=None: _like(gate),
    "block_dot": lambda a_codes, b_codes, *_, **__: Outline((a_codes.shape[0], b_codes.shape[0]), torch.float32),
    "matmul": lambda a, b, *, out_dtype=torch.float32, **_: Outline((*a.shape[:-1], b.shape[0]), out_dtype),
    "activate_quantize": _activate_quantize,
    "route": lambda logits, k, **_: tuple(Outline((logits.shape[0], k), dtype) for dtype in (torch.int64, torch.float32)),
    "moe_experts": _moe_experts,
    "combine": _combine,
}


def _outline(name: str, args: Sequence, kwargs: dict) -> Any:
    try:
        return OUTLINES[name](*args, **kwargs)
    except (TypeError, ValueError, LookupError, AttributeError):
        return Outline((), torch.float32)  # a wrong call, as it will say itself when it runs


def _filled(outline: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The result that `outline` is of, made of `tensors`."""
    if isinstance(outline, Outline):
        return next(tensors)
    if isinstance(outline, BlockTensor):
        return _block_tensor(*[_filled(getattr(outline, field.name), tensors) for field in fields(outline)])
    return tuple(tensors) if isinstance(outline, tuple) else outline


def _leaves(result: Any) -> list:
    """The tensors of an op's result, or their outlines, in the order in which `_filled` takes them."""
    if isinstance(result, BlockTensor):
        result = (result.packed, result.scales, result.tensor_scale)
    single = isinstance(result, (torch.Tensor, Outline))
    return [result] if single else [leaf for leaf in result if leaf is not None]


def _block_tensor(*values) -> BlockTensor:
    """`BlockTensor.trusted`, in a way that torch.compile can follow."""
    made = object.__new__(BlockTensor)
    for field, value in zip(fields(made), values):
        object.__setattr__(made, field.name, value)
    return made


# ---- a call as tensors, integers and a literal ----------------------------------------------------------------------

_RECORDS = {cls.__name__: cls for cls in (ElementFormat, BlockFormat, Hadamard, Recipe)}
_CONSTANTS = {**_RECORDS, "float": float.fromhex, "dtype": functools.partial(getattr, torch), "constants": lambda *v: v}


def _written(value: Any, tensors: list, ints: list | None) -> Any:
    """`value` as a literal of tagged tuples, its tensors and integers appended; integers stay in it where `ints` is None."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ("tensor",)
    if isinstance(value, (int, torch.SymInt)):
        if ints is None:
            return operator.index(value)
        ints.append(value)
        return ("int",)
    if isinstance(value, float):
        return "float", value.hex()
    if isinstance(value, torch.dtype):
        return "dtype", repr(value)[len("torch.") :]
    kind = type(value).__name__
    if isinstance(value, (tuple, list)):
        kind = "constants" if ints is None else "tuple"
    elif kind in _RECORDS or kind == "BlockTensor":
        ints = ints if kind == "BlockTensor" else None
        value = [getattr(value, field.name) for field in fields(value)]
    else:
        raise TypeError(kind)
    return (kind, *[_written(item, tensors, ints) for item in value])


@functools.lru_cache(maxsize=1024)
def _parsed(literal: str) -> Any:
    return _with_constants(ast.literal_eval(literal))


def _with_constants(node: Any) -> Any:
    """A parsed literal in which constants and records stand themselves."""
    if not isinstance(node, tuple):
        return node
    kind, *rest = map(_with_constants, node)
    return _CONSTANTS[kind](*rest) if kind in _CONSTANTS else (kind, *rest)


def _read(node: Any, tensors: Iterator, ints: Iterator) -> Any:
    """The value that `_written` wrote."""
    if not isinstance(node, tuple):
        return node
    kind, *rest = node
    if kind in ("tensor", "int"):
        return next(tensors if kind == "tensor" else ints)
    values = tuple(_read(item, tensors, ints) for item in rest)
    return _block_tensor(*values) if kind == "BlockTensor" else values


def _call_of(tensors: Sequence, ints: Sequence, literal: str) -> tuple[str, tuple, dict]:
    """Name, positional and keyword arguments of a written call."""
    name, names, values = _parsed(literal)
    values = _read(values, iter(tensors), iter(ints))
    positional = len(values) - len(names)
    return name, values[:positional], dict(zip(names, values[positional:]))


def call_in_graph(name: str, args: tuple, kwargs: dict) -> Any:
    """Put a call of an op into the graph that is being traced, or make it for all that `torch.vmap` maps over."""
    tensors, ints = [], []

    def placed(argument: str, value: Any) -> Any:
        wide = argument == "seed" and isinstance(value, int) and value >= 1 << 63  # a graph's integers are of 64 bits
        return _written(value, tensors, None if wide else ints)

    try:
        written = ("tuple", *[placed("", value) for value in args], *[placed(*item) for item in kwargs.items()])
    except TypeError:
        written = None
    if not torch.compiler.is_compiling() and (written is None or name not in OUTLINES):
        raise TypeError(f"{name} under torch.vmap: call it in a loop, since what it takes or returns is no stack of tensors")
    if written is None or name not in OUTLINES:
        return torch.compiler.disable(registry.OPS[name])(*args, **kwargs)  # between two graphs
    outline = _outline(name, args, kwargs)
    if isinstance(outline, BlockTensor):
        tensors = [tensor.detach() for tensor in tensors]  # else a gradient would be asked of its tensor scale
    outputs = torch.ops.mxref.call(tensors, ints, repr((name, ("constants", *kwargs), written)))
    return _filled(outline, iter(outputs))


# ---- the custom ops -------------------------------------------------------------------------------------------------

_TAGS = (torch.Tag.cudagraph_unsafe,)  # ops look at values


@torch.library.custom_op("mxref::call", mutates_args=(), tags=_TAGS)
def _call(tensors: Sequence[torch.Tensor], ints: Sequence[int], literal: str) -> list[torch.Tensor]:
    name, args, kwargs = _call_of(tensors, ints, literal)
    with torch.no_grad():
        return _owned(_leaves(registry.OPS[name](*args, **kwargs)), tensors)


def _owned(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`outputs`, contiguous and none of them a part of `inputs`, as a graph demands."""
    taken, outputs = {x.untyped_storage().data_ptr() for x in inputs}, [output.contiguous() for output in outputs]
    return [output.clone() if output.untyped_storage().data_ptr() in taken else output for output in outputs]


@_call.register_vmap
def _(info, in_dims, tensors, ints, literal):
    """Call by call, so that each means what it would alone: a computed tensor scale is of one."""
    if info.batch_size == 0:
        raise ValueError("torch.vmap over an axis of size 0: expected at least one call")
    kinds, watched = torch._C._functorch.TransformType, torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    around = {transform.key() for transform in torch._C._functorch.get_interpreter_stack()}
    if kinds.Jvp in around or (kinds.Grad in around and watched):
        raise TypeError(
            f"{_parsed(literal)[0]} under torch.vmap within torch.func.grad, jvp or another derivative: expected the "
            "derivative within the vmap, torch.vmap(torch.func.grad(f)), or backward(), or a loop instead of vmap"
        )
    alone = [[x if dim is None else x.select(dim, i) for x, dim in zip(tensors, in_dims[0])] for i in range(info.batch_size)]
    results = [torch.ops.mxref.call(given, ints, literal) for given in alone]
    outputs = [torch.stack(parts) for parts in zip(*results)]
    return outputs, [0] * len(outputs)


@_call.register_fake
def _(tensors, ints, literal):
    outlines = _leaves(_outline(*_call_of(tensors, ints, literal)))
    return [torch.empty(shape, dtype=dtype, device=tensors[0].device) for shape, dtype in outlines]


# not a `custom_op`, within which autograd would not record
_BACKWARD = "(Tensor[] tensors, SymInt[] ints, str literal, Tensor[] grads, int[] wanted) -> Tensor[]"
torch.library.define("mxref::call_backward", _BACKWARD, tags=_TAGS)


@torch.library.impl("mxref::call_backward", "default")
def _call_backward(tensors, ints, literal, grads, wanted):
    """The gradients of `tensors[i]` for i in `wanted`, as eager autograd finds them when the call is made again."""
    with torch.enable_grad():
        tensors = [tensor.detach().requires_grad_(i in wanted) for i, tensor in enumerate(tensors)]
        name, args, kwargs = _call_of(tensors, ints, literal)
        outputs = [leaf for leaf in _leaves(registry.OPS[name](*args, **kwargs)) if leaf.is_floating_point()]
    outputs, output_grads = zip(*[pair for pair in zip(outputs, grads) if pair[0].requires_grad])
    found = torch.autograd.grad(outputs, [tensors[i] for i in wanted], output_grads, materialize_grads=True)
    return _owned(found, [*tensors, *grads])


@torch.library.register_fake("mxref::call_backward")
def _(tensors, ints, literal, grads, wanted):
    return [torch.empty(tensors[i].shape, dtype=tensors[i].dtype, device=tensors[i].device) for i in wanted]


def _remember(ctx, inputs, output):
    tensors, *ctx.rest = inputs
    name, args, kwargs = _call_of(*inputs)
    ctx.straight_through = name == "qdq" and kwargs.get("gradient") != "clipped"
    if ctx.straight_through:
        x = args[0] if args else kwargs["x"]
        ctx.x = [tensor is x for tensor in tensors].index(True)
    else:
        ctx.save_for_backward(*tensors)


def _backward(ctx, grads):
    needed = ctx.needs_input_grad[0]
    if ctx.straight_through:
        found = {ctx.x: grads[0]}
    else:
        grads = [grad for grad in grads if grad.is_floating_point()]
        wanted = [i for i, is_needed in enumerate(needed) if is_needed]
        found = torch.ops.mxref.call_backward(list(ctx.saved_tensors), *ctx.rest, grads, wanted)
        found = dict(zip(wanted, found))
    no_ints = None if ctx.rest[0] else []  # torch takes an empty list for one of tensors
    return [found.get(i) for i in range(len(needed))], no_ints, None


_call.register_autograd(_backward, setup_context=_remember)
registry.call_in_graph = call_in_graph
