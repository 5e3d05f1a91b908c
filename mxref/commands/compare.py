"""`mxref compare`: where two recipes give other bytes for the same tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from mxref.blocks import BlockTensor, dequantize, quantize
from mxref.elements import FLOAT_DTYPES, check_float
from mxref.formats import BLOCK_FORMATS, BlockFormat, block_format
from mxref.recipes import RECIPES, Recipe, resolve_recipe

FILE_TYPES = (".npy", ".npz", ".safetensors", ".pt")
BLOCKS_SHOWN, BLOCKS_LISTED = 4, 1000  # of those that differ: in text, in JSON
TENSORS_SHOWN = 8  # of a file that holds several
_ROW = "{:>14}" + 2 * "  {:>6} {:>11} {:>14}"  # x, and by each recipe code, value and decoded value
_HEAD = "{:>14}" + 2 * "  {:>33}"


@dataclass(frozen=True)
class ElementPair:
    """One element by both recipes."""

    x: float
    codes: tuple[int, int]
    values: tuple[float, float]
    decoded: tuple[float, float]
    differs: bool


@dataclass(frozen=True)
class BlockPair:
    """A block that differs, at `index` of rows of blocks; a block that spans rows is listed a row at a time."""

    index: tuple[int, ...]
    scale_codes: tuple[int, int]
    scales: tuple[float, float]
    elements: tuple[ElementPair, ...]

    def text(self, recipes: tuple[str, str]) -> str:
        """The block as a table, under the names of the two."""
        scales = [f"0x{code:02X} = {value:.9g}" for code, value in zip(self.scale_codes, self.scales)]
        same = self.scale_codes[0] == self.scale_codes[1]
        where = ", ".join(map(str, self.index))
        lines = [f"block [{where}], scale code {scales[0]}" + ("" if same else f" against {scales[1]}")]
        shown = [e for e in self.elements if e.differs]
        if shown:
            lines += [_HEAD.format("", *recipes), _ROW.format("x", *("code", "value", "decoded") * 2)]
        for e in shown:
            both = zip(e.codes, e.values, e.decoded)
            cells = [text for code, value, decoded in both for text in (f"0x{code:02X}", f"{value:.5g}", f"{decoded:.8g}")]
            lines.append(_ROW.format(f"{e.x:.8g}", *cells))
        if len(shown) < len(self.elements):
            lines.append(f"{len(self.elements) - len(shown)} elements are the same")
        return "\n".join(lines)


@dataclass(frozen=True)
class RecipeComparison:
    """What differs between two recipes. Tensor scales are shown but not compared: each is in its recipe's own direction.

    `scale_bytes`, `codes`, `values` (decoded) and `differing` (blocks) count all; `blocks` are the first of them.
    """

    format: str
    recipes: tuple[str, str]
    shape: tuple[int, ...]
    tensor_scales: tuple[float | None, float | None]
    scale_bytes: int
    codes: int
    values: int
    differing: int
    blocks: tuple[BlockPair, ...]

    @property
    def equal(self) -> bool:
        """Whether every scale byte, code and decoded value is the same, bit by bit, NaN like NaN."""
        return not (self.scale_bytes or self.codes or self.values)

    def __str__(self) -> str:
        first, second = self.recipes
        head = f"{self.format}, {list(self.shape)}, {first} against {second}: "
        if 0 in self.shape:
            return head + "nothing was compared, the tensor is empty"
        if self.equal:
            return head + "every scale byte, code and decoded value is the same"
        lines = [head + f"{self.scale_bytes} scale bytes, {self.codes} codes and {self.values} decoded values differ"]
        if self.tensor_scales != (None, None):
            shown = ["none" if scale is None else f"{scale:.9g}" for scale in self.tensor_scales]
            lines.append(f"tensor scale {shown[0]} against {shown[1]}, each as its recipe stores it")
        lines += [block.text(self.recipes) for block in self.blocks[:BLOCKS_SHOWN]]
        if self.differing > BLOCKS_SHOWN:
            lines.append(f"... and {self.differing - BLOCKS_SHOWN} more blocks")
        return "\n".join(lines)


def read_tensor(path: Path, name: str | None = None) -> torch.Tensor:
    """The tensor of a .npy, .npz, .safetensors or .pt file, in its own dtype; `name` picks one of several.

    Raises ValueError unless the file holds that tensor, its values among them, and it is float32, bfloat16 or float16 and
    dense; OSError if it cannot be read. No code in a .pt file is run.
    """
    found = _tensors(path)
    if name is None and len(found) == 1:
        ((name, tensor),) = found.items()
    elif name in found:
        tensor = found[name]
    else:
        given = "no tensor is named" if name is None else f"tensor={name!r}"
        names = [*map(str, found)]
        more = f" and {len(names) - TENSORS_SHOWN} more" if len(names) > TENSORS_SHOWN else ""
        held = "one without a name" if list(found) == [None] else ", ".join(names[:TENSORS_SHOWN]) + more or "none"
        hint = "; tensor= picks one by its name" if len(found) > 1 else ""
        raise ValueError(f"{given}: {str(path)!r} holds {held}{hint}")
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in FLOAT_DTYPES:
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        expected = f"expected a tensor of {', '.join(map(str, FLOAT_DTYPES))}"
        hint = "; round it to one of them first, once" if kind == torch.float64 else ""
        raise ValueError(f"{str(path)!r} holds {kind}: {expected}{hint}")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_meta:
        kind = "on the device meta" if tensor.is_meta else "nested" if tensor.is_nested else str(tensor.layout)
        raise ValueError(f"{str(path)!r} holds a tensor that is {kind}: expected a dense one, of values")
    held = tensor.untyped_storage().nbytes() // tensor.element_size()
    if held < tensor.numel():
        raise ValueError(
            f"{str(path)!r} holds {list(tensor.shape)}, {tensor.numel():,} elements, made of {held:,} that are stored: "
            "expected a tensor with a place for each (its contiguous() copy has)"
        )
    return tensor


def _tensors(path: Path) -> dict:
    """What a file holds, by name; None for what has no name."""
    try:
        if path.suffix == ".npy":
            return {None: torch.from_numpy(numpy.load(path, allow_pickle=False))}
        if path.suffix == ".npz":
            with numpy.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        held = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ImportError):
        raise
    except Exception as problem:  # each reader has its own kinds
        raise ValueError(f"{str(path)!r} is no {path.suffix} file of tensors ({type(problem).__name__})") from None
    return held if isinstance(held, dict) else {None: held}


def compare_recipes(
    x: torch.Tensor, recipes: Sequence[str | Recipe], format: str | BlockFormat | None = None
) -> RecipeComparison:
    """`x` quantized by two recipes in `format` (default: the first that both fit).

    `x`: blocked along its last axis, float32, bfloat16 or float16. Raises as `quantize`; ValueError unless there are two
    recipes and a format that both fit.
    """
    check_float("x", x)
    if len(recipes) != 2:
        raise ValueError(f"recipes={list(recipes)}: expected two")
    if format is None:
        format = _common_format(recipes)
    format = block_format(format)
    first, second = (quantize(x, format, recipe=recipe) for recipe in recipes)
    codes, scales = (first.codes, second.codes), (_row_scales(first), _row_scales(second))
    decoded = dequantize(first, x.dtype), dequantize(second, x.dtype)
    differs = (codes[0] != codes[1]) | (_bits(decoded[0]) != _bits(decoded[1]))
    size = format.block_size
    per_block = torch.nn.functional.pad(differs, (0, -differs.shape[-1] % size)).unflatten(-1, (-1, size)).any(-1)
    blocks = ((scales[0] != scales[1]) | per_block).nonzero().tolist()

    def pair(index: list[int]) -> BlockPair:
        *row, column = index
        part = slice(column * size, (column + 1) * size)
        columns = [t[(*row, part)].tolist() for t in (x, *codes, *decoded, differs)]
        elements = [
            ElementPair(v, (a, b), (format.element.values[a], format.element.values[b]), (da, db), odd)
            for v, a, b, da, db, odd in zip(*columns)
        ]
        scale_codes = tuple(int(s[tuple(index)]) for s in scales)
        return BlockPair(tuple(index), scale_codes, tuple(format.scale.values[c] for c in scale_codes), tuple(elements))

    return RecipeComparison(
        format=format.name,
        recipes=(first.recipe.name, second.recipe.name),
        shape=tuple(x.shape),
        tensor_scales=tuple(None if q.tensor_scale is None else float(q.tensor_scale) for q in (first, second)),
        scale_bytes=int((scales[0] != scales[1]).sum()),
        codes=int((codes[0] != codes[1]).sum()),
        values=int((_bits(decoded[0]) != _bits(decoded[1])).sum()),
        differing=len(blocks),
        blocks=tuple(map(pair, blocks[:BLOCKS_LISTED])),
    )


def _common_format(recipes: Sequence[str | Recipe]) -> BlockFormat:
    fitting = []
    for format in BLOCK_FORMATS.values():
        try:
            for recipe in recipes:
                resolve_recipe(recipe, format)
        except ValueError:
            continue
        fitting.append(format)
    if fitting:
        return fitting[0]
    for recipe in recipes:  # an unknown name says more than formats do
        if isinstance(recipe, str) and recipe not in RECIPES:
            resolve_recipe(recipe, BLOCK_FORMATS["mxfp4"])
    raise ValueError(f"recipes={list(recipes)}: no block format fits both")


def _row_scales(q: BlockTensor) -> torch.Tensor:
    """Scale codes, one for each row and block, whatever rows share them."""
    if q.recipe.block_rows == 1:
        return q.scales
    return q.scales.repeat_interleave(q.recipe.block_rows, dim=-2)[..., : q.shape[-2], :]


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.int32 if values.element_size() == 4 else torch.int16)
