"""Dialects: how each tool names, packs and scales the weights that it writes, as one table.

A row says which tensors make a weight and how its numbers are read; nothing else in this package knows a suffix.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from mxref.checkpoints.files import CheckpointError, get
from mxref.formats import BLOCK_FORMATS, BlockFormat, check_choice
from mxref.recipes import RECIPES

E8M0 = ("U8", "F8_E8M0")
FUSED = "gate_up_proj"  # ends the name of a weight that stacks gate and up rows


@dataclass(frozen=True)
class Layout:
    """One way to store a weight: the suffixes and dtypes of its tensors, and how to read them.

    A weight `stem + weight` is made of `stem + codes`, `stem + scales` and, where they exist, `stem + tensor_scale` and
    `stem + input_scale`. `recipe`: what its tool encodes and decodes by; its direction is that of both scales. `inputs`:
    the recipe of the layer's inputs, where that is another. `axis`: the packed one. `scale_layout`: a name in
    `mxref.packing.LAYOUTS`; of rows that differ in nothing else the first is written. `code_blocks`: codes are
    `[..., blocks, bytes]`. `scalar`: the shape in which one tensor scale is written. `whole_blocks`: whether its tool reads
    no weight whose last block is short.
    """

    format: str
    recipe: str
    codes: str = ".weight"
    scales: str = ".weight_scale"
    tensor_scale: str | None = None
    input_scale: str | None = None
    weight: str = ".weight"
    codes_dtype: str = "U8"
    scales_dtype: tuple[str, ...] = E8M0
    axis: int = -1
    scale_layout: str = "linear"
    code_blocks: bool = False
    inputs: str | None = None
    scalar: tuple[int, ...] = ()
    whole_blocks: bool = False

    @property
    def stacked(self) -> bool:
        """Whether a weight stacks the matrices of all experts."""
        return not self.weight

    @property
    def block(self) -> BlockFormat:
        """The block format."""
        return BLOCK_FORMATS[self.format]

    @property
    def direction(self) -> str:
        """What decoding does with a tensor scale and an input scale: `multiply` or `divide`."""
        return RECIPES[self.recipe].tensor_scale_direction


def _nvfp4(recipe: str, **others) -> Layout:
    return Layout("nvfp4", recipe, scales_dtype=("F8_E4M3",), **others)


def _torchao(format: str, codes_dtype: str, scale_layout: str) -> Layout:
    suffixes = dict(codes="._weight_qdata", scales="._weight_scale")
    dtypes = dict(codes_dtype=codes_dtype, scales_dtype=("F8_E8M0", "U8"))
    return Layout(format, "torchao_rceil", **suffixes, **dtypes, scale_layout=scale_layout, whole_blocks=True)


_TWO = dict(tensor_scale=".weight_scale_2", input_scale=".input_scale")
_EXPERTS = dict(codes="", weight="", scales="_weight_scale", tensor_scale="_weight_scale_2", input_scale="_input_scale")
_GLOBAL = dict(codes=".weight_packed", tensor_scale=".weight_global_scale", input_scale=".input_global_scale", scalar=(1,))

# The layouts of every dialect; its name is what its config gives as quant_method, if `_METHODS` does not say otherwise.
DIALECTS: dict[str, tuple[Layout, ...]] = {
    "plain": (),
    "compressed-tensors": (
        _nvfp4("compressed_tensors_nvfp4", **_GLOBAL),
        Layout("mxfp4", "compressed_tensors_mxfp4", codes=".weight_packed"),
        Layout("mxfp8_e4m3", "compressed_tensors_mxfp8", codes_dtype="F8_E4M3"),
    ),
    "modelopt": (
        _nvfp4("modelopt_nvfp4", **_TWO),
        _nvfp4("modelopt_nvfp4", **_EXPERTS, axis=-2),
        Layout("mxfp4", "modelopt_mxfp4"),
        Layout("mxfp8_e4m3", "modelopt_mxfp8", codes_dtype="F8_E4M3"),
    ),
    "quark": (
        _nvfp4("quark_nvfp4", **_TWO | dict(input_scale=".input_scale_2"), inputs="quark_nvfp4_input"),
        Layout("mxfp4", "quark_even"),
        Layout("mxfp6_e2m3", "quark_even"),
        Layout("mxfp6_e3m2", "quark_even"),
        Layout("mxfp8_e4m3", "quark_even", codes_dtype="F8_E4M3"),
    ),
    "gpt-oss": (Layout("mxfp4", "ocp", codes="_blocks", scales="_scales", weight="", code_blocks=True),),
    "torchao": tuple(
        _torchao(format, dtype, layout)
        for format, dtype in (("mxfp4", "U8"), ("mxfp8_e4m3", "F8_E4M3"), ("mxfp8_e5m2", "F8_E5M2"))
        for layout in ("tile_128x4", "linear")
    ),
}

_METHODS = {"mxfp4": "gpt-oss"}


@dataclass(frozen=True)
class Declared:
    """What a config says: formats of the weights (empty: nothing) and of the activations, and which modules.

    `layers`: formats that go with patterns of module names, before the others. `skips`: patterns of modules left as they
    are. `targets`: patterns of quantized modules, None where all linears are. `static`: whether activations have
    stored scales. `unread`: what it says beyond that and a forward pass would have to do, in words.
    """

    formats: frozenset[str] = frozenset()
    activations: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    skips: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    static: bool = False
    unread: tuple[str, ...] = ()

    def formats_of(self, module: str) -> frozenset[str]:
        """The formats that the weight of `module` may have; empty: any."""
        for pattern, format in self.layers.items():
            if matches(pattern, module):
                return frozenset([format])
        return self.formats

    def promises(self, module: str) -> bool:
        """Whether the config says that the linear `module` is quantized."""
        if any(matches(pattern, module) for pattern in self.skips):
            return False
        targets = (*self.layers, *(self.targets or ()))
        return self.targets is None or any(matches(pattern, module) for pattern in targets)


def matches(pattern: str, module: str) -> bool:
    """Whether an entry of an ignore or target list means `module`: by name, wildcard or `re:`, or as a parent.

    >>> matches("re:.*head", "lm_head"), matches("model.layers.*.self_attn", "model.layers.3.self_attn.q_proj")
    (True, True)
    """
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error:
            return False
    return fnmatchcase(module, pattern) or fnmatchcase(module, pattern + ".*")


def check_patterns(argument: str, patterns: Sequence[str]) -> None:
    """Raise unless `patterns` is a sequence of names, wildcards and valid `re:` expressions."""
    if isinstance(patterns, str) or any(not isinstance(each, str) for each in patterns):
        raise TypeError(f"{argument}={patterns!r}: expected a sequence of str")
    for each in patterns:
        if each.startswith("re:"):
            try:
                re.compile(each[3:])
            except re.error as fault:
                raise ValueError(f"{argument} {each!r}: no regular expression: {fault}") from None


def activation_recipe(dialect: str, says: Declared) -> str | None:
    """The recipe by which the tools of `dialect` quantize activations; None where they stay as they are."""
    return next((layout.inputs or layout.recipe for layout in DIALECTS[dialect] if layout.format == says.activations), None)


def find_dialect(config: dict, producer_config: dict, given: str | None, has_codes: bool) -> tuple[str, dict, str | None]:
    """The dialect of a checkpoint, the part of its configs that speaks of quantization, and what they name instead of
    `given`, if they name something else: then what they say besides is of no use.

    `producer_config`: hf_quant_config.json. `has_codes`: whether any tensor can hold codes.
    """
    if given is not None:
        check_choice("dialect", given, tuple(DIALECTS))
    found = get(config, "quantization_config") or get(config, "text_config", "quantization_config")
    if found is None and producer_config:
        found = {"quant_method": "modelopt", **_typed(producer_config, "quantization", dict)}
    if found is not None and not isinstance(found, dict):
        raise CheckpointError(f"config.json: quantization_config is no object but {type(found).__name__}")
    method = str(found.get("quant_method")) if found else ""
    dialect = _METHODS.get(method, method)
    if given is not None:
        return (given, {}, method) if found and "quant_method" in found and dialect != given else (given, found or {}, None)
    if found:
        if dialect not in DIALECTS:
            raise ValueError(f"quant_method={method!r} in the config: give dialect=, one of {', '.join(DIALECTS)}")
        return dialect, found, None
    if has_codes and not config:
        raise ValueError(f"no config.json says how weights are stored: give dialect=, one of {', '.join(DIALECTS)}")
    return "plain", {}, None


def declared(dialect: str, quantization: dict) -> Declared:
    """What the config of a checkpoint in `dialect` says of it."""
    return _READERS.get(dialect, lambda _: Declared())(quantization)


def _typed(found: Any, key: str, kind: type, *others: type) -> Any:
    """What an object has at `key`, an empty `kind` if nothing. Raises unless it is of that kind, or one of the others."""
    value = get(found, key)
    if value is not None and not isinstance(value, (kind, *others)):
        names = {dict: "an object", list: "a list"}
        expected = " or ".join(names[each] for each in (kind, *others))
        raise CheckpointError(f"the config's {key} is {json.dumps(value)[:80]}: expected {expected}")
    return kind() if value is None else value


def _strings(found: Any, key: str) -> tuple[str, ...]:
    return tuple(entry for entry in _typed(found, key, list) if isinstance(entry, str))


def _objects(found: Any, key: str) -> list[dict]:
    """The values of an object, or the entries of a list, that are objects themselves."""
    value = _typed(found, key, dict, list)
    return [_typed({key: each}, key, dict) for each in (value.values() if isinstance(value, dict) else value)]


def _float_format(args: Any) -> str | None:
    """The block format of compressed-tensors' and ModelOpt's quantization arguments."""
    known = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8_e4m3"}
    pair = (get(args, "num_bits"), get(args, "group_size"))
    return known.get(pair) if get(args, "type") == "float" and all(isinstance(n, int) for n in pair) else None


def _groups(quantization: dict) -> dict[str, Any]:
    groups = _objects(quantization, "config_groups")
    formats = {_float_format(get(group, "weights")) for group in groups} - {None}
    activations = {_float_format(get(group, "input_activations")) for group in groups} - {None}
    targets = [target for group in groups for target in _strings(group, "targets")]
    # "Linear" is a class, any other target a name
    by_name = tuple(targets) if targets and not any(re.fullmatch(r"[A-Z]\w*", target) for target in targets) else None
    unread = [_unread("input_activations", get(group, "input_activations"), _float_format) for group in groups]
    unread += [_unread("output_activations", get(group, "output_activations"), lambda _: None) for group in groups]
    if len({_float_format(get(group, "input_activations")) for group in groups}) > 1:
        unread.append("input_activations that differ between config_groups")
    unread = tuple(text for text in unread if text)
    return dict(formats=formats, activations=min(activations, default=None), targets=by_name, unread=unread)


def _unread(what: str, given: Any, read: Callable[[Any], str | None]) -> str | None:
    """What a config says in `given`, in words, if it says something that `read` does not know."""
    return f"{what} {json.dumps(given)[:80]}" if given and read(given) is None else None


def _read_compressed_tensors(quantization: dict) -> Declared:
    found = _groups(quantization)
    found |= dict(formats=frozenset(found["formats"]), static=found["activations"] == "nvfp4")
    transform = _unread("transform_config", get(quantization, "transform_config"), lambda _: None)
    found["unread"] += (transform,) if transform else ()
    return Declared(**found, skips=_strings(quantization, "ignore"))


def _algorithm_formats(quantization: dict) -> dict[str, str]:
    """ModelOpt's algorithms by module; "" stands for the whole model."""
    layers = {"": quantization, **_typed(quantization, "quantized_layers", dict)}
    found = {}
    for module, settings in layers.items():
        name = re.search("nvfp4|mxfp4|mxfp8", str(get(settings, "quant_algo")).lower())
        if name:
            found[module] = {"mxfp8": "mxfp8_e4m3"}.get(name[0], name[0])
    return found


