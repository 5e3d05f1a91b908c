"""GPU: whole expert layers from packed weights against bfloat16 weights and against decoding all weights first, in one run.

    python -m benchmarks.moe_gpu --json benchmarks/results/moe-h200.json
    python -m benchmarks.moe_gpu --quick     # times every tiling instead

A layer starts from bfloat16 x and the router's ids and weights, and ends with bfloat16 output. Each is checked against the
reference, every bit, on few tokens before it is timed; where a bit differs nothing is printed but that. Times are medians of
CUDA-graph replays, each of another routing and another set of weights, so that no weights are found in a cache.
`of a copy`: the time of a device-to-device copy of as many bytes as the packed weights of the experts that are met, over
the layer's. `dequantize + grouped` decodes all experts with our kernel, then multiplies as `bfloat16 grouped`; neither
quantizes between the products. Where activations are `bfloat16`, only the weights are block-scaled.

vLLM's Triton kernels run beside them where they can be imported (`benchmarks/vllm_site.py` makes a folder for PYTHONPATH):
`bfloat16 vllm` with decoded weights; where weights and activations are NVFP4, its two emulations too, `vllm decode first`
and `vllm fused decode`. Its sort by expert is NOT counted (`not_counted` in a row); ours is, and that of torch's rows.
`benchmarks/vllm_peers.py` says the rest. `cosine`: of its result and ours, or torch's with decoded weights.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F

import mxref
from accel.triton import moe_experts as kernels
from accel.triton._chain_products import ChainTiling
from accel.triton._launch import decode_blocks
from accel.triton._tilings import FragmentTiling, Tiling
from benchmarks import vllm_peers
from mxref.blocks import BlockTensor
from mxref.conformance.report import environment
from mxref.formats import block_format
from mxref.moe import moe_experts as layer
from mxref.recipes import resolve_recipe

TOKENS = (1, 4, 16, 64, 256, 1024, 4096)
ROUTINGS, SETS = 12, 3  # that are rotated: the weights that are met are more than a cache holds
CACHE_BYTES = 256 << 20
AnyTiling = Tiling | FragmentTiling | ChainTiling
FEW_SHAPES = (
    (32, 1, 4), (64, 1, 1), (64, 1, 2), (64, 1, 3), (64, 2, 2), (128, 1, 1), (128, 1, 3), (128, 2, 1), (128, 2, 2),
    (128, 2, 3), (128, 4, 1), (128, 4, 2), (128, 4, 3), (256, 2, 2), (256, 4, 1), (256, 4, 2), (256, 4, 3), (256, 8, 2),
    (512, 4, 2), (512, 8, 1), (512, 8, 2),
)  # fmt: skip  # K, warps, stages
MANY_SHAPES = (
    (64, 16, 4, 3), (64, 32, 4, 3), (64, 64, 4, 3), (128, 16, 4, 3), (128, 32, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4),
    (128, 64, 8, 3), (128, 128, 8, 3), (64, 32, 4, 5), (128, 32, 4, 5),
)  # fmt: skip  # rows, slots, warps, stages
FRAGMENT_SHAPES = (
    (2, 8, 16, 2, 128), (2, 8, 16, 4, 128), (4, 8, 8, 2, 96), (4, 8, 8, 3, 96), (4, 8, 8, 4, 96), (4, 16, 8, 2, 128),
    (4, 32, 8, 2, 128), (4, 32, 8, 2, None), (4, 64, 8, 2, 128), (4, 64, 8, 2, None),
)  # fmt: skip  # warps, slots, blocks, stages, registers
CHAIN_SHAPES = ((16, 1, 1, 8), (32, 1, 1, 4), (64, 1, 1, 2), (32, 1, 4, 4), (64, 1, 4, 2))  # rows, repeats, slots, blocks


@dataclass(frozen=True)
class Model:
    """Sizes of one layer, and how its weights and activations are stored; activations as they come, if in no format."""

    name: str
    experts: int
    hidden: int
    width: int
    top_k: int
    format: str
    act_format: str | None
    activation: str = "silu"
    gate_up: str = "concatenated"


QWEN = ("Qwen3-30B-A3B", 128, 2048, 768, 8)
OSS = ("gpt-oss-20b", 32, 2880, 2880, 4)
MODELS = (
    Model(*QWEN, "nvfp4", "nvfp4"),
    Model(*OSS, "mxfp4", "mxfp4", "swiglu_oai", "interleaved"),
    Model(*OSS, "mxfp4", "mxfp6_e3m2", "swiglu_oai", "interleaved"),
    Model(*QWEN, "nvfp4", None),
    Model(*QWEN, "mxfp4", None),
    Model(*OSS, "mxfp4", None, "swiglu_oai", "interleaved"),
    Model(*QWEN, "mxfp8_e4m3", "mxfp8_e4m3"),
)
PLAIN = "bfloat16"  # rows' name for activations in no format


def random_weights(rows: tuple[int, ...], length: int, format: str, generator: torch.Generator) -> BlockTensor:
    """Random codes, and scales near 1 as trained weights have them: quantizing random numbers would take longer."""
    block = block_format(format)
    shape = (*rows, length * block.element.bits // 8)
    packed = torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda", generator=generator)
    if block.element.bits == 8 and block.element.kind == "float":
        packed &= 0b10111111  # without the highest bit of the exponent no code is NaN
    middle = block.scale.positive.index(1.0)
    shape = (*rows, length // block.block_size)
    scales = torch.randint(middle - 6, middle + 2, shape, dtype=torch.uint8, device="cuda", generator=generator)
    scale = torch.rand(rows[0], 1, 1, device="cuda", generator=generator) * 0.01 + 0.01 if block.tensor_scale else None
    recipe = resolve_recipe(None, block)
    return BlockTensor.trusted(packed, length, scales, scale, block, recipe, -1)


@dataclass(frozen=True)
class Layer:
    """One set of weights."""

    w13: BlockTensor
    w2: BlockTensor


def make_layer(model: Model, seed: int) -> Layer:
    generator = torch.Generator("cuda").manual_seed(seed)
    w13 = random_weights((model.experts, 2 * model.width), model.hidden, model.format, generator)
    return Layer(w13, random_weights((model.experts, model.hidden), model.width, model.format, generator))


@dataclass(frozen=True)
class Routed:
    """Tokens and where they go."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor


