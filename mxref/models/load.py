"""`load`: a checkpoint of block-scaled weights as a transformers model that computes what its scheme says.

The model is built from its config alone and every tensor of the checkpoint put in its place, one at a time: nothing is
initialized that the files should hold, and nothing in the files is passed over.
"""

import functools
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxref.blocks import BlockTensor, dequantize
from mxref.checkpoints import Checkpoint, CheckpointError, QuantizedWeight, load_checkpoint
from mxref.checkpoints.checkpoint import check_device, usable
from mxref.checkpoints.dialects import Patterns, activation_recipe, check_patterns
from mxref.checkpoints.inspection import incomplete, miscounted, misshapen, passed_over, promised
from mxref.elements import FLOAT_DTYPES, check_dtype
from mxref.formats import check_choice
from mxref.models.layers import (
    LAYER_SEMANTICS,
    ExpertsWeights,
    InputScales,
    MXExperts,
    MXLinear,
    gate_scale_for_both,
)
from mxref.models.swap import (
    activation_name,
    find_experts,
    refuse_unsupported,
    split_gate_up,
    stack_matrices,
    stack_rows,
)

SCALES = ("stored", "vllm")
_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
_SHOWN = 5  # names in a message
_RENAMED = ((".block_sparse_moe.", ".mlp."),)  # transformers 5 calls Mixtral's block what others call it
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.(weight|bias)")
_STACK = re.compile(r"(.+\.experts)\.(gate_up_proj|up_proj|down_proj)")
_STACKED_BIAS = re.compile(r"(.+\.experts)\.(gate_up|down)_proj_bias")
_ANY = -1  # of the experts
_PARTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}


@dataclass
class _Layer:
    """An experts layer of `count` experts as it fills up.

    `quantized`: weights by part (`gate`, `up`, `down`, or `gate_up`) and expert, of a stack the expert is None. `filled`:
    the (part, expert) of its own parameters that plain tensors have filled, by parameter, of a stack the expert is None.
    """

    name: str
    own: nn.Module
    count: int
    quantized: dict[str, dict[int | None, QuantizedWeight]] = field(default_factory=lambda: defaultdict(dict))
    filled: dict[str, set[tuple[str, int | None]]] = field(default_factory=lambda: defaultdict(set))

    @property
    def stacked(self) -> bool:
        """Whether its quantized weights are stacks, one of all experts."""
        return any(None in found for found in self.quantized.values())

    @property
    def wanted(self) -> tuple[str, ...]:
        """The parts that its quantized weights come in."""
        if not self.own.has_gate:
            return ("up", "down")
        return ("gate_up", "down") if self.stacked else ("gate", "up", "down")

    def lacking(self) -> Iterator[tuple[str, list[tuple[str, int | None]]]]:
        """The (part, expert) that are not there, by kind, of what is there in part."""
        plain = any(self.filled.get(name) for name in _WEIGHTS)
        if self.quantized and not plain:
            indices = (None,) if self.stacked else range(self.count)
            yield "weight", [(p, i) for p in self.wanted for i in indices if i not in self.quantized.get(p, ())]
        for parameter, filled in self.filled.items():
            if self.quantized and parameter in _WEIGHTS:
                continue  # quantized in part: `_experts` says so
            if None not in {expert for _, expert in filled}:
                parts = ("gate", "up") if parameter.startswith("gate_up") else (parameter.split("_")[0],)
                every = [(part, expert) for part in parts for expert in range(self.count)]
                yield "bias" if parameter.endswith("bias") else "weight", [each for each in every if each not in filled]


