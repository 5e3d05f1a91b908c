"""What a checkpoint is, and what is wrong with it: `inspect_checkpoint`.

A fault makes results wrong or loading fail; a warning is what a checkpoint may be and many readers get wrong.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count, cycle
from math import inf

import torch

from mxref.blocks import BlockTensor, dequantize
from mxref.checkpoints.checkpoint import Checkpoint, QuantizedWeight, open_checkpoint, usable
from mxref.checkpoints.dialects import DIALECTS
from mxref.checkpoints.files import CheckpointError, UnreadableError, get, language_config
from mxref.checkpoints.recode import dead_blocks, not_finite
from mxref.checkpoints.writers import STACKING_MODELS

RMS_RANGE = (1e-6, 1e3)  # of the weights of a trained matrix, with a wide margin
INPUT_RANGE = (1e-6, 1e6)  # of the largest input that a layer saw in calibration, with a wide margin
_SAMPLE = 1 << 16  # elements of a matrix whose rms is taken
_FLOATS = ("F64", "F32", "F16", "BF16")
_LOADED = ("F32", "F16", "BF16")  # dtypes of floats that a model is loaded from
_WIDE = (*_FLOATS, "BOOL", "I16", "I32", "I64", "U16", "U32", "U64")
_LAYER, _EXPERT = re.compile(r"(.*?\.)layers\.(\d{1,9})\.(.+)"), re.compile(r"(?<=\.experts\.)\d{1,9}(?=\.)")
_LINEAR = re.compile(r".*(_proj|\.w[123])")
STACK = re.compile(r".*\.experts\.(gate_up_proj|up_proj|down_proj)")
_OF_ONE_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.(weight|bias)")
_OF_ALL_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|up|down)_proj(_bias)?")
_USUAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"))
# What every layer of a model type has, what one with experts has besides, and what one may have, with shapes; alternatives
# stand together, of the experts * is any. Letters are sizes as `_sizes` reads them from the config, ? is any.
_NORMS = {"input_layernorm.weight": "H", "post_attention_layernorm.weight": "H"}
_QKVO = {f"self_attn.{part}_proj.weight": shape for part, shape in (("q", "Q H"), ("k", "K H"), ("v", "K H"), ("o", "H Q"))}
_QK_NORMS = {"self_attn.q_norm.weight": "D", "self_attn.k_norm.weight": "D"}
_MLP = {f"mlp.{part}_proj.weight": shape for part, shape in (("gate", "I H"), ("up", "I H"), ("down", "H I"))}
_DENSE, _MIXED = {**_NORMS, **_QKVO, **_MLP}, {**_NORMS, **_QKVO, **_QK_NORMS}
_EXPERT_BIASES = {
    "mlp.experts.gate_up_proj_bias|mlp.experts.*.gate_proj.bias": "E 2M|M",
    "mlp.experts.gate_up_proj_bias|mlp.experts.*.up_proj.bias": "E 2M|M",
    "mlp.experts.down_proj_bias|mlp.experts.*.down_proj.bias": "E H|H",
}
_LATENT = {f"self_attn.{part}.weight": "" for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "q_proj")}
_LATENT |= {"self_attn.q_a_layernorm.weight": "?"}
_LATENT |= {f"self_attn.{part}.bias": "?" for part in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")}


def _shared(name: str) -> dict[str, str]:
    return {f"mlp.{name}.{part}_proj.weight": "H ?" if part == "down" else "? H" for part in ("gate", "up", "down")}


_LAYERS: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    "llama": (_DENSE, {}, {}),
    "mistral": (_DENSE, {}, {}),
    "mixtral": ({**_NORMS, **_QKVO}, {"block_sparse_moe.gate.weight|mlp.gate.weight": "E H"}, {}),
    "qwen2": (_DENSE, {}, {}),
    "qwen2_moe": (
        {**_NORMS, **_QKVO},
        {"mlp.gate.weight": "E H", "mlp.shared_expert_gate.weight": "? H"},
        {**_MLP, **_shared("shared_expert")},
    ),
    "qwen3": ({**_DENSE, **_QK_NORMS}, {}, {}),
    "qwen3_moe": (_MIXED, {"mlp.gate.weight": "E H"}, _MLP),
    "gpt_oss": (
        {**_NORMS, **_QKVO, "self_attn.sinks": "A"},
        {"mlp.router.weight": "E H", "mlp.router.bias": "E", **_EXPERT_BIASES},
        {},
    ),
    "deepseek_v3": (
        {
            **_NORMS,
            "self_attn.q_a_layernorm.weight|self_attn.q_proj.weight": "",
            "self_attn.kv_a_layernorm.weight": "?",
            "self_attn.o_proj.weight": "H ?",
        },
        {"mlp.gate.weight": "E H", "mlp.gate.e_score_correction_bias": "E"},
        {**_MLP, **_LATENT, **_shared("shared_experts")},
    ),
}
# Biases that every layer has where a key of the config says so, or by default.
_QKVO_BIASES = {name.replace("weight", "bias"): shape.split()[0] for name, shape in _QKVO.items()}
_QKV_BIASES = {name: shape for name, shape in _QKVO_BIASES.items() if "o_proj" not in name}
_MLP_BIASES = {name.replace("weight", "bias"): shape.split()[0] for name, shape in _MLP.items()}
_BIASES: dict[str, dict[str, tuple[bool, dict[str, str]]]] = {
    "llama": {"attention_bias": (False, _QKVO_BIASES), "mlp_bias": (False, _MLP_BIASES)},
    "qwen2": {"": (True, _QKV_BIASES)},
    "qwen2_moe": {"qkv_bias": (True, _QKV_BIASES)},
    "qwen3": {"attention_bias": (False, _QKVO_BIASES)},
    "qwen3_moe": {"attention_bias": (False, _QKVO_BIASES)},
    "gpt_oss": {"attention_bias": (True, _QKVO_BIASES)},
}
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")  # which transformers takes for one another
_CHOSEN = "num_experts_per_tok"
_PREDICTING = "num_nextn_predict_layers"  # which come after the others
# Numbers of a config by the least that they are: whole ones, and others.
_WHOLE = dict.fromkeys(("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"), 1)
_WHOLE |= dict.fromkeys(
    ("vocab_size", "intermediate_size", "moe_intermediate_size", _CHOSEN, _PREDICTING, *EXPERT_COUNTS), 0
)
_REAL = dict.fromkeys(("rms_norm_eps", "rope_theta"), 0)
_OF_EXPERTS = {f"{part}.weight": "M H" for part in ("gate_proj", "up_proj", "w1", "w3")}
_OF_EXPERTS |= {f"{part}.weight": "H M" for part in ("down_proj", "w2")} | {"gate_up_proj": "E 2M H", "down_proj": "E H M"}
_OF_MODEL = {"embed_tokens.weight": "V H", "norm.weight": "H"}  # beside its layers
_HEAD = "lm_head.weight"
CACHE_SCALES = ("k_scale", "v_scale", "output_scale")  # ends of names of what belongs to a KV cache
BESIDE = ("bias", *CACHE_SCALES)  # of a quantized weight
_NOT_ADDED = (*CACHE_SCALES, "rotary_emb.inv_freq")  # which add nothing to a model
_ROWS = [layout for layouts in DIALECTS.values() for layout in layouts]
_COMPANIONS = tuple({suffix for row in _ROWS for suffix in (row.scales, row.tensor_scale, row.input_scale) if suffix})


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: `severity` is `fault` or `warning`, `name` the tensor, module or file that it is about."""

    severity: str
    what: str
    name: str
    detail: str


