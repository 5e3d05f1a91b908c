"""`load_checkpoint`: any dialect's weights as BlockTensors, with the direction of every scale resolved.

What makes a weight is decided and checked from headers alone; tensors are read when a name is looked up.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from math import prod
from pathlib import Path

import torch

from mxref.blocks import BlockTensor
from mxref.checkpoints.dialects import DIALECTS, FUSED, Declared, Layout, declared, find_dialect, header_says
from mxref.checkpoints.files import CheckpointError, Entry, Shards, language_config, open_shards, read_json
from mxref.packing import from_layout

SCALE_DTYPES = ("F32", "BF16")  # of tensor scales and input scales; bfloat16 is widened, exactly
_ODD_EXPERT = re.compile(r"\.experts\.(?!(?:0|[1-9][0-9]*)\.)(\d+)\.")  # readers take its number for another's
_NOT_APPLIED = ("pre_quant_scale", "weight_zero_point", "weight_g_idx")  # ends of names beside a weight that it needs


@dataclass(frozen=True)
class QuantizedWeight:
    """A block-scaled weight of a checkpoint, with what stands beside it.

    `tensor`: `[..., out, in]`, blocked along the last axis; its recipe says how its tensor scale decodes. `input_scale`:
    the stored scale of its input, float32 scalar or one an expert, kept as given whatever its value, or None;
    `input_direction`: what decoding does with it, `multiply` or `divide`. `rows`: how a weight that stacks gate and up
    orders its rows, `interleaved` (as its bias does) or `concatenated`; None where it stacks none or nothing says how.
    """

    name: str
    tensor: BlockTensor
    input_scale: torch.Tensor | None = None
    input_direction: str | None = None
    rows: str | None = None

    def concatenated(self) -> "QuantizedWeight":
        """The same weight with all gate rows before all up rows; other weights as they are."""
        if self.rows != "interleaved":
            return self
        q = self.tensor
        packed, scales = (from_layout(part, "interleaved", tuple(part.shape)) for part in (q.packed, q.scales))
        return replace(self, tensor=replace(q, packed=packed, scales=scales), rows="concatenated")


def check_device(device: str | torch.device) -> torch.device:
    """The device; raises ValueError for one that is not here, or holds no values."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as failure:
        raise ValueError(f"device={str(device)!r}: {str(failure).splitlines()[0]}") from None
    if found.type == "meta":
        raise ValueError("device='meta': expected a device that holds values")
    return found


def usable(scale: torch.Tensor) -> torch.Tensor:
    """Which scales an input can be quantized by: finite ones above zero."""
    return scale.isfinite() & (scale > 0)