def load(
    path: str | os.PathLike,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    semantics: str = "torch",
    scales: str = "stored",
    dequantized: bool = False,
    dialect: str | None = None,
    ignore: Sequence[str] = (),
) -> nn.Module:
    """Load a checkpoint directory as a transformers causal language model that runs the checkpoint's own scheme.

    Weights stay block-scaled; inputs of quantized layers are quantized as the config says, with the stored scales where
    there are such. `path`: what `mxref.checkpoints.load_checkpoint` opens, unquantized checkpoints too, with a
    config.json. `dtype`: of everything that is not quantized (None: the config's). `semantics`: `"torch"` (weights
    decoded, inputs quantized and decoded, products by torch: what the tools themselves compute), `"blockwise"` or
    `"dequantized"` (defined to the last bit, see `mxref.moe_experts`). `scales`: `"stored"` (each as it is in the file)
    or `"vllm"`, which is what vLLM 0.33 does to experts: the gate's tensor scale also decodes the up projection, and one
    input scale, that of the largest amax, serves all experts. `dequantized=True` gives the plain transformers model of the
    decoded weights, without quantized activations. `dialect`: as for `load_checkpoint`. `ignore`: names, wildcards or `re:`
    expressions of tensors to leave out, or of modules with all their tensors, e.g. `*.k_scale`. Scales of a KV cache and
    layers of multi-token prediction that the config announces are left out, with a warning, where the model has no place.

    Tensors are read one at a time and go to `device` at once. Raises ValueError for arguments and architectures that are
    not known, `CheckpointError` (a ValueError) for tensors that are missing, have no place in the model, have another
    shape or dtype or values beyond the range of the model's dtype, for scales no input can be quantized with, and for what
    the config promises and the files lack.

    >>> load("nowhere")
    Traceback (most recent call last):
    ValueError: nowhere: expected a checkpoint directory or a .safetensors file
    """
    check_choice("semantics", semantics, LAYER_SEMANTICS)
    check_choice("scales", scales, SCALES)
    if dtype is not None:
        check_dtype("dtype", dtype)
    left_out, device = Patterns(check_patterns("ignore", ignore)), check_device(device)
    checkpoint = load_checkpoint(path, dialect=dialect, weights_only=True)
    if scales != "stored" and (dequantized or not checkpoint.quantized):
        what = "dequantized=True leaves none" if dequantized else f"{path} has none: nothing in it is quantized"
        raise ValueError(f"scales={scales!r} is for stored scales, and {what}")
    if checkpoint.contradicted and not dequantized:
        raise CheckpointError(f"{path}: {checkpoint.contradicted}, which leaves open how inputs are quantized")
    missing = (finding for finding in incomplete(checkpoint) if finding.what == "missing")
    of_tensors = (f for f in (*promised(checkpoint), *misshapen(checkpoint)) if not left_out.find(f.name))
    for finding in (*miscounted(checkpoint), *missing, *of_tensors):  # before any of it is built
        raise CheckpointError(f"{path}: {finding.what}: {finding.name}: {finding.detail}")
    if checkpoint.declared.unread and not dequantized:
        said = checkpoint.declared.unread[0]
        raise CheckpointError(f"{path}: the config says {said}; dequantized=True takes the weights alone")
    for said in checkpoint.declared.cache:
        warnings.warn(f"{path}: the config says {said}", stacklevel=2)
    model = _empty_model(Path(path), dtype, device)
    layers = {name: _Layer(name, own, len(own.down_proj)) for name, own in find_experts(model).items()}
    _check_counts(path, model, layers)
    slots, renamings, places, linears, unexpected = _slots(model), _renamings(model), {}, {}, []
    for name in checkpoint:
        if left_out.find(name):
            continue
        place = functools.reduce(lambda place, renaming: place.replace(*renaming), renamings, name)
        part = _expert_part(place, layers)
        filled, barred = _claims(place, part)
        if first := next((places[other] for other in barred if other in places), None):
            raise CheckpointError(f"{path}: {name} is stored a second time, as {first}")
        places |= dict.fromkeys(filled, name)
        if part is not None:
            _put_in_experts(name, checkpoint[name], *part, device, dequantized)
        elif place in slots:
            value = checkpoint[name]
            if isinstance(value, QuantizedWeight) and not dequantized:
                linears[place.removesuffix(".weight")] = _moved(value, device)
            else:
                _set(model, place, _plain(name, value, slots[place].shape, slots[place].dtype, device))
        else:
            unexpected.append(name)
    unexpected = unannounced(path, checkpoint, unexpected)
    _refuse(path, unexpected, f"no place in {type(model).__name__}", "; ignore= leaves tensors out")
    model.tie_weights(missing_keys={name for name, slot in _slots(model).items() if slot.is_meta})
    _refuse(path, _missing(model, layers, linears), "missing")
    for name, weight in linears.items():
        model.set_submodule(name, _linear(name, model.get_submodule(name), weight, checkpoint, semantics))
    for layer in layers.values():
        if layer.quantized:
            model.set_submodule(layer.name, _experts(layer, checkpoint, semantics, scales))
    model.name_or_path = str(path)
    return model.eval()