def make_routing(model: Model, tokens: int, seed: int) -> Routed:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, model.hidden, device="cuda", generator=generator).bfloat16()
    logits = torch.randn(tokens, model.experts, device="cuda", generator=generator)
    weights, ids = logits.softmax(-1).topk(model.top_k)
    return Routed(x, ids, weights / weights.sum(-1, keepdim=True))


def ours(model: Model, given: Layer, routed: Routed, tiling: AnyTiling | None = None) -> torch.Tensor:
    """Our layer, past the checks of its arguments. `tiling`: of both products; None: chosen."""
    if model.act_format is None:
        return kernels.run_chains(
            routed.x, given.w13, given.w2, routed.ids, routed.weights, None, None, dict.fromkeys(("input", "intermediate")),
            model.activation, model.gate_up, None, None, torch.bfloat16, False, torch.float32, torch.bfloat16, tiling,
        )  # fmt: skip
    format = block_format(model.act_format)
    scale = "per_row" if format.tensor_scale else None
    return kernels.run_experts(
        routed.x, given.w13, given.w2, routed.ids, routed.weights, format, resolve_recipe(None, format),
        {"input": scale, "intermediate": scale}, model.activation, model.gate_up, None, None, torch.bfloat16, False,
        torch.float32, torch.bfloat16, (tiling, tiling),
    )  # fmt: skip


def scaled(model: Model, given: Layer, routed: Routed, *factors: torch.Tensor) -> torch.Tensor:
    """Our layer, with what tokens and the middle are multiplied by before they are quantized."""
    scales = tuple((1 / factor).reshape(()) for factor in factors)
    with mxref.use():
        return kernels.moe_experts(
            routed.x, given.w13, given.w2, routed.ids, routed.weights, activation=model.activation, gate_up=model.gate_up,
            act_format=model.act_format, act_tensor_scales=scales,
        )  # fmt: skip


def gate(model: Model, tokens: int) -> None:
    """Raise unless our layer has the reference's bits on tokens that meet few experts."""
    routed = make_routing(model, tokens, 99)
    few = Routed(routed.x, routed.ids % max(8, model.top_k), routed.weights)
    few.ids[:] = torch.arange(model.top_k, device="cuda")  # each token meets experts 0 ... k-1
    given = make_layer(model, 99)
    options = {"activation": model.activation, "gate_up": model.gate_up, "act_format": model.act_format}
    wanted = layer(few.x, given.w13, given.w2, few.ids, few.weights, **options)
    with mxref.use():
        found = kernels.moe_experts(few.x, given.w13, given.w2, few.ids, few.weights, **options)
    differ = (found.view(torch.int16) != wanted.view(torch.int16)).sum().item()
    if differ:
        raise AssertionError(
            f"{model.name} {model.format} {model.act_format or PLAIN} T={tokens}: {differ} of {found.numel()} differ"
        )