def _read_modelopt(quantization: dict) -> Declared:
    layers = _algorithm_formats(quantization)
    found = _groups(quantization)
    whole = layers.pop("", None)
    formats = frozenset({whole} - {None}) | found["formats"]
    algorithm = str(get(quantization, "quant_algo")).upper()
    activations = found["activations"] or (
        whole if algorithm == "NVFP4" and not get(quantization, "config_groups") else None
    )
    skips = _strings(quantization, "ignore") + _strings(quantization, "exclude_modules")
    targets = None if whole or not layers else ()
    algorithms = {str(get(settings, "quant_algo")) for settings in _objects(quantization, "quantized_layers")}
    if algorithms == {"NVFP4"} and whole is None:
        activations = "nvfp4"
    elif len(algorithms) > 1:
        found["unread"] += (f"quantized_layers of {', '.join(sorted(algorithms))}",)
    return Declared(formats, activations, layers, skips, targets, activations == "nvfp4", found["unread"])


def _quark_format(spec: Any) -> str | None:
    first = spec[0] if isinstance(spec, list) and spec else spec
    dtype, size = get(first, "dtype"), get(first, "group_size")
    known = {"fp4": {16: "nvfp4", 32: "mxfp4"}, "fp8_e4m3": {32: "mxfp8_e4m3"}}
    known |= {name: {32: f"mx{name}"} for name in ("fp6_e2m3", "fp6_e3m2")}
    return known.get(dtype, {}).get(size) if isinstance(dtype, str) and isinstance(size, int) else None