@dataclass(frozen=True)
class StoredWeight:
    """Which tensors of the files make one weight, in which layout, and its shape `[out, in]` or `[experts, out, in]`."""

    name: str
    layout: Layout
    codes: str
    scales: str
    shape: tuple[int, ...]
    tensor_scale: str | None
    input_scale: str | None
    rows: str | None

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of the tensors."""
        return tuple(part for part in (self.codes, self.scales, self.tensor_scale, self.input_scale) if part)


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping):
    """A checkpoint: names to `QuantizedWeight` or plain tensors, each read from its shard when it is looked up.

    `dialect`: a name in `mxref.checkpoints.DIALECTS`. `config`: config.json. `declared`: what it says of quantization.
    `stored`: every name, with what makes it if it is a quantized weight, else None. `notes`: in words, what lies beside the
    files and is not read. `contradicted`: in words, that the config names another dialect than the one that
    was asked for, and so says nothing; None if it does not. Iteration follows the files: `items()` goes shard by shard,
    one weight at a time. `streamed()` is the same with memory for no more than what its reader holds.
    """

    dialect: str
    config: dict
    declared: Declared
    stored: Mapping[str, StoredWeight | None]
    shards: Shards
    device: torch.device = torch.device("cpu")
    notes: tuple[str, ...] = ()
    contradicted: str | None = None

    def streamed(self) -> "Checkpoint":
        """The same checkpoint, whose tensors are copies of their own: no file stays in memory once it was read."""
        return replace(self, shards=self.shards.copying())

    @property
    def quantized(self) -> tuple[str, ...]:
        """Names of the quantized weights."""
        return tuple(name for name, weight in self.stored.items() if weight is not None)

    @property
    def plain(self) -> tuple[str, ...]:
        """Names of the tensors that stay as they are."""
        return tuple(name for name, weight in self.stored.items() if weight is None)

    @property
    def formats(self) -> tuple[str, ...]:
        """Block formats of the quantized weights."""
        return tuple(sorted({self.stored[name].layout.format for name in self.quantized}))

    @property
    def scheme(self) -> str:
        """Formats of weights and activations in one word, e.g. `w_mxfp4_a_mxfp6_e2m3`; `plain` without quantized weights."""
        if not self.formats:
            return "plain"
        activations = f"_a_{self.declared.activations}" if self.declared.activations else ""
        return f"w_{'+'.join(self.formats)}{activations}"

    def __repr__(self) -> str:
        entries = self.shards.entries.values()
        size = sum(stop - start for start, stop in (entry.place for entry in entries))
        return f"<Checkpoint {self.dialect} {self.scheme}: {len(entries)} tensors, {size:,} bytes>"

    def __getitem__(self, name: str) -> QuantizedWeight | torch.Tensor:
        if name not in self.stored:
            near = nlargest(3, self.stored, partial(_alike, str(name)))
            raise KeyError(f"{name!r} is not in the checkpoint: expected a name in it, such as {', '.join(near)}")
        weight = self.stored[name]
        if weight is None:
            return self.shards.read(name).to(self.device)
        return _read_weight(self.shards, weight, self.device)

    def get(self, name: str, default: object = None) -> object:
        """The weight or tensor of that name, or `default`, without a search for names that are near."""
        return self[name] if name in self.stored else default

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def _alike(one: str, other: str) -> int:
    """How many characters two names begin and end with alike: one change between, and it is nearly all of them."""
    return sum(len(os.path.commonprefix(pair)) for pair in ((one, other), (one[::-1], other[::-1])))


def load_checkpoint(
    path: str | os.PathLike,
    *,
    device: str | torch.device = "cpu",
    dialect: str | None = None,
    weights_only: bool = False,
) -> Checkpoint:
    """Open a checkpoint directory or one .safetensors file; tensors are read when they are looked up.

    A directory has `model.safetensors`, or shards and `model.safetensors.index.json`, which counts where both are there
    and has to be right in every tensor; `config.json` and
    `hf_quant_config.json` say what is in it, for a single file those beside it. `dialect`: a name in
    `mxref.checkpoints.DIALECTS`, instead of what the config says, which is then not heeded if it says another. Tensors
    that belong to no block-scaled weight stay as they are. Scales are kept apart and as given: nothing is merged,
    inverted or transposed but the packed axis, which comes last.

    What the config says is followed or refused by its key. `weights_only=True` takes the weights where it says of inputs
    and outputs what no layer here computes (FP8 activations, say); `declared.unread` has that in words. What it says of the
    KV cache is no matter of weights and linears: `declared.cache`.

    Raises ValueError for a path that is no checkpoint or an unknown dialect, `CheckpointError` (a ValueError) for files
    that contradict themselves: from headers here, from values on look-up. Sources: the formats as written by
    compressed-tensors, ModelOpt, AMD Quark, torchao and gpt-oss.

    >>> load_checkpoint("nowhere")
    Traceback (most recent call last):
    ValueError: nowhere: expected a checkpoint directory or a .safetensors file
    """
    checkpoint, faults = open_checkpoint(path, device=device, dialect=dialect)
    says = checkpoint.declared
    if says.refused:
        raise CheckpointError(f"{path}: the config says {says.refused[0]}")
    if faults:
        name, fault = next(iter(faults.items()))
        shard = checkpoint.shards.entries[name].shard.name
        raise CheckpointError(f"{shard}: {name}: {fault}")
    if says.unread and not weights_only:
        raise CheckpointError(f"{path}: the config says {says.unread[0]}; weights_only=True takes the weights alone")
    return checkpoint


def open_checkpoint(
    path: str | os.PathLike, *, device: str | torch.device = "cpu", dialect: str | None = None
) -> tuple[Checkpoint, dict[str, str]]:
    """The checkpoint at `path`, and what its headers contradict, by tensor; what is at fault counts as a plain tensor."""
    path, device = Path(path), check_device(device)
    shards, notes = open_shards(path)
    folder = path if path.is_dir() else path.parent
    config = read_json(folder / "config.json")
    has_codes = any(entry.dtype == "U8" or entry.dtype.startswith("F8") for entry in shards.entries.values())
    dialect, quantization, named = find_dialect(config, read_json(folder / "hf_quant_config.json"), dialect, has_codes)
    says = declared(dialect, quantization)
    weights, faults = _find_weights(shards, dialect, says, language_config(config).get("model_type"))
    for weight in weights.values():
        module = weight.name.removesuffix(".weight")
        if dialect != "torchao" and (why := says.leaves(module)):  # where headers say what is quantized
            faults[weight.codes] = f"stored quantized, and {why}: expected one of the two"
        if clash := says.clash(module):
            faults[weight.codes] = f"config_groups {clash[0]!r} and {clash[1]!r} say different things of it: expected one"
    for name in shards.entries:
        if name.endswith(_NOT_APPLIED):
            faults[name] = "not applied: expected weights that need none (fold it into them, or into the layer before)"
        if odd := _ODD_EXPERT.search(name):
            faults[name] = (
                f"{odd[1]!r} for an expert's number: expected 0, 1, 2 and so on, in ASCII and without leading zeros"
            )
    parts = {part for weight in weights.values() for part in weight.parts}
    by_codes = {weight.codes: weight for weight in weights.values()}
    stored = {}
    for name in shards.entries:
        if name in by_codes:
            stored[by_codes[name].name] = by_codes[name]
        elif name not in parts:
            stored[name] = None
    contradicted = named and f"the config says {named!r} and is not heeded: dialect={dialect!r} is given"
    return Checkpoint(dialect, config, says, stored, shards, device, notes, contradicted), faults


def _find_weights(
    shards: Shards, dialect: str, says: Declared, model: object
) -> tuple[dict[str, StoredWeight], dict[str, str]]:
    """The quantized weights by name, and what is wrong by the name of a tensor."""
    entries, layouts = shards.entries, DIALECTS[dialect]
    weights, faults = {}, {}
    for name in entries:
        for stem in {name.removesuffix(layout.scales) for layout in layouts if name.endswith(layout.scales)}:
            candidates = [layout for layout in layouts if name == stem + layout.scales]
            try:
                weight = _find_weight(shards, dialect, stem, candidates, says, model)
            except CheckpointError as fault:
                faults[name] = str(fault)
            else:
                weights |= {} if weight is None else {weight.name: weight}
    scales = {layout.scales for layout in layouts}
    parts = {part for weight in weights.values() for part in weight.parts}
    for name, entry in entries.items():
        if entry.dtype == "U8" and name not in parts and not name.endswith(tuple(scales)):
            missing = {name.removesuffix(layout.codes) + layout.scales for layout in layouts if name.endswith(layout.codes)}
            if missing and not missing & set(faults):
                faults[name] = f"codes without scales: expected {' or '.join(sorted(missing))}"
    return weights, faults


def _find_weight(
    shards: Shards, dialect: str, stem: str, candidates: list[Layout], says: Declared, model: object
) -> StoredWeight | None:
    """The weight of `stem` in the one of `candidates` that fits it; None where it is quantized, but not in blocks."""
    entries = shards.entries
    layouts = [layout for layout in candidates if stem + layout.codes in entries]
    if not layouts:
        expected = sorted({stem + layout.codes for layout in candidates})
        raise CheckpointError(f"scales without codes: expected {' or '.join(expected)}")
    codes, scales = entries[stem + layouts[0].codes], entries[stem + layouts[0].scales]
    if codes.dtype.startswith("F8") and scales.dtype in ("F32", "BF16", "F16"):
        return None  # one scale a tensor or a channel
    given = f"codes {codes.dtype} {list(codes.shape)} with scales {scales.dtype} {list(scales.shape)}"
    fitting = [layout for layout in layouts if codes.dtype == layout.codes_dtype and scales.dtype in layout.scales_dtype]
    if not fitting:
        pairs = {f"{layout.codes_dtype} with {' or '.join(layout.scales_dtype)}" for layout in layouts}
        raise CheckpointError(f"{given}: expected dtypes {', or '.join(sorted(pairs))}")
    name = stem + layouts[0].weight
    if dialect == "torchao" and name in shards.clashes:
        raise CheckpointError(f"{name}: {shards.clashes[name]}")
    header = header_says(dialect, shards.metadata, name, says)
    formats = says.formats_of(stem) if header is None else {header[0]}
    fitting = [layout for layout in fitting if not formats or layout.format in formats]
    fitting = [layout for layout in fitting if header is None or layout.scale_layout == header[1]]
    if not fitting:
        raise CheckpointError(
            f"{given}: {'the config' if header is None else 'the header'} says {', '.join(sorted(formats))}"
        )
    sized = [layout for layout in fitting if _length(layout, codes, scales)]
    if len(sized) != 1:
        names = ", ".join(dict.fromkeys(layout.format for layout in sized or fitting))
        raise CheckpointError(f"{given} {'fit all of' if sized else 'do not fit'} {names}")
    layout = sized[0]
    name = stem + layout.weight
    if name in entries and name != stem + layout.codes:
        raise CheckpointError(f"{name} is stored a second time, as {stem + layout.codes}")
    rows = _rows(stem, dialect, model)
    tensor_scale = _find_scale(entries, stem, layout.tensor_scale, codes, rows)
    if layout.tensor_scale and tensor_scale is None:
        raise CheckpointError(f"{stem}{layout.tensor_scale} is missing: {layout.format} in {dialect} has a tensor scale")
    input_scale = _find_scale(entries, stem, layout.input_scale, codes, rows)
    shape = list(codes.shape)
    if layout.code_blocks and len(shape) > 3:
        shape[-2:] = [shape[-2] * shape[-1]]
    shape.append(_length(layout, codes, scales))
    del shape[layout.axis - 1]
    parts = (stem + layout.codes, stem + layout.scales)
    return StoredWeight(name, layout, *parts, tuple(shape), tensor_scale, input_scale, rows)


def _rows(stem: str, dialect: str, model: object) -> str | None:
    """How the rows of a weight lie: see `QuantizedWeight`."""
    if not stem.endswith(FUSED):
        return None
    if dialect == "gpt-oss" or model == "gpt_oss":
        return "interleaved"
    return "concatenated" if isinstance(model, str) else None


def _length(layout: Layout, codes: Entry, scales: Entry) -> int | None:
    """Elements along the packed axis; None where codes and scales do not fit each other in `layout`, or are empty."""
    shape, scale_shape, block = list(codes.shape), list(scales.shape), layout.block
    if layout.code_blocks and len(shape) > 2 and shape[-1] * 8 == block.block_size * block.element.bits:
        shape[-2:] = [shape[-2] * shape[-1]]
    if not 1 - layout.axis <= len(shape) <= 3 or 0 in shape:
        return None
    length, rest = divmod(shape[layout.axis] * 8, block.element.bits)
    expected = [*shape]
    expected[layout.axis] = -(-length // block.block_size)
    if layout.scale_layout == "tile_128x4":  # any shape of as many bytes
        expected[-2:] = [-(-expected[-2] // 128), -(-expected[-1] // 4), 512]
        expected, scale_shape = prod(expected), prod(scale_shape)
    return None if rest or expected != scale_shape else length


def _find_scale(entries: Mapping[str, Entry], stem: str, suffix: str | None, codes: Entry, rows: str | None) -> str | None:
    """The name of a tensor scale or an input scale if there is one; raises unless it is one value, or one an expert."""
    name = None if suffix is None else stem + suffix
    if name not in entries:
        return None
    scale, experts = entries[name], codes.shape[:1] if len(codes.shape) > 2 else ()
    if scale.dtype not in SCALE_DTYPES:
        raise CheckpointError(f"{name} has dtype {scale.dtype}: expected {' or '.join(SCALE_DTYPES)}")
    fits = bool(experts) and scale.shape in (experts, (*experts, 1), (*experts, 1, 1))
    fits |= bool(experts) and scale.shape == (*experts, 2) and rows == "concatenated"
    if prod(scale.shape) != 1 and not fits:
        raise CheckpointError(f"{name} has shape {list(scale.shape)}: expected one value, or one an expert")
    return name


def _read_weight(shards: Shards, weight: StoredWeight, device: torch.device) -> QuantizedWeight:
    layout = weight.layout
    codes = shards.read(weight.codes).view(torch.uint8)
    scales = shards.read(weight.scales).view(torch.uint8)
    codes = codes.flatten(-2) if layout.code_blocks else codes.movedim(layout.axis, -1).contiguous()
    if layout.scale_layout == "linear":
        scales = scales.movedim(layout.axis, -1).contiguous()
    else:
        blocks = -(-weight.shape[-1] // layout.block.block_size)
        scales = from_layout(scales, layout.scale_layout, (*codes.shape[:-1], blocks))
    try:
        tensor = BlockTensor(
            codes.to(device),
            weight.shape[-1],
            scales.to(device),
            _read_scale(shards, weight.tensor_scale, device, codes.ndim),
            layout.format,
            layout.recipe,
        )
    except ValueError as fault:
        shard = shards.entries[weight.codes].shard.name
        raise CheckpointError(f"{shard}: {weight.name}: {' '.join(str(fault).split())}") from None
    input_scale = _read_scale(shards, weight.input_scale, device, None)
    return QuantizedWeight(weight.name, tensor, input_scale, None if input_scale is None else layout.direction, weight.rows)


def _read_scale(shards: Shards, name: str | None, device: torch.device, ndim: int | None) -> torch.Tensor | None:
    """A tensor scale or an input scale in float32: a scalar, one an expert, or [E, 2] for gate and up.

    `ndim`: of the codes, if it must broadcast to them.
    """
    if name is None:
        return None
    scale = shards.read(name).float().to(device)
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.ndim > 1 and scale.shape[1] == 2:
        return scale
    return scale.reshape(-1, *[1] * ((ndim or 1) - 1))