def grouped(model: Model, w13: torch.Tensor, w2: torch.Tensor, routed: Routed) -> torch.Tensor:
    """The layer with bfloat16 weights `[E, N, K]`, by torch's grouped products."""
    slots = routed.ids.flatten()
    order = slots.argsort(stable=True)
    counts = torch.zeros(model.experts, dtype=torch.int32, device=slots.device)
    ends = counts.scatter_add_(0, slots, torch.ones_like(slots, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    rows = routed.x.index_select(0, order // model.top_k)
    hidden = torch._grouped_mm(rows, w13.transpose(1, 2), ends)
    if model.gate_up == "interleaved":
        gate, up = hidden[:, ::2].clamp(max=7), hidden[:, 1::2].clamp(-7, 7)
        hidden = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    else:
        hidden = F.silu(hidden[:, : model.width]) * hidden[:, model.width :]
    out = torch._grouped_mm(hidden, w2.transpose(1, 2), ends)
    out = torch.empty_like(out).index_copy_(0, order, out)
    return (out.view(len(routed.x), model.top_k, -1) * routed.weights[..., None]).sum(1).bfloat16()


def decoded(given: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    return decode_blocks(given.w13, torch.bfloat16), decode_blocks(given.w2, torch.bfloat16)


def decoded_first(model: Model, given: Layer, routed: Routed) -> torch.Tensor:
    return grouped(model, *decoded(given), routed)


def replayed_ms(runs: list[Callable[[], object]], repeats: int = 5) -> float:
    """Median milliseconds of a run: all are captured in one graph, which is replayed."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for run in runs[:2]:
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [run() for run in runs]
        times = []
        for _ in range(repeats + 1):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / len(runs))
    del kept, graph
    return sorted(times[1:])[repeats // 2]


def copy_ms(count: int) -> float:
    """Milliseconds of a copy that moves `count` bytes in all, from memory."""
    sources = [torch.empty(max(count // 2, 16), dtype=torch.uint8, device="cuda") for _ in range(1 + CACHE_BYTES // count)]
    target = [torch.empty_like(source) for source in sources]
    return replayed_ms([partial(b.copy_, a) for a, b in zip(sources, target, strict=True)])


def per_kernel(run: Callable[[], object]) -> dict[str, float]:
    """Microseconds of each kernel of one run, where they can be had."""
    with contextlib.suppress(Exception):
        return profiled(run)
    return {}


def profiled(run: Callable[[], object]) -> dict[str, float]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found: dict[str, float] = {}
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("(")[0][:60]
            while name in found:
                name += "+"
            found[name] = round(event.device_time, 2)
    return found


def peers(model: Model, layers: list[Layer], plain: list, routings: list[Routed]) -> Iterator[vllm_peers.Peer]:
    """vLLM's ways to compute the layer, where vLLM is there."""
    if not vllm_peers.is_there():
        return
    routed = [(r.x, r.ids, r.weights) for r in routings]
    interleaved = model.gate_up == "interleaved"
    yield vllm_peers.plain_peer(plain, routed, interleaved, partial(grouped, model, *plain[0], routings[0]))
    if model.format == model.act_format == "nvfp4":
        packed = [(given.w13, given.w2) for given in layers]
        yield from vllm_peers.packed_peers(packed, routed, partial(scaled, model, layers[0], routings[0]))


def checked(peer: vllm_peers.Peer, row: dict) -> list[Callable]:
    """Its runs, once its result has been held against another's."""
    calls, row["cosine"] = vllm_peers.checked(peer)
    if calls[0].not_counted:
        row["not_counted"] = calls[0].not_counted
    return [call.run for call in calls]


def met_bytes(model: Model, routings: list[Routed]) -> tuple[float, float]:
    """(experts that are met, bytes of their packed weights), on average."""
    met = sum(len(r.ids.unique()) for r in routings) / len(routings)
    bits = block_format(model.format).bits_per_element
    return met, met * 3 * model.width * model.hidden * bits / 8


def measure(model: Model, tokens: int, layers: list[Layer], routings: list[Routed], plain: list) -> Iterator[dict]:
    """A row for each way to compute the layer."""
    count = len(layers)
    met, packed = met_bytes(model, routings)
    copied = copy_ms(int(packed))
    contenders = {
        "mxref": [partial(ours, model, layers[i % count], r) for i, r in enumerate(routings)],
        "dequantize + grouped": [partial(decoded_first, model, layers[i % count], r) for i, r in enumerate(routings[:4])],
        "bfloat16 grouped": [partial(grouped, model, *plain[i % len(plain)], r) for i, r in enumerate(routings)],
    }
    contenders |= {peer.name: peer for peer in peers(model, layers, plain, routings)}
    for name, given in contenders.items():
        row = {"model": model.name, "weights": model.format, "activations": model.act_format or PLAIN}
        row |= {"tokens": tokens, "by": name}
        row |= {"experts": round(met, 1), "packed_bytes": int(packed)}
        try:
            runs = checked(given, row) if isinstance(given, vllm_peers.Peer) else given
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            runs[0]()
            torch.cuda.synchronize()
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            ms = replayed_ms(runs)
            row |= {"ms": ms, "of_a_copy": copied / ms, "packed_tb_s": packed / ms / 1e9}
            row["tflops"] = 6 * tokens * model.top_k * model.hidden * model.width / ms / 1e9
            if name == "mxref":
                row["kernels_us"] = per_kernel(runs[0])
        except Exception as failure:
            row["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:300]
        yield row


def tilings(model: Model, tokens: int) -> Iterator[AnyTiling]:
    """What `--quick` tries."""
    if model.act_format is None:
        yield from (ChainTiling(*shape) for shape in CHAIN_SHAPES)
        return
    if kernels.in_fragments(_one_layer(model).w13, block_format(model.act_format)):
        yield from (FragmentTiling(*shape) for shape in FRAGMENT_SHAPES)
        return
    size = min(block_format(model.format).block_size, block_format(model.act_format).block_size)
    average = tokens * model.top_k / model.experts
    slots = 8 if average <= 2 else 16
    if average <= 32:
        for columns, warps, stages in FEW_SHAPES:
            yield Tiling(16, slots, columns // size, warps, stages)
    if average >= 4:
        for rows, slots, warps, stages in MANY_SHAPES:
            yield Tiling(rows, slots, 1, warps, stages)


def compile_one(task: tuple[Model, int, AnyTiling | None]) -> None:
    """Run one tiling once, so that its kernels lie in Triton's cache."""
    model, tokens, tiling = task
    with contextlib.suppress(Exception):
        ours(model, _one_layer(model), make_routing(model, tokens, 0), tiling)
        torch.cuda.synchronize()
    if tiling is not None or not vllm_peers.is_there():
        return
    with contextlib.suppress(Exception):
        given = _one_layer(model)
        for peer in peers(model, [given], [decoded(given)], [make_routing(model, tokens, 0)]):
            with contextlib.suppress(Exception):
                vllm_peers.checked(peer)


@functools.cache
def _one_layer(model: Model) -> Layer:
    return make_layer(model, 0)


def sweep(model: Model, tokens: int, layers: list[Layer], routings: list[Routed]) -> Iterator[dict]:
    """A row for each tiling, the same in both products, with the kernels' own times."""
    reference = ours(model, layers[0], routings[0])
    for tiling in tilings(model, tokens):
        row = {"model": model.name, "activations": model.act_format or PLAIN, "tokens": tokens, **asdict(tiling)}
        try:
            runs = [partial(ours, model, layers[i % len(layers)], r, tiling) for i, r in enumerate(routings)]
            row["same_bits"] = torch.equal(runs[0]().view(torch.int16), reference.view(torch.int16))
            times = per_kernel(runs[1])
            row["products_us"] = [us for name, us in times.items() if "product" in name or "fragment" in name]
            row["ms"] = round(replayed_ms(runs, 3), 4)
        except Exception as failure:
            row["failed"] = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
        yield row


def shown(row: dict) -> dict:
    return {name: round(v, 4) if isinstance(v, float) else v for name, v in row.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    parser.add_argument("--quick", action="store_true", help="time tilings instead")
    parser.add_argument("--models", default="0,1,2,3,4,5,6", help="numbers of the models, of 0 to 6")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--workers", type=int, default=12, help="processes that compile kernels before anything is timed")
    arguments = parser.parse_args()
    print(environment("cuda", arguments.commit), flush=True)
    models = [MODELS[int(number)] for number in arguments.models.split(",")]
    tokens = [int(count) for count in arguments.tokens.split(",")]
    tried = [(m, t, tiling) for m, t in product(models, tokens) for tiling in (tilings(m, t) if arguments.quick else [None])]
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        pool.map(compile_one, tried, chunksize=1)
    print(f"{len(tried)} compiled", flush=True)
    rows, failed = [], 0

    def save() -> None:
        if arguments.json:
            with open(arguments.json, "w") as file:
                where = environment("cuda", arguments.commit, *vllm_peers.installed("vllm"))
                json.dump({**where, "dtype": "bfloat16", "rows": rows}, file, indent=1)

    for model in models:
        try:
            for count in (1, 5, 48, 130):
                gate(model, count)
                print(
                    f"{model.name} {model.format} {model.act_format or PLAIN}: the reference's bits at T={count}", flush=True
                )
        except Exception:
            traceback.print_exc()
            failed += 1
            if not arguments.quick:
                continue
        layers = [make_layer(model, seed) for seed in range(SETS)]
        plain = []
        if not arguments.quick:
            plain = [decoded(given) for given in layers[:2]]
        for count in tokens:
            routings = [make_routing(model, count, seed) for seed in range(ROUTINGS if count <= 64 else 4)]
            work = (
                sweep(model, count, layers, routings) if arguments.quick else measure(model, count, layers, routings, plain)
            )
            for row in work:
                rows.append(row)
                print(shown(row), flush=True)
            save()
    return failed


if __name__ == "__main__":
    sys.exit(main())