def _read_quark(quantization: dict) -> Declared:
    whole = _typed(quantization, "global_quant_config", dict)
    weight, activations = _quark_format(get(whole, "weight")), _quark_format(get(whole, "input_tensors"))
    specs = _typed(quantization, "layer_quant_config", dict)
    layers = {name: _quark_format(get(spec, "weight")) for name, spec in specs.items()}
    unread = [_unread("input_tensors", get(spec, "input_tensors"), _quark_format) for spec in (whole, *specs.values())]
    unread += [_unread("output_tensors", get(spec, "output_tensors"), lambda _: None) for spec in (whole, *specs.values())]
    if any(_quark_format(get(spec, "input_tensors")) != activations for spec in specs.values() if get(spec, "weight")):
        unread.append("input_tensors that differ between layers")
    return Declared(
        frozenset({weight} - {None}),
        activations,
        {name: format for name, format in layers.items() if format},
        _strings(quantization, "exclude"),
        static=activations == "nvfp4",
        unread=tuple(text for text in unread if text),
    )


def _read_gpt_oss(quantization: dict) -> Declared:
    targets = ("experts.gate_up_proj", "experts.down_proj")
    skips = _strings(quantization, "modules_to_not_convert")
    return Declared(frozenset(["mxfp4"]), skips=skips, targets=tuple(f"*.{target}" for target in targets))