def _check_counts(path: str | os.PathLike, model: nn.Module, layers: Mapping[str, _Layer]) -> None:
    """Raise for a config, with its defaults, that takes more experts for a token than there are."""
    taken = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)
    for layer in layers.values():
        if taken is None or isinstance(taken, int) and not 1 <= taken <= layer.count:
            said = f"num_experts_per_tok {taken}: expected 1 to {layer.count}, the experts of {layer.name}"
            raise CheckpointError(f"{path}: the config says {said}")


def unannounced(path: str | os.PathLike, checkpoint: Checkpoint, names: Collection[str]) -> list[str]:
    """Those of `names` that the config does not announce as no part of the model that runs; warns of the others."""
    announced = passed_over(checkpoint, names)
    for said in dict.fromkeys(announced.values()):
        if said not in checkpoint.declared.cache:  # which is said of every model
            warnings.warn(f"{path}: the config says {said}", stacklevel=3)
    return [name for name in names if name not in announced]


def _refuse(path: str | os.PathLike, names: Iterable[str], what: str, hint: str = "") -> None:
    names = list(names)
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        raise CheckpointError(f"{path}: {what}: {shown}{hint}")


# the model without values


def _empty_model(path: Path, dtype: torch.dtype | None, device: torch.device) -> nn.Module:
    """The model that the config describes, its parameters on the meta device, what it computes at start on `device`."""
    try:
        import transformers
    except ImportError as missing:
        raise ImportError("loading models needs transformers: pip install 'mxref[models]'") from missing
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise ValueError(f"{path}: no config.json, which says what the model is")
    try:
        config = transformers.AutoConfig.from_pretrained(folder)
        for part in (config, config.get_text_config()):
            if hasattr(part, "quantization_config"):
                del part.quantization_config
    except Exception as failure:  # whatever a config makes transformers raise
        raise _no_model(path, failure) from None
    dtype = dtype or config_dtype(str(path), config) or torch.bfloat16
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as failure:
        raise _no_model(path, failure) from None
    for name in _kept_in_float32(model, dtype):
        _set(model, name, _slots(model)[name].float())
    _compute_buffers(model, device)
    return model.requires_grad_(False)


def _no_model(path: Path, failure: Exception) -> ValueError:
    reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
    return ValueError(f"{path}: config.json describes no causal language model that transformers knows: {reason}")


def config_dtype(name: str, config: Any) -> torch.dtype | None:
    """The dtype that the config of `name` says, if it is one that a model can be run in; raises ValueError if not.

    Where the config of its language model is no object that is a `CheckpointError`.
    """
    text = config.get_text_config()
    if not hasattr(text, "dtype"):
        given = f"{type(text).__name__} {text!r}"
        raise CheckpointError(f"{name}: config.json gives {given} as the config of the language model: expected an object")
    dtype = text.dtype or config.dtype
    if dtype is not None:
        check_runs(f"{name}: config.json says dtype", dtype)
    return dtype


def check_runs(what: str, dtype: torch.dtype) -> None:
    """Raise ValueError unless a model can be run in `dtype`."""
    if dtype not in FLOAT_DTYPES:
        known = ", ".join(str(each).removeprefix("torch.") for each in FLOAT_DTYPES)
        raise ValueError(f"{what} {str(dtype).removeprefix('torch.')}: expected one of {known}")