@dataclass(frozen=True)
class Inspection:
    """What `inspect_checkpoint` found; numbers are None where the files contradict each other before any is read.

    `bits_per_weight` counts codes, block scales and tensor scales over the quantized weights.
    """

    path: str
    dialect: str | None = None
    scheme: str | None = None
    formats: tuple[str, ...] = ()
    recipes: tuple[str, ...] = ()
    quantized: int | None = None
    plain: int | None = None
    layers: int | None = None
    experts: int | None = None
    bits_per_weight: float | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are no mere warnings."""
        return tuple(finding for finding in self.findings if finding.severity == "fault")

    @property
    def summary(self) -> str:
        """How many of what was found, in a line."""
        faults = len(self.faults)
        counts = {"fault": faults, "warning": len(self.findings) - faults}
        found = [f"{count or 'no'} {severity}{'' if count == 1 else 's'}" for severity, count in counts.items()]
        return ("found: " if self.findings else "nothing found: ") + ", ".join(found)

    def record(self) -> dict:
        """Everything, as JSON takes it."""
        return asdict(self)


def inspect_checkpoint(
    path: str | os.PathLike,
    *,
    dialect: str | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Inspection:
    """Read every tensor of a checkpoint and say what is wrong with it.

    Faults: files that contradict themselves, what a config says and nothing here follows, block scales that are NaN,
    negative, or zero over codes that are not, values that are NaN or Inf, an input scale that is missing, not finite and
    positive, or of inputs too large or small to be any, weights whose rms is implausible (and would not be in the other
    direction of the tensor scale), tensors that belong to no weight, plain tensors of integers or float64 for floats;
    layers, experts and quantized modules that the config promises and the files lack, layers and experts beyond those
    that it counts, numbers that no model can have, numbers of experts that contradict each other, experts of a layer in
    several formats, what is stored under two names; of known model types norms, routers and projections that a layer
    lacks, shapes that are not the config's, biases too, and tensors that no layer has a place for. Warnings: gate and up
    with different scales, weights that are all zero or end in a short block, experts quantized in part, weights not
    quantized in blocks, a quantized KV cache, tensors beside the layers that have no place, a file that is not read.
    `dialect`: as for `load_checkpoint`. `on_progress("tensors", done, all)` is called as work proceeds. Memory holds one
    tensor at a time. Raises ValueError for a path that is no checkpoint, and for a file that is broken or cut off
    (`UnreadableError`).

    >>> inspect_checkpoint("nowhere")
    Traceback (most recent call last):
    ValueError: nowhere: expected a checkpoint directory or a .safetensors file
    """
    try:
        checkpoint, broken = open_checkpoint(path, dialect=dialect)
    except UnreadableError:
        raise
    except CheckpointError as fault:
        return Inspection(str(path), findings=(Finding("fault", "files", str(path), str(fault)),))
    findings = [Finding("fault", "layout", name, detail) for name, detail in broken.items()]
    findings += [Finding("warning", "files", str(path), note) for note in checkpoint.notes]
    if checkpoint.contradicted:
        findings.append(Finding("warning", "config", "config.json", checkpoint.contradicted))
    says = checkpoint.declared
    findings += [Finding("fault", "config", "config.json", said) for said in (*says.refused, *says.unread)]
    findings += [Finding("warning", "KV cache", "config.json", said) for said in says.cache]
    quantized, elements, bits, scales, experts = checkpoint.quantized, 0, 0.0, {}, set()
    copied = checkpoint.streamed()
    for done, name in enumerate(checkpoint, start=1):
        if on_progress is not None:
            on_progress("tensors", done, len(checkpoint))
        try:
            weight = (copied if _looks_at_all(checkpoint, name) else checkpoint)[name]
        except CheckpointError as fault:
            findings.append(Finding("fault", "values", name, str(fault)))
            continue
        if isinstance(weight, torch.Tensor):
            findings += _plain_findings(name, weight, checkpoint.shards.entries[name].dtype)
            continue
        findings += _weight_findings(weight, checkpoint.declared.static)
        elements += weight.tensor.shape.numel()
        bits += weight.tensor.bits_per_element * weight.tensor.shape.numel()
        experts |= {weight.tensor.shape[0]} if weight.tensor.ndim == 3 else set()
        scales[name] = {"tensor scale": weight.tensor.tensor_scale, "input scale": weight.input_scale}
    findings += [*_gate_up(scales), *_unknown(checkpoint, broken), *promised(checkpoint), *incomplete(checkpoint)]
    findings += [*misshapen(checkpoint), *_mixed(checkpoint), *stored_twice(checkpoint), *miscounted(checkpoint)]
    if not checkpoint.shards.entries:
        findings.append(Finding("fault", "files", str(path), "there is no tensor in them"))
    known = {finding.name for finding in findings}
    further = (*_lacking(checkpoint), *_placeless(checkpoint, broken))
    findings += [finding for finding in further if finding.name not in known]
    towers = language_towers(checkpoint)
    layers = {place[1] for name in checkpoint if (place := _in_layer(name, towers))}
    experts |= {1 + int(match[0]) for name in checkpoint if (match := _EXPERT.search(name))}
    shapes = {name: checkpoint.shards.entries[name].shape for name in checkpoint.plain if STACK.fullmatch(name)}
    experts |= {shape[0] for shape in shapes.values() if len(shape) == 3}
    return Inspection(
        path=str(path),
        dialect=checkpoint.dialect,
        scheme=checkpoint.scheme,
        formats=checkpoint.formats,
        recipes=tuple(sorted({checkpoint.stored[name].layout.recipe for name in quantized})),
        quantized=len(quantized),
        plain=len(checkpoint.plain),
        layers=len(layers),
        experts=max(experts, default=0),
        bits_per_weight=bits / elements if elements else None,
        findings=tuple(sorted(findings, key=lambda finding: finding.severity)),
    )


def _looks_at_all(checkpoint: Checkpoint, name: str) -> bool:
    """Whether each value of a tensor is looked at; of other weights the scales, and the codes of a few blocks."""
    weight = checkpoint.stored[name]
    return weight is None or weight.layout.block.element.specials != "none"


def _weight_findings(weight: QuantizedWeight, static: bool) -> Iterator[Finding]:
    """What is wrong with one weight. `static`: whether the config says that its input has a stored scale."""
    q, name = weight.tensor, weight.name
    is_nan = q.scales == q.format.scale.nan_code
    nan, dead = int(is_nan.sum()), dead_blocks(q)
    if nan:
        yield Finding("fault", "NaN block scales", name, f"{nan} of {q.scales.numel()}")
    if dead:
        detail = f"{dead} of {q.scales.numel()} blocks have the scale 0 and codes that are not"
        yield Finding("fault", "zero block scales", name, detail)
    odd = not_finite(replace(q, scales=q.scales.masked_fill(is_nan, 0)) if nan else q)
    if odd:
        yield Finding("fault", "not finite", name, f"{odd} of {q.shape.numel()} are NaN or Inf")
    if q.length % q.format.block_size:
        detail = f"{q.length} elements a row: the last block holds {q.length % q.format.block_size}"
        yield Finding("warning", "short blocks", name, detail)
    if weight.input_scale is None:
        if static:
            yield Finding("fault", "input scale", name, "missing: the config says that activations have one")
    else:
        dead = weight.input_scale[~usable(weight.input_scale)]
        if dead.numel():
            yield Finding("fault", "input scale", name, f"{dead.flatten()[0].item()}: an input never seen in calibration?")
        else:
            yield from _input_findings(weight)
    for label, matrix in _matrices(name, q):
        yield from _rms_findings(label, matrix)


def _input_findings(weight: QuantizedWeight) -> Iterator[Finding]:
    """Input scales that come from no input of a trained model: each says how large the largest was."""
    block, scale = weight.tensor.format, weight.input_scale.double()
    largest = (1 / scale if weight.input_direction == "divide" else scale) * block.element.max * block.scale.max
    odd = (largest < INPUT_RANGE[0]) | (largest > INPUT_RANGE[1])
    if odd.any():
        given, amax = (each[odd].flatten()[0].item() for each in (weight.input_scale, largest))
        detail = f"{given:.3g}: of inputs up to {amax:.3g}, expected {INPUT_RANGE[0]:g} to {INPUT_RANGE[1]:g}"
        yield Finding("fault", "input scale", weight.name, detail)


def _plain_findings(name: str, tensor: torch.Tensor, dtype: str) -> Iterator[Finding]:
    """What is wrong with a tensor that is no block-scaled weight: a norm, a router, an embedding."""
    if dtype in _WIDE and dtype not in _LOADED and name.endswith(("weight", "bias", "sinks")):
        yield Finding("fault", "dtype", name, f"{dtype}: expected one of {', '.join(_LOADED)}")
    if dtype not in _FLOATS:
        return
    odd = not_finite(tensor)
    if odd:
        yield Finding("fault", "not finite", name, f"{odd} of {tensor.numel()} are NaN or Inf")


def _matrices(name: str, q: BlockTensor) -> Iterator[tuple[str, BlockTensor]]:
    """The first rows of every matrix of a weight."""
    for label, matrix in [(name, q)] if q.ndim == 2 else [(f"{name}[{i}]", q[i]) for i in range(q.shape[0])]:
        yield label, matrix[: max(1, _SAMPLE // matrix.length)]


def _rms_findings(name: str, q: BlockTensor) -> Iterator[Finding]:
    values = dequantize(q).double().nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    rms = values.square().mean().sqrt().item()
    if rms == 0:
        yield Finding("warning", "all zero", name, "")
    elif not RMS_RANGE[0] <= rms <= RMS_RANGE[1]:
        detail = f"rms {rms:.3g}"
        if q.tensor_scale is not None:
            given = q.tensor_scale.double().mean().item()
            divides = q.recipe.tensor_scale_direction == "divide"
            other = rms * given**2 if divides else rms / given**2
            detail += (
                f" where the tensor scale {given:.3g} {'divides' if divides else 'multiplies'}, {other:.3g} the other way"
            )
        yield Finding("fault", "implausible weights", name, detail)


def _gate_up(scales: Mapping[str, dict[str, torch.Tensor | None]]) -> Iterator[Finding]:
    """Gate and up projections whose scales differ: readers that keep one of the two are wrong by the ratio."""
    for name in scales:
        for gate, up in _PAIRS:
            other = name.replace(f".{gate}.", f".{up}.")
            if other == name or other not in scales:
                continue
            for what, first in scales[name].items():
                second = scales[other][what]
                if first is not None and second is not None and not torch.equal(first, second):
                    ratio = (first / second).flatten()[0].item()
                    yield Finding("warning", f"gate and up: {what}", name, f"gate's is {ratio:.4g} times up's")
        both = scales[name]["tensor scale"]
        if both is not None and both.ndim == 3 and both.shape[1] > 1:
            gate, up = both[:, 0, 0], both[:, -1, 0]
            for expert in (gate != up).nonzero().flatten().tolist():
                detail = f"gate's is {(gate[expert] / up[expert]).item():.4g} times up's"
                yield Finding("warning", "gate and up: tensor scale", f"{name}[{expert}]", detail)


def _unknown(checkpoint: Checkpoint, broken: Iterable[str]) -> Iterator[Finding]:
    """Tensors that look quantized and belong to no weight; of what is broken one finding is enough."""
    entries, reported = checkpoint.shards.entries, {name.rpartition(".")[0] for name in broken}
    beside = {name.removesuffix(".weight") for name in checkpoint.quantized}
    for name in checkpoint.plain:
        module, _, leaf = name.rpartition(".")
        dtype = entries[name].dtype
        if module in reported:
            continue
        weight = entries.get(module + ".weight")
        if dtype.startswith("F8") and module + ".weight_scale" in entries:
            yield Finding("warning", "not in blocks", name, f"{dtype} with a scale of its own: kept as stored")
        elif dtype not in _WIDE:
            yield Finding("fault", "unknown tensor", name, f"{dtype} that belongs to no weight")
        elif name.endswith(_COMPANIONS) and not (weight and weight.dtype.startswith("F8")):
            yield Finding("fault", "unknown tensor", name, "a scale that belongs to no weight")
        elif module in beside and leaf not in BESIDE:
            yield Finding("fault", "unknown tensor", name, f"beside a quantized weight: expected {' or '.join(BESIDE)}")


def _placeless(checkpoint: Checkpoint, broken: Iterable[str]) -> Iterator[Finding]:
    """Plain tensors for which a model of this type has no place: in a layer a fault, beside its layers another head's,
    perhaps, or another part's where the config has such."""
    config, towers = language_config(checkpoint.config), language_towers(checkpoint)
    known, total = _known(config), _counted(config, "num_hidden_layers")
    whole = {tower + part for tower in towers for part in _OF_MODEL}
    entries, reported = checkpoint.shards.entries, {name.rpartition(".")[0] for name in broken}
    for name in checkpoint.plain if known else ():
        place, module = _in_layer(name, towers), name.rpartition(".")[0]
        weight = entries.get(f"{module}.weight")
        if module in reported or name.endswith(_COMPANIONS) or (weight and weight.dtype not in _WIDE):
            continue  # quantized in a way of its own, or wrongly
        if checkpoint.declared.cache and name.endswith(CACHE_SCALES):
            continue
        if place:  # in a layer that is counted
            has_place = _shape(place[2], known) is not None or 0 < total <= place[1]
        else:
            has_place = name in whole or _is_head(name) or config != checkpoint.config
        if not has_place:
            severity = "fault" if place and not name.endswith(_NOT_ADDED) else "warning"
            yield Finding(severity, "no place", name, f"a model of type {get(config, 'model_type')} has none for it")