TORCHAO_DTYPES = {
    "float4_e2m1fn_x2": "mxfp4",
    "float8_e4m3fn": "mxfp8_e4m3",
    "float8_e5m2": "mxfp8_e5m2",
}


def _read_torchao(quantization: dict) -> Declared:
    settings = get(quantization, "quant_type", "default", "_data")
    activations = get(settings, "activation_dtype", "_data")
    unread = _unread("activation_dtype", activations, lambda name: TORCHAO_DTYPES.get(str(name)))
    known = TORCHAO_DTYPES.get(activations) if isinstance(activations, str) else None
    return Declared(activations=known, targets=(), unread=(unread,) if unread else ())


_READERS: dict[str, Callable[[dict], Declared]] = {
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "quark": _read_quark,
    "gpt-oss": _read_gpt_oss,
    "torchao": _read_torchao,
}


def header_says(dialect: str, metadata: Mapping[str, str], weight: str) -> tuple[str, str] | None:
    """(format, scale layout) of a weight as torchao's metadata in the header gives them; None in other dialects."""
    if dialect != "torchao":
        return None
    try:
        described = json.loads(metadata.get(weight, "null"))
    except (ValueError, RecursionError):
        raise CheckpointError(f"{weight}: its metadata in the header is no JSON") from None
    data = get(described, "_data")
    dtype, swizzled = get(data, "elem_dtype", "_data"), get(data, "is_swizzled_scales")
    known = get(described, "_type") == "MXTensor" and get(data, "block_size") == 32 and isinstance(swizzled, bool)
    if not known or not isinstance(dtype, str) or dtype not in TORCHAO_DTYPES:
        raise CheckpointError(
            f"{weight}: its metadata in the header describes no MXTensor of blocks of 32 and elements "
            f"{', '.join(TORCHAO_DTYPES)} (_type {get(described, '_type')!r}, elem_dtype {dtype!r})"
        )
    return TORCHAO_DTYPES[dtype], "tile_128x4" if swizzled else "linear"