def _kept_in_float32(model: nn.Module, dtype: torch.dtype) -> list[str]:
    patterns = list(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    patterns += list(getattr(model, "_keep_in_fp32_modules", None) or ()) if dtype == torch.float16 else []
    return [name for name in _slots(model) if any(re.search(rf"(^|\.){re.escape(p)}(\.|$)", name) for p in patterns)]


def _compute_buffers(model: nn.Module, device: torch.device) -> None:
    """Give a value to every buffer that no checkpoint holds, such as the frequencies of rotary embeddings."""
    for name, module in model.named_modules():
        own = [key for key, buffer in module.named_buffers(recurse=False) if key in module._non_persistent_buffers_set]
        if not own:
            continue
        for key in own:
            empty = torch.empty_like(module._buffers[key], device="cpu")
            module._buffers[key] = empty.fill_(torch.nan) if empty.is_floating_point() else empty
        model._init_weights(module)
        left = [key for key in own if not module._buffers[key].is_floating_point() or module._buffers[key].isnan().any()]
        if left:
            raise ValueError(f"{type(model).__name__}: {name}.{left[0]} is in no checkpoint, and nothing computes it")
        for key in own:
            module._buffers[key] = module._buffers[key].to(device)


def _slots(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and stored buffers of `model` by name."""
    return model.state_dict(keep_vars=True)


def _set(model: nn.Module, name: str, value: Tensor) -> None:
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if leaf in module._parameters:
        module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[leaf] = value


# where a tensor belongs


def _renamings(model: nn.Module) -> list[tuple[str, str]]:
    """What to replace in the files' names: what the model does not call so itself."""
    own = [f".{name}." for name, _ in model.named_modules()]
    return [(given, ours) for given, ours in _RENAMED if not any(given in name for name in own)]


def _expert_part(place: str, layers: Mapping[str, _Layer]) -> tuple[_Layer, str, int | None, str] | None:
    """The layer, part, expert and kind (`weight` or `bias`) of a name, if it is one expert's, or a stack of weights."""
    match = _EXPERT.fullmatch(place)
    if match and match[1] in layers and match[3] in _PARTS and int(match[2]) < layers[match[1]].count:
        return layers[match[1]], _PARTS[match[3]], int(match[2]), match[4]
    match = _STACK.fullmatch(place)
    if match and match[1] in layers:
        return layers[match[1]], match[2].removesuffix("_proj"), None, "weight"
    return None


def _claims(place: str, part: tuple[_Layer, str, int | None, str] | None) -> tuple[list[tuple], list[tuple]]:
    """What a name at `place` fills, and what may not be filled by then: what an expert has is in no stack of all."""
    if part is not None:
        layer, matrix, expert, kind = part[0].name, *part[1:]
    elif bias := _STACKED_BIAS.fullmatch(place):
        layer, matrix, expert, kind = bias[1], bias[2], None, "bias"
    else:
        return [(place,)], [(place,)]
    stacks = [(layer, one, kind) for one in (("gate", "up") if matrix == "gate_up" else (matrix,))]
    if expert is None:
        return stacks, [*stacks, *((*stack, _ANY) for stack in stacks)]
    return [(*stacks[0], expert), (*stacks[0], _ANY)], [stacks[0], (*stacks[0], expert)]


# putting it there


def _plain(name: str, value: Tensor | QuantizedWeight, shape: Sequence[int], dtype: torch.dtype, device) -> Tensor:
    """`value` as a tensor of `shape` and `dtype`, decoded if it is quantized."""
    value = _moved(value, device).tensor if isinstance(value, QuantizedWeight) else value
    if tuple(value.shape) != tuple(shape):
        raise CheckpointError(f"{name} has shape {list(value.shape)}: the model expects {list(shape)}")
    widths = (torch.float32, torch.bfloat16, torch.float16) if dtype.is_floating_point else (dtype,)
    if isinstance(value, Tensor) and value.dtype not in widths:
        expected = "float32, bfloat16 or float16" if dtype.is_floating_point else str(dtype)
        raise CheckpointError(f"{name} has dtype {value.dtype}: the model expects {expected}")
    return _in_dtype(name, value, dtype).to(device)


def _in_dtype(name: str, value: Tensor | BlockTensor, dtype: torch.dtype) -> Tensor:
    """`value` in `dtype`, decoded if it is quantized. Raises for what is finite and beyond the range of `dtype`."""

    def cast(dtype: torch.dtype) -> Tensor:
        return dequantize(value, dtype) if isinstance(value, BlockTensor) else value.to(dtype)

    found = cast(dtype)
    if found is not value and found.is_floating_point() and found.isinf().any():
        wide = cast(torch.float32)
        beyond = wide[found.isinf() & wide.isfinite()]
        if beyond.numel():
            raise CheckpointError(
                f"{name} holds {beyond[0].item():.6g}, beyond the range of {dtype}: expected a wider dtype="
            )
    return found


def _check_range(weight: QuantizedWeight, dtype: torch.dtype, semantics: str) -> None:
    """Raise for a weight that a layer would decode to what is beyond the range of `dtype`; only float16 has a small one."""
    if semantics == "torch" and dtype == torch.float16:
        q = weight.tensor
        for matrix in [q] if q.ndim == 2 else (q[expert] for expert in range(q.shape[0])):
            _in_dtype(weight.name, matrix, dtype)


def _moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    if weight.tensor.device == device:
        return weight
    scale = None if weight.input_scale is None else weight.input_scale.to(device)
    return replace(weight, tensor=weight.tensor.to(device), input_scale=scale)


def _put_in_experts(
    name: str,
    value: Tensor | QuantizedWeight,
    layer: _Layer,
    part: str,
    expert: int | None,
    kind: str,
    device: torch.device,
    dequantized: bool,
) -> None:
    own = layer.own
    if isinstance(value, QuantizedWeight) and not dequantized:
        expected = _matrix_shape(own, part)
        if tuple(value.tensor.shape) != (*((layer.count,) if expert is None else ()), *expected):
            raise CheckpointError(
                f"{name} has shape {list(value.tensor.shape)}: the model expects {list(expected)} an expert"
            )
        layer.quantized[part][expert] = _moved(value, device)
        return
    stack = "down_proj" if part == "down" else "gate_up_proj" if own.has_gate else "up_proj"
    parameter_name = stack if kind == "weight" else f"{stack}_bias"
    parameter = getattr(own, parameter_name, None)
    if not isinstance(parameter, Tensor):
        raise CheckpointError(f"{name}: the experts of the model have no {parameter_name}")
    if expert is None and not isinstance(value, QuantizedWeight):
        _set(own, parameter_name, _plain(name, value, parameter.shape, parameter.dtype, device))
    else:
        if parameter.is_meta:
            parameter = torch.empty_like(parameter, device=device)
            _set(own, parameter_name, parameter)
        slot = parameter.transpose(1, 2) if kind == "weight" and own.is_transposed else parameter
        if part in ("gate", "up") and own.has_gate:
            slot = split_gate_up(slot, own.is_concatenated)[part == "up"]
        slot = slot if expert is None else slot[expert]
        values = _plain(name, value, slot.shape, slot.dtype, device)
        if part == "gate_up":
            given = split_gate_up(values, value.rows != "interleaved")
            for half, rows in zip(split_gate_up(slot, own.is_concatenated), given):
                half.copy_(rows)
        else:
            slot.copy_(values)
    layer.filled[parameter_name].add((part, expert))


def _matrix_shape(own: nn.Module, part: str) -> tuple[int, int]:
    """[out, in] of one expert's matrix."""
    stack = own.down_proj if part == "down" else own.gate_up_proj if own.has_gate else own.up_proj
    out, width = tuple(stack.shape[1:])[::-1] if own.is_transposed else tuple(stack.shape[1:])
    return (out // 2, width) if own.has_gate and part in ("gate", "up") else (out, width)


# layers of quantized weights


def _act_format(checkpoint: Checkpoint) -> dict[str, Any]:
    """Format and recipe of the activations, as arguments of a layer."""
    recipe = activation_recipe(checkpoint.dialect, checkpoint.declared)
    return dict(act_format=checkpoint.declared.activations, act_recipe=recipe)


def _input_scale(weight: QuantizedWeight, checkpoint: Checkpoint) -> Tensor | None:
    """The stored scale of the input of `weight`, float32; None where activations are dynamic or not quantized."""
    if checkpoint.declared.activations is None or not checkpoint.declared.static:
        return None
    if weight.input_scale is None:
        raise CheckpointError(f"{weight.name}: no input scale, which the config says that activations have")
    return weight.input_scale.float()


def _check_input_scale(name: str, scale: Tensor) -> None:
    fit = usable(scale)
    if not fit.all():
        raise CheckpointError(
            f"{name}: an input scale is {scale[~fit].flatten()[0].item()}: an input never seen in calibration? Expected "
            "finite and > 0; of experts, scales='vllm' takes the largest"
        )


def _linear(name: str, own: nn.Module, weight: QuantizedWeight, checkpoint: Checkpoint, semantics: str) -> MXLinear:
    if not isinstance(own, nn.Linear):
        raise CheckpointError(f"{name}: quantized, but {type(own).__name__} is no linear layer")
    if tuple(weight.tensor.shape) != tuple(own.weight.shape):
        raise CheckpointError(
            f"{weight.name} has shape {list(weight.tensor.shape)}: the model expects {list(own.weight.shape)}"
        )
    _check_range(weight, own.weight.dtype, semantics)
    scale = _input_scale(weight, checkpoint)
    if scale is not None:
        _check_input_scale(weight.name, scale)
        scale = scale.reshape(())
    return MXLinear(weight.tensor, own.bias, **_act_format(checkpoint), act_tensor_scale=scale, semantics=semantics)


def _experts(layer: _Layer, checkpoint: Checkpoint, semantics: str, scales: str) -> MXExperts:
    own, found = layer.own, layer.quantized
    refuse_unsupported(layer.name, own)
    if not set(found) <= set(layer.wanted) or any(layer.filled.get(name) for name in _WEIGHTS):
        raise CheckpointError(f"{layer.name}: its weights are quantized in part, or stored in two ways")
    expected, stacked = tuple(layer.wanted), layer.stacked
    indices = (None,) if stacked else range(layer.count)
    for weight in (found[part][index] for part in expected for index in indices):
        _check_range(weight, own.down_proj.dtype, semantics)
    input_scales = _input_scales(layer, expected, indices, checkpoint, scales)
    if stacked:
        tensors = {part: found[part].pop(None).concatenated().tensor for part in expected}
    else:
        tensors = {part: _stack(layer.name, [found[part].pop(index).tensor for index in indices]) for part in expected}
    _check_formats(layer.name, (tensors[part] for part in ("gate", "up") if part in tensors))
    w13 = stack_rows(tensors["gate"], tensors["up"]) if "gate" in tensors else tensors["gate_up" if own.has_gate else "up"]
    w13 = gate_scale_for_both(w13) if scales == "vllm" else w13
    bias13 = bias2 = None
    if own.has_bias:
        bias13 = own.gate_up_proj_bias if own.has_gate else own.up_proj_bias
        bias13, bias2 = bias13.detach(), own.down_proj_bias.detach()
        bias13 = torch.cat(split_gate_up(bias13, own.is_concatenated), 1) if own.has_gate else bias13
    activation = None if semantics == "torch" else activation_name(layer.name, own, tensors["down"].device)
    for name in list(own._parameters):
        del own._parameters[name]
        setattr(own, name, None)
    return MXExperts(
        own,
        ExpertsWeights(w13, tensors["down"], bias13, bias2, activation),
        **_act_format(checkpoint),
        input_scales=input_scales,
        semantics=semantics,
        stored_as="stacks" if stacked else "linears",
    )


def _stack(name: str, matrices: list[BlockTensor]) -> BlockTensor:
    _check_formats(name, matrices)
    return stack_matrices(matrices)


def _check_formats(name: str, tensors: Iterable[BlockTensor]) -> None:
    formats = {tensor.format.name for tensor in tensors}
    if len(formats) > 1:
        raise CheckpointError(f"{name}: its experts have the formats {', '.join(sorted(formats))}: expected one")


def _input_scales(
    layer: _Layer, parts: Sequence[str], indices: Sequence[int | None], checkpoint: Checkpoint, scales: str
) -> InputScales | None:
    """The input scales of a layer, one an expert and part; None where activations are dynamic or not quantized."""
    found = {}
    for part in parts:
        given = [_input_scale(layer.quantized[part][index], checkpoint) for index in indices]
        if given[0] is None:
            return None
        both = torch.stack([scale.reshape(()) for scale in given]) if len(given) > 1 else given[0]
        both = both.reshape(-1, both.shape[1] if both.ndim == 2 else 1).expand(layer.count, -1)
        for each, column in (("gate", 0), ("up", -1)) if part == "gate_up" else ((part, 0),):
            found[each] = both[:, column]
    input_scales = InputScales(found.get("gate", found["up"]), found["up"], found["down"])
    if scales == "vllm":
        input_scales = input_scales.of_all_experts(layer.quantized["down"][indices[0]].input_direction)
    for part in ("gate", "up", "down"):
        _check_input_scale(f"{layer.name} ({part})", getattr(input_scales, part))
    return input_scales


def _missing(model: nn.Module, layers: Mapping[str, _Layer], linears: Iterable[str]) -> list[str]:
    """What no tensor of the files has given a value."""
    quantized = {f"{name}.weight" for name in linears}
    quantized |= {f"{layer.name}.{weight}" for layer in layers.values() if layer.quantized for weight in _WEIGHTS}
    names = [name for name, slot in _slots(model).items() if slot.is_meta and name not in quantized]
    for layer in layers.values():
        for kind, parts in layer.lacking():
            names += [f"{layer.name}.{expert}.{part}_proj.{kind}" for part, expert in parts]
    return names
