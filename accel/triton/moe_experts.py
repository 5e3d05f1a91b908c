"""`moe_experts` from packed weights, on NVIDIA GPUs from compute capability 9.0: no weight is ever stored decoded.

Rows are quantized, multiplied with the packed weights of their experts, activated and quantized again, multiplied again, and
their slots added: five launches where there are few slots, six with the one that sorts many by expert. Nothing is read back
from the device; in a CUDA graph, where values cannot be checked, ids that are no expert's count as foreign.

Weight-only layers and `semantics="dequantized"` have the same launches, with the products of `_chains.py`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from accel._recipes import unknown_to_decode, unknown_to_encode
from accel.triton._chain_products import (
    ChainTiling,
    chain_refusal,
    chain_rows,
    choose_chain_tiling,
    multiply_chains,
)
from accel.triton._constants import element_constants, scale_constants
from accel.triton._experts import (
    combine_kernel,
    experts_product_kernel,
    quantize_rows_kernel,
    sort_slots_kernel,
)
from accel.triton._geometry import INTERPRETED
from accel.triton._launch import (
    DEVICES,
    DTYPES,
    NOTHING,
    STORED,
    Activated,
    compute_capability,
    decode_blocks,
    format_refusal,
    gate_table,
    memory,
    missing,
    packing_refusal,
    quantize_blocks,
    recipe_constants,
)
from accel.triton._tilings import FragmentTiling, Tiling, choose_fragment_tiling, choose_tiling
from accel.triton.activate_quantize import NAMES
from accel.triton.matmul import method
from mxref.blocks import BlockTensor, QuantizeCall
from mxref.formats import ELEMENT_FORMATS, BlockFormat, block_format, check_choice
from mxref.grid import Grid
from mxref.matmul import dot_bits
from mxref.moe import ACTIVATIONS, check_experts
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import Kernel

WIDE = torch.float32 if INTERPRETED else torch.bfloat16  # bfloat16 products are wrong in the interpreter
OPERANDS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FEW_SLOTS = 64 if INTERPRETED else 512  # up to here programs look for their slots among all
TABLE_FROM = 1 << 14  # gates from which on they are looked up
ROW_MULTIPLE = 256  # of an operand row's length: whole runs of blocks
FLOAT_BITS, OPERAND_BITS = 24, 8  # significands of float32 and bfloat16
SPLIT = ELEMENT_FORMATS["e4m3"]  # whose dots are exact once integer parts and rests are apart


@dataclass(frozen=True)
class Rows:
    """What `quantize_rows_kernel` stores: block values and E8M0 codes, tensor scales, and which rows are safe."""

    values: torch.Tensor
    scales: torch.Tensor
    stored: torch.Tensor
    safe: torch.Tensor
    format: BlockFormat
    recipe: Recipe


def moe_experts(
    x: torch.Tensor,
    w13: BlockTensor,
    w2: BlockTensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    *,
    activation: str = "silu",
    act_format: str | BlockFormat | None = None,
    act_tensor_scales: str | tuple[torch.Tensor, torch.Tensor] | None = None,
    act_recipe: str | Recipe | None = None,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    gate_up: str = "concatenated",
    intermediate_dtype: torch.dtype | None = None,
    apply_router_weight_on_input: bool = False,
    round_per_slot: torch.dtype | None = None,
    expert_map: torch.Tensor | None = None,
    combine: bool = True,
    seed: int | None = None,
    semantics: str = "blockwise",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """As `mxref.moe_experts`."""
    capturing = isinstance(x, torch.Tensor) and x.is_cuda and torch.cuda.is_current_stream_capturing()
    scales = check_experts(
        x, w13, w2, topk_ids, topk_weights, activation, act_format, act_tensor_scales, act_recipe, bias13, bias2, gate_up,
        intermediate_dtype, apply_router_weight_on_input, round_per_slot, expert_map, seed, semantics, out_dtype,
        values=not capturing,
    )  # fmt: skip
    scales = {name: scale.resolve_neg().contiguous() if _per_expert(scale) else scale for name, scale in scales.items()}
    format = None if act_format is None else block_format(act_format)
    run = run_experts if semantics == "blockwise" and format is not None else run_chains
    return run(
        x.detach().resolve_neg(), w13, w2, (topk_ids if expert_map is None else expert_map[topk_ids.long()]).contiguous(),
        topk_weights.resolve_neg().contiguous(), format, None if format is None else resolve_recipe(act_recipe, format),
        scales, activation, gate_up, bias13, bias2, intermediate_dtype or x.dtype, apply_router_weight_on_input,
        round_per_slot or torch.float32, (out_dtype or x.dtype) if combine else None,
    )  # fmt: skip


def run_experts(
    x, w13, w2, ids, weights, format, recipe, scales, activation, gate_up, bias13, bias2, intermediate_dtype,
    weight_on_input, slot_dtype, out_dtype, tilings=(None, None),
) -> torch.Tensor:  # fmt: skip
    """The layer, of checked arguments; the slot terms if `out_dtype` is None. `tilings`: of both products; None: chosen."""
    (tokens, top_k), experts, device = ids.shape, w2.shape[0], x.device
    slots = tokens * top_k
    terms = empty_terms(ids, w2, out_dtype)
    if not terms.numel():
        return terms if out_dtype is None else add_slots(terms, ids, experts, out_dtype)
    x = x if x.stride(-1) == 1 else x.contiguous()
    per_expert = isinstance(scales["input"], torch.Tensor) and scales["input"].numel() > 1
    router = weights if weight_on_input else None
    rows_a_token = top_k if per_expert else 1
    chosen = [
        given
        or (
            choose_fragment_tiling(device, slots / experts, w.format.name)
            if in_fragments(w, format)
            else choose_tiling(device, slots / experts, min(w.format.block_size, format.block_size))
        )
        for given, w in zip(tilings, (w13, w2), strict=True)
    ]
    places = [_places(w, tiling) for w, tiling in zip((w13, w2), chosen, strict=True)]
    sorted_slots = {}
    for tiling in chosen:
        if slots > FEW_SLOTS and tiling.slots not in sorted_slots:
            sorted_slots[tiling.slots] = sort_slots(ids, slots, experts, tiling.slots)

    rows = quantize_rows(
        x, tokens * rows_a_token, x.shape[1], format, recipe, scales["input"], w13, places[0], ids, experts, rows_a_token,
        router=router,
    )  # fmt: skip
    hidden = torch.empty(slots, w13.shape[1], dtype=intermediate_dtype, device=device)
    multiply(rows, top_k // rows_a_token, w13, bias13, hidden, ids, None, torch.float32, chosen[0], sorted_slots)
    rows = quantize_rows(
        hidden, slots, w2.shape[2], format, recipe, scales["intermediate"], w2, places[1], ids, experts, 1, activation,
        gate_up,
    )  # fmt: skip
    router = _router_of(weights, weight_on_input, slot_dtype)
    multiply(rows, 1, w2, bias2, terms.view(slots, -1), ids, router, slot_dtype, chosen[1], sorted_slots)
    return terms if out_dtype is None else add_slots(terms, ids, experts, out_dtype)


def empty_terms(ids: torch.Tensor, w2: BlockTensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    """Room for slot terms `[T, k, H]`. Those of foreign experts are not written: zeros, where they are the result."""
    empty = torch.zeros if out_dtype is None else torch.empty
    return empty(*ids.shape, w2.shape[1], dtype=torch.float32, device=ids.device)


def add_slots(terms: torch.Tensor, ids: torch.Tensor, experts: int, out_dtype: torch.dtype) -> torch.Tensor:
    """The sum of each token's slot terms, in their order."""
    tokens, top_k, width = terms.shape
    out = torch.empty(tokens, width, dtype=out_dtype, device=terms.device)
    if out.numel():
        tile = min(256 if tokens * top_k <= FEW_SLOTS and not INTERPRETED else 1024, triton.next_power_of_2(width))
        combine_kernel[(tokens, triton.cdiv(width, tile))](
            terms, ids, memory(out), experts, width, TOP_K=top_k, TILE=tile, STORED=STORED[out_dtype],
            **options(4, follows=True),
        )  # fmt: skip
    return out