def passed_over(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, str]:
    """Those of `names` that the config announces and no causal language model runs, each with what it says: scales of a KV
    cache, layers of multi-token prediction."""
    config, towers = language_config(checkpoint.config), language_towers(checkpoint)
    total, more = _counted(config, "num_hidden_layers"), _counted(config, _PREDICTING)
    found = {}
    for name in names:
        place = _in_layer(name, towers)
        if checkpoint.declared.cache and name.endswith(CACHE_SCALES):
            found[name] = checkpoint.declared.cache[0]
        elif place and 0 < total <= place[1] < total + more:
            found[name] = f"{_PREDICTING} {more}: layers of multi-token prediction are left out"
    return found


def promised(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Modules that the config says are quantized, and which are not, or are not there."""
    says, entries = checkpoint.declared, checkpoint.shards.entries
    for name in checkpoint.plain if says.formats or says.layers else ():
        module = name.removesuffix(".weight")
        if entries[name].dtype in _FLOATS and len(entries[name].shape) > 1 and _LINEAR.fullmatch(module):
            if says.leaves(module) is None:
                yield Finding("fault", "not quantized", name, f"{entries[name].dtype}, which the config says is quantized")
    modules = {name.removesuffix(".weight") for name in checkpoint}
    for module in says.layers:
        if not set("*?[:") & set(module) and "." in module and module not in modules:
            yield Finding("fault", "missing", module, "the config says that it is quantized")
    if checkpoint.dialect == "torchao":
        for name, described in checkpoint.shards.metadata.items():
            if '"MXTensor"' in described and name not in checkpoint:
                yield Finding("fault", "missing", name, "the header describes it")


def language_towers(checkpoint: Checkpoint) -> Collection[str]:
    """What the names of the language model's layers begin with, `model.` say, and those of no vision tower: what has
    embeddings of tokens beside it, or is called so; all where that tells none apart, or the config counts two kinds."""
    towers = {match[1] for name in checkpoint if (match := _LAYER.fullmatch(name))}
    if get(checkpoint.config, "is_encoder_decoder"):
        return towers
    embedding = towers & {name.partition("embed_tokens.")[0] for name in checkpoint if "embed_tokens." in name}
    return embedding or {tower for tower in towers if "language" in tower} or towers


def _in_layer(name: str, towers: Collection[str]) -> tuple[str, int, str] | None:
    """The tower, the layer's number and the rest of a name; None where it is of no layer of these towers."""
    match = _LAYER.fullmatch(name)
    return (match[1], int(match[2]), match[3]) if match and match[1] in towers else None


def incomplete(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Layers and experts that the config counts and the files lack."""
    config, towers = language_config(checkpoint.config), language_towers(checkpoint)
    layers: set[int] = set()
    experts: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in checkpoint:
        if not name.endswith(".bias"):
            name = name.rpartition(".")[0]  # the module: a weight that could not be made out is no missing one
        name += "."
        place, expert = _in_layer(name + "*", towers), _EXPERT.search(name)
        layers |= {place[1]} if place else set()
        if expert:
            experts[name[: expert.start()], name[expert.end() : -1]].add(int(expert[0]))
    total = _counted(config, "num_hidden_layers")
    if layers and total:
        yield from _missing("layer", "*.layers.{}", layers, total)
    more = total + _counted(config, _PREDICTING)
    if total and str(get(config, "model_type")) in _LAYERS:  # others may have layers of another part
        yield from _beyond("layer", "*.layers.{}", layers, more)
    total = _counted(config, *EXPERT_COUNTS)
    for (where, part), found in experts.items() if total else ():
        yield from _beyond("expert", f"{where}{{}}{part}", found, total)
    total = total or max((1 + max(found) for found in experts.values()), default=0)
    parts = {part for _, part in experts}
    for where in dict.fromkeys(where for where, _ in experts):
        for part in sorted(parts):
            yield from _missing("expert", f"{where}{{}}{part}", experts.get((where, part), set()), total)


def _parts(config: object) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """What a layer has by this config, what one with experts has besides, what it may have; nothing of unknown types."""
    kind = str(get(config, "model_type"))
    always, with_experts, may = _LAYERS.get(kind, ({}, {}, {}))
    for key, (default, biases) in _BIASES.get(kind, {}).items():
        said = get(config, key)
        always = always | biases if (default if said is None else said) else always
    return always, with_experts, may


def _known(config: object) -> dict[str, str]:
    """The shapes of all that a layer has or may have, by name."""
    always, with_experts, may = _parts(config)
    known: dict[str, str] = {}
    for names, shapes in (may | always | with_experts).items():
        known |= zip(names.split("|"), cycle(shapes.split("|")))
    return known


def _shape(part: str, known: Mapping[str, str]) -> str | None:
    """The letters of a shape, "" for any; None for what has no place in a layer."""
    part = _EXPERT.sub("*", part)
    return known.get(part, _OF_EXPERTS.get(part.partition(".experts.")[2].removeprefix("*.")))


def _lacking(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What a layer of this model type has, and layers of the files lack; and what the whole model has."""
    config, towers = language_config(checkpoint.config), language_towers(checkpoint)
    always, with_experts, _ = _parts(config)
    if not always:
        return
    layers: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in checkpoint.shards.entries.keys() | checkpoint.keys():
        if place := _in_layer(name, towers):
            *layer, part = *place[:2], _EXPERT.sub("*", place[2])
            of_projection = _LINEAR.fullmatch(part.rpartition(".")[0]) and not part.endswith(".bias")
            # a weight that could not be made out is no missing one
            layers[tuple(layer)].add(f"{part.rpartition('.')[0]}.weight" if of_projection else part)
    found = {}
    for part in (*always, *with_experts):
        having = {layer: names for layer, names in layers.items() if part in always or any(".experts." in n for n in names)}
        without = sorted(layer for layer in having if not set(part.split("|")) & having[layer])
        if without:
            tower, number = without[0]
            detail = f"{len(without)} of {len(having)} layers lack it"
            name = f"{tower}layers.{number}.{part.split('|')[0]}"
            found[name] = Finding("fault", "missing", name, detail)
    yield from found.values()
    whole = [tower + part for tower in sorted(towers) for part in _OF_MODEL]
    if get(config, "tie_word_embeddings") is False and get(checkpoint.config, "tie_word_embeddings") is not True:
        whole += [_HEAD] * (not any(_is_head(name) for name in checkpoint))
    for name in whole:
        if layers and name not in checkpoint:
            yield Finding("fault", "missing", name, "every model of this type has it")


def _is_head(name: str) -> bool:
    return f".{name}".endswith(f".{_HEAD}")


def misshapen(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors of known model types whose shapes are not those that the config's numbers make."""
    config, towers = language_config(checkpoint.config), language_towers(checkpoint)
    known = _known(config)
    whole = {tower + part: shape for tower in towers for part, shape in _OF_MODEL.items()}
    sizes = _sizes(config)
    for name, weight in checkpoint.stored.items() if known else ():
        place = _in_layer(name, towers)
        of_whole = "V H" if _is_head(name) else whole.get(name)
        expected = _shape(place[2], known) if place else of_whole
        if not expected:
            continue
        shape = list(checkpoint.shards.entries[name].shape if weight is None else weight.shape)
        wanted = [sizes.get(letter) for letter in expected.split()]
        if weight is None and len(wanted) == 3 and get(config, "model_type") in STACKING_MODELS:
            wanted[1:] = reversed(wanted[1:])  # their stacks of floats are [experts, in, out]
        if len(shape) != len(wanted) or any(size and size != given for size, given in zip(wanted, shape)):
            said = ", ".join(str(size or "any") for size in wanted)
            yield Finding("fault", "shape", name, f"{shape}, and by the config [{said}]")


def stored_twice(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What is stored under two names: matrices of experts as a stack and one by one, or by another name of theirs."""
    mixtral = get(language_config(checkpoint.config), "model_type") == "mixtral"  # whose block others, and it, call mlp
    found: dict[tuple, list[str]] = defaultdict(list)
    stacks: dict[tuple, list[str]] = defaultdict(list)
    for name in checkpoint:
        place = name.replace(".block_sparse_moe.", ".mlp.") if mixtral else name
        if match := _OF_ALL_EXPERTS.fullmatch(place):
            stacks[match[1], match[2] == "down", match[3] is not None].append(name)
        elif match := _OF_ONE_EXPERT.fullmatch(place):
            part = _USUAL.get(match[3], match[3])
            found[match[1], part == "down_proj", match[4] == "bias", part, match[2]].append(name)
        else:
            found[(place,)].append(name)
    for key, names in found.items():
        stacks.get(key[:3], []).extend(names)
        if len(names) > 1:
            yield Finding("fault", "stored twice", names[1], f"also as {names[0]}")
    for first, *others in stacks.values():
        if others:
            more = f" and {len(others) - 1} others" if len(others) > 1 else ""
            yield Finding("fault", "stored twice", first, f"also as {others[0]}{more}")


def miscounted(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Numbers of the config that no model can have, and numbers of experts that contradict each other."""
    config = language_config(checkpoint.config)
    for kinds, least_by_key, expected in ((int, _WHOLE, "a whole number"), ((int, float), _REAL, "a finite number")):
        for key, least in least_by_key.items():
            given = config.get(key)
            if given is None or isinstance(given, (list, dict)):  # a number for each layer, or kind of layer
                continue
            if isinstance(given, bool) or not isinstance(given, kinds) or not least <= given < inf:
                said = f"{key} {json.dumps(given):.80}: expected {expected} of at least {least}"
                yield Finding("fault", "config", "config.json", said)
    counts = {key: number for key in EXPERT_COUNTS if (number := _counted(config, key))}
    said = " and ".join(f"{key} {number}" for key, number in counts.items())
    if len(set(counts.values())) > 1:
        yield Finding("fault", "config", "config.json", f"{said}: expected one number of experts")
    chosen = config.get(_CHOSEN)
    if counts and (chosen == 0 or _counted(config, _CHOSEN) > max(counts.values())):
        yield Finding("fault", "config", "config.json", f"{_CHOSEN} {chosen}, which {said} cannot give")


def _sizes(config: object) -> dict[str, int]:
    """The letters of shapes; 0 where the config does not say, and its type may have a default of its own."""
    hidden, heads = _counted(config, "hidden_size"), _counted(config, "num_attention_heads")
    head, kind = _counted(config, "head_dim"), get(config, "model_type")
    if not head and heads and kind in ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe"):
        head = hidden // heads
    pairs = _counted(config, "num_key_value_heads", *(("num_attention_heads",) if kind == "llama" else ()))
    of_expert = _counted(config, "intermediate_size" if kind in ("mixtral", "gpt_oss") else "moe_intermediate_size")
    return {
        "H": hidden,
        "A": heads,
        "D": head,
        "Q": heads * head,
        "K": pairs * head,
        "I": _counted(config, "intermediate_size"),
        "M": of_expert,
        "2M": 2 * of_expert,
        "E": _counted(config, *EXPERT_COUNTS),
        "V": _counted(config, "vocab_size"),
    }


def _counted(config: object, *keys: str) -> int:
    found = [get(config, key) for key in keys]
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0), 0)


def _missing(kind: str, pattern: str, found: set[int], total: int) -> Iterator[Finding]:
    lacking = total - sum(index < total for index in found)
    if lacking:
        first = next(index for index in count() if index not in found)
        yield Finding("fault", "missing", pattern.format(first), f"{lacking} of {total} {kind}s are not there")


def _beyond(kind: str, pattern: str, found: set[int], total: int) -> Iterator[Finding]:
    beyond = [index for index in found if index >= total]
    if beyond:
        detail = f"the config counts {total} {kind}s, the first is 0" + (f"; {len(beyond)} are beyond" if beyond[1:] else "")
        yield Finding("fault", "too many", pattern.format(min(beyond)), detail)


def _mixed(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Experts of a layer that no one layer can run: quantized in part, or gates and ups, or downs, in several formats."""
    found: dict[tuple[str, bool], dict[str, str]] = defaultdict(dict)
    for name, weight in checkpoint.stored.items():
        where, _, part = name.removesuffix(".weight").rpartition(".experts.")
        part = part.rpartition(".")[2]
        if where and _OF_EXPERTS.keys() & {part, f"{part}.weight"}:
            format = weight.layout.format if weight else ""
            found[f"{where}.experts", part in ("down_proj", "w2")].setdefault(format, name)
    for layer in dict.fromkeys(layer for layer, _ in found):
        formats = [found.get((layer, down), {}) for down in (False, True)]
        floats = [each[""] for each in formats if "" in each]
        if floats and any(format for each in formats for format in each):
            yield Finding("warning", "quantized in part", layer, f"{floats[0]} is not: expected all of its weights or none")
        for each in formats:
            if len(each.keys() - {""}) > 1:
                detail = ", ".join(f"{format} ({name})" for format, name in each.items() if format)
                yield Finding("fault", "formats", layer, f"{detail}: expected one for all experts")