def run_chains(
    x, w13, w2, ids, weights, format, recipe, scales, activation, gate_up, bias13, bias2, intermediate_dtype,
    weight_on_input, slot_dtype, out_dtype, tiling: ChainTiling | None = None,
) -> torch.Tensor:  # fmt: skip
    """As `run_experts`, of decoded weights: rows are left as they are if `format` is None, else quantized and decoded."""
    (tokens, top_k), experts, device = ids.shape, w2.shape[0], x.device
    slots = tokens * top_k
    terms = empty_terms(ids, w2, out_dtype)
    if terms.numel():
        name, alpha, limit = NAMES[activation]
        gated = ACTIVATIONS[activation].gated
        interleaved = gated and gate_up == "interleaved"
        router = _router_of(weights, weight_on_input, slot_dtype)
        if weight_on_input:
            x = (x.float() * weights).to(x.dtype)
        tiling = tiling or choose_chain_tiling(slots / experts)
        tiles = None if tiling.slots == 1 else sort_slots(ids, slots, experts, tiling.slots)
        rows_a_token = 1
        if format is not None:
            rows_a_token = top_k if _per_expert(scales["input"]) else 1
            x = _quantized_and_decoded(x.repeat_interleave(rows_a_token, 0), format, recipe, scales["input"], ids)
        rows = chain_rows(x, len(x), x.shape[1], w13.format.block_size)
        hidden = torch.empty(slots, w13.shape[1], dtype=intermediate_dtype, device=device)
        multiply_chains(rows, top_k // rows_a_token, w13, bias13, hidden, tiling, ids, tiles)
        if format is None:
            rows = chain_rows(
                hidden, slots, w2.shape[2], w2.format.block_size, (name, alpha, limit), gated, interleaved
            )  # fmt: skip
        else:
            gate, up = hidden, None
            if interleaved:
                gate, up = hidden[:, ::2], hidden[:, 1::2]
            elif gated:
                gate, up = hidden[:, : w2.shape[2]], hidden[:, w2.shape[2] :]
            activated = Activated(name, up, alpha, limit)
            x = _quantized_and_decoded(gate, format, recipe, scales["intermediate"], ids, activated)
            rows = chain_rows(x, slots, w2.shape[2], w2.format.block_size)
        multiply_chains(rows, 1, w2, bias2, terms.view(slots, -1), tiling, ids, tiles, router, slot_dtype)
    return terms if out_dtype is None else add_slots(terms, ids, experts, out_dtype)


def _per_expert(scale: str | torch.Tensor | None) -> bool:
    return isinstance(scale, torch.Tensor) and scale.numel() > 1


def _router_of(weights: torch.Tensor, on_input: bool, slot_dtype: torch.dtype) -> torch.Tensor | None:
    """What slots are multiplied with before they are rounded to `slot_dtype`; None where neither happens."""
    if not on_input:
        return weights
    return None if slot_dtype == torch.float32 else torch.ones_like(weights)


def _quantized_and_decoded(x, format: BlockFormat, recipe: Recipe, scale, ids, activated=NOTHING) -> torch.Tensor:
    """What rows, or the activations of their gates, become when stored, in their dtype. Scales of experts go to slots."""
    if _per_expert(scale):
        scale = scale[ids.flatten().long().clamp(0, len(scale) - 1)][:, None]
    elif isinstance(scale, torch.Tensor):
        scale = scale.reshape(())
    call = QuantizeCall(x, Grid(tuple(x.shape), -1, format.block_size, 1), format, recipe, scale, None)
    return decode_blocks(quantize_blocks(call, activated), x.dtype)


def options(warps: int, follows: bool = False) -> dict[str, int | bool]:
    """What a launch is compiled with. `follows`: it may start before the launch before it has ended, and waits by itself."""
    return {} if INTERPRETED else {"num_warps": warps, "enable_fp_fusion": False, "launch_pdl": follows}


def sort_slots(ids: torch.Tensor, slots: int, experts: int, tile: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots in ascending expert order, and tiles of at most `tile` of them, `[tiles, 3]`: expert, first place, count."""
    order = torch.empty(slots, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(slots // tile + experts, 3, dtype=torch.int32, device=ids.device)
    sort_slots_kernel[(experts + 1,)](ids, order, tiles, slots, experts, TILE=2048, BM=tile, **options(4))
    return order, tiles


def quantize_rows(
    x: torch.Tensor, count: int, length: int, format: BlockFormat, recipe: Recipe, scale, weight: BlockTensor,
    places: str, ids, experts: int, rows_a_source: int, activation: str | None = None, gate_up: str = "concatenated",
    router=None,
) -> Rows:  # fmt: skip
    """`count` operand rows of `length` elements from rows of x, or from the activation of its gates and ups."""
    size, device = format.block_size, x.device
    width = -(-length // ROW_MULTIPLE) * ROW_MULTIPLE
    parts = 2 if format.element == SPLIT else 1
    dtype = torch.float16 if half(weight, format) else WIDE
    values = torch.empty(parts, count, width, dtype=dtype, device=device)
    scales = torch.empty(count, width // size, dtype=torch.uint8, device=device)
    stored, safe = (torch.empty(count, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))
    name, alpha, limit = ("none", 0.0, 0.0) if activation is None else NAMES[activation]
    source = "none" if scale is None else "amax" if isinstance(scale, str) else "given"
    element, block = element_constants(format.element), scale_constants(format)
    chosen = recipe_constants(format, recipe)
    blocks = triton.next_power_of_2(width // size)
    gated = activation is not None and ACTIVATIONS[activation].gated
    quantize_rows_kernel[(count,)](
        memory(x), values, scales, stored, safe, scale if source == "given" else stored, ids,
        stored if router is None else router, gate_table(name, x, alpha, limit, TABLE_FROM), alpha, limit, experts,
        x.stride(0), length, width, count * width, BLOCKS=blocks, SIZE=size, ROWS_A_SOURCE=rows_a_source,
        WEIGHTED=router is not None, ACTIVATION=name, GATED=gated, INTERLEAVED=gated and gate_up == "interleaved",
        STORED=STORED[x.dtype], PLACES=places,
        HALF=half(weight, format), PARTS=parts, SOURCE=source, PER_EXPERT=source == "given" and scale.numel() > 1,
        LARGEST=format.element.max * (recipe.scale_max or format.scale.max),
        **{name: block[name] for name in ("POWER_OF_TWO", "SCALE_MAX_CODE", "SCALE_MANTISSA", "SCALE_LOWEST", "SCALE_MAX",
                                          "SIXTH")},
        **{name: element[name] for name in ("MANTISSA", "LOWEST", "MAX", "EMAX")},
        **{name: chosen[name] for name in ("RULE", "ORDER", "INF_POISONS")},
        **options(min(16, max(4, blocks * size // 256)), follows=activation is not None),
    )  # fmt: skip
    return Rows(values, scales, stored, safe, format, recipe)


def paired(weight: BlockTensor) -> bool:
    """Whether weights are FP4 codes that int32 words hold, eight a word."""
    packed = weight.packed
    aligned = packed.stride(-1) == 1 and all(stride % 4 == 0 for stride in packed.stride()[:-1])
    whole = packed.shape[-1] % 4 == 0 and packed.storage_offset() % 4 == 0 and packed.data_ptr() % 4 == 0
    return weight.format.element == ELEMENT_FORMATS["e2m1"] and aligned and whole


def half(weight: BlockTensor, rows: BlockFormat) -> bool:
    """Whether float16 holds all products of elements and scales of both operands, and pairs decode to it."""
    fours = rows.element == weight.format.element and paired(weight)
    return fours and rows.scale == weight.format.scale == SPLIT


def in_fragments(weight: BlockTensor, rows: BlockFormat) -> bool:
    """Whether threads decode the weights that a tensor core takes from them: FP4 in whole words of 64 elements, NVFP4 with
    NVFP4, or MXFP4 with an MX format of blocks of 32 whose elements float16 holds and whose dots float32."""
    packed, scales, format = weight.packed, weight.scales, weight.format
    word = 64 // format.block_size
    strides = [stride % 16 for stride in packed.stride()[:-1]] + [stride % word for stride in scales.stride()[:-1]]
    places = packed.data_ptr() % 16, scales.data_ptr() % word, packed.stride(-1) - 1, scales.stride(-1) - 1
    whole = weight.length % 64 == 0 and not any(strides) and not any(places)
    mx = format.name == "mxfp4" and rows.scale == format.scale and rows.block_size == format.block_size
    known = half(weight, rows) or (mx and paired(weight) and method(rows, format) == "float16")
    return whole and known and not INTERPRETED and weight.recipe.block_rows == 1


def _places(weight: BlockTensor, tiling: Tiling | FragmentTiling) -> str:
    """In which order a product with a weight takes the values of a row: see `quantize_rows_kernel`."""
    if isinstance(tiling, FragmentTiling) and not weight.format.scale.is_power_of_two:
        return "fragments"
    return "pairs" if paired(weight) else "plain"


def multiply(
    rows: Rows, slots_a_row: int, weight: BlockTensor, bias, out: torch.Tensor, ids, router, slot_dtype: torch.dtype,
    tiling: Tiling | FragmentTiling, sorted_slots: dict,
) -> None:  # fmt: skip
    """out[slot] = the product of its row with its expert's weights, and what follows it."""
    slots, (experts, n_size, length) = ids.numel(), weight.shape
    format, size = weight.format, min(weight.format.block_size, rows.format.block_size)
    few = slots <= FEW_SLOTS
    order, tiles = (ids, ids) if few else sorted_slots[tiling.slots]
    packed, scales = last_contiguous(weight.packed), last_contiguous(weight.scales)
    stored = None if weight.tensor_scale is None else weight.tensor_scale.expand(experts, n_size, 1)
    bias = None if bias is None else memory(bias.detach().resolve_neg().contiguous())
    places = min(slots, experts) if few else len(tiles)
    stored_strides = (0, 0) if stored is None else (stored.stride(0), stored.stride(1))
    common = {
        "SLOTS": triton.next_power_of_2(slots) if few else 0, "BY_SLOT": few and slots <= experts, "X_OF_SLOTS": slots_a_row,
        "X_STORED": rows.recipe.tensor_scale_direction if rows.format.tensor_scale else "none",
        "W_STORED": "none" if stored is None else weight.recipe.tensor_scale_direction, "HAS_BIAS": bias is not None,
        "HAS_ROUTER": router is not None, "ROUNDED": STORED[slot_dtype], "STORED": STORED[out.dtype],
        "STAGES": tiling.stages, "BM": tiling.slots, "NB": tiling.blocks,
    }  # fmt: skip
    ends = (
        rows.stored if stored is None else stored, rows.stored if bias is None else bias, memory(out), ids,
        rows.stored if router is None else router,
    )  # fmt: skip
    if isinstance(tiling, FragmentTiling):
        from accel.triton._fragments import experts_fragment_kernel

        chunks = packed.shape[-1] // 16
        power_of_two = format.scale.is_power_of_two
        code_word, scale_word = (torch.int32, torch.int16) if power_of_two else (torch.int16, torch.int32)
        packed, scales = packed.view(code_word), scales.view(scale_word)
        experts_fragment_kernel[triton.cdiv(n_size, 16 * tiling.warps), places](
            rows.values, rows.scales, rows.stored, rows.safe, packed, scales, *ends, order, tiles, slots,
            experts, n_size, chunks, rows.values.shape[-1], *packed.stride()[:2], *scales.stride()[:2], *stored_strides,
            n_size, **common, POWER_OF_TWO=power_of_two, WARPS=tiling.warps, maxnreg=tiling.registers,
            **options(tiling.warps, follows=True),
        )  # fmt: skip
        return
    element, block = element_constants(format.element), scale_constants(format)
    words = paired(weight)
    packed = packed.view(torch.int32) if words else packed
    weight_strides = packed.stride(0), packed.stride(1), scales.stride(0), scales.stride(1)
    grid = (triton.cdiv(n_size, tiling.rows), places)
    common |= {
        "SCALE_ROWS": weight.recipe.block_rows, "BN": tiling.rows, "SIZE": format.block_size,
        "EVEN": length % (tiling.blocks * size) == 0,
        **{name: block[name] for name in ("SCALE_NAN", "SCALE_MANTISSA", "SCALE_UNBIAS")},
    }  # fmt: skip
    experts_product_kernel[grid](
        rows.values, rows.scales, rows.stored, rows.safe, packed, scales, *ends, order, tiles,
        slots, experts, n_size, triton.cdiv(length, size), weight.packed.shape[-1], rows.values.shape[-1],
        rows.values.stride(0), *weight_strides, *stored_strides, n_size,
        OPERAND=OPERANDS[rows.values.dtype], G=size, X_SIZE=rows.format.block_size,
        X_POWER_OF_TWO=rows.format.scale.is_power_of_two, PARTS=len(rows.values), SPLIT=format.element == SPLIT,
        PAIRED=words, HALF=half(weight, rows.format), POWER_OF_TWO=block["POWER_OF_TWO"], **common,
        **{name: element[name] for name in ("BITS", "MANTISSA", "MAX", "MAX_CODE", "SIGN_SHIFT", "INTEGER", "UNBIAS")},
        **options(tiling.warps, follows=True),
    )  # fmt: skip


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """`x`, copied if its last axis is strided."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def accepts(
    x, w13, w2, topk_ids, topk_weights, *, activation="silu", act_format=None, act_tensor_scales=None, act_recipe=None,
    semantics="blockwise", **others,
) -> str | None:  # fmt: skip
    """None, or why not."""
    check_choice("activation", activation, tuple(ACTIVATIONS))
    if activation not in NAMES:
        return f"activation {activation!r} has no kernel"
    if act_format is None:
        return _chains_refusal(w13, w2)
    if act_tensor_scales == "per_tensor":
        return "act_tensor_scales='per_tensor': the kernels give each token its own"
    format = block_format(act_format, "act_format")
    recipe = resolve_recipe(act_recipe, format, "act_recipe")
    choices = (recipe.rounding, recipe.overflow, recipe.search, recipe.nan, recipe.transform, recipe.block_rows)
    if choices != ("nearest_even", "saturate", "none", "poison", None, 1) or recipe.encode_order == "exact":
        return f"act_recipe {recipe.name!r}: the kernels round to nearest even, saturate, do not search or transform"
    if semantics == "dequantized":
        return (
            unknown_to_encode(recipe)
            or format_refusal(format, recipe)
            or packing_refusal(format)
            or _chains_refusal(w13, w2)
        )
    for weight in (w13, w2):
        if isinstance(weight, BlockTensor):
            refusal = product_refusal(format, weight)
            if refusal is not None:
                return refusal
    return unknown_to_encode(recipe) or format_refusal(format, recipe)


def _chains_refusal(*weights: BlockTensor) -> str | None:
    """Why the kernels do not decode one of the weights, or None."""
    return next(filter(None, (chain_refusal(weight) for weight in weights if isinstance(weight, BlockTensor))), None)


def product_refusal(a: BlockFormat, weight: BlockTensor) -> str | None:
    """Why the kernels do not multiply rows of format `a` with a weight, or None."""
    b = weight.format
    if weight.recipe.transform is not None:
        return f"weights are transformed by {weight.recipe.transform}"
    size, scaled = min(a.block_size, b.block_size), [f for f in (a, b) if not f.scale.is_power_of_two]
    if size < 16 or max(a.block_size, b.block_size) > ROW_MULTIPLE:
        return f"blocks of {a.block_size} and {b.block_size} elements: 16 to {ROW_MULTIPLE} are taken"
    bits = dot_bits(a.element, b.element, size)
    split = [f.element for f in (a, b) if f.element == SPLIT]
    if "e5m2" in (a.element.name, b.element.name) or (bits > FLOAT_BITS and (not split or size > 32)):
        return f"dots of {a.element.name} and {b.element.name}, of {bits} bits, are more than float32 sums hold"
    significands = sum(f.scale.mantissa_bits + 1 for f in scaled)
    if scaled and (split or bits + significands > FLOAT_BITS):
        return f"dots of {a.element.name} and {b.element.name} times scales with a mantissa round twice"
    for f in scaled:
        if f.element.mantissa_bits + 1 + f.scale.mantissa_bits + 1 > OPERAND_BITS:
            return f"{f.name}: an element times its scale does not fit into bfloat16"
    for f in (a, b):
        if f.element.name not in ELEMENT_FORMATS or ELEMENT_FORMATS[f.element.name] != f.element:
            return f"{f.element.name} is no element format of mxref's own"
    return unknown_to_decode(weight.recipe) or format_refusal(b, weight.recipe) or packing_refusal(b)


def requires() -> str | None:
    """What the machine lacks, or None: Triton's products of decoded pairs are known for compute capability 9.0."""
    if INTERPRETED or missing():
        return missing()
    capable = compute_capability(torch.device("cuda")) == (9, 0)
    return None if capable else "an NVIDIA GPU of compute capability 9.0 is needed"


KERNEL = Kernel("moe_experts", "triton", moe_experts, "bitexact", DEVICES, DTYPES, None, requires, accepts)
