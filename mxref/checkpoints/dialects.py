"""Dialects: how each tool names, packs and scales the weights that it writes, as one table.

A row says which tensors make a weight and how its numbers are read; nothing else in this package knows a suffix.
"""

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import translate
from functools import cached_property, lru_cache
from typing import Any

from torch import nn

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
_CLASS = re.compile(r"[A-Z]\w*")  # a target that is a class of modules, not a name
# compressed-tensors' own names for how it stores a format.
CONTAINERS = {"nvfp4": "nvfp4-pack-quantized", "mxfp4": "mxfp4-pack-quantized", "mxfp8_e4m3": "mxfp8-quantized"}
_WILD = re.compile(r"[*?\[]")  # in what is no plain name
_SHOWN = 80  # characters of a value in a message
_CACHE = ("kv_cache_scheme", "kv_cache_quant_algo", "kv_cache_quant_config")  # keys that speak of the KV cache


class Patterns:
    """Entries of an ignore or target list, made ready once for many names. Raises ValueError for a broken expression.

    An entry means a module by name, wildcard or `re:`, or as a parent.

    >>> Patterns(["re:.*head", "model.layers.*.self_attn"]).find("model.layers.3.self_attn.q_proj")
    ['model.layers.*.self_attn']
    """

    def __init__(self, entries: Iterable[str]):
        self._places, self._expressions = {}, []
        for entry in entries:
            place = self._places.setdefault(entry, len(self._places))
            if entry.startswith("re:") or _WILD.search(entry):
                self._expressions.append((place, entry, _compiled(entry).match))

    def find(self, module: str) -> list[str]:
        """The entries that mean `module`, in their order."""
        parts = module.split(".")
        names = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        found = {self._places[name]: name for name in names if name in self._places}
        found |= {place: entry for place, entry, match in self._expressions if match(module)}
        return [found[place] for place in sorted(found)]


@lru_cache(maxsize=1 << 16)
def _compiled(entry: str) -> re.Pattern:
    if not entry.startswith("re:"):
        return re.compile(f"{translate(entry)}|{translate(entry + '.*')}")
    try:
        return re.compile(entry[3:])
    except (re.error, OverflowError, RecursionError) as fault:
        raise ValueError(f"{entry!r} is no regular expression: {fault}") from None


@dataclass(frozen=True)
class Declared:
    """What a config says: formats of the weights (empty: nothing) and of the activations, and which modules.

    `layers`: formats that go with patterns of module names, before the others. `skips`: patterns of modules left as they
    are. `targets`: patterns of quantized modules, None where all linears are. `static`: whether activations have
    stored scales. `groups`: patterns of modules with what is done there, where one config says it of several.

    In words, what it says beyond that, each with what is read in its place: `unread`, what a forward pass would have to
    do; `refused`, what makes the weights other than they are read; `cache`, what it does to the KV cache, which is no
    matter of weights and linears and never run.
    """

    formats: frozenset[str] = frozenset()
    activations: str | None = None
    layers: Mapping[str, str] = field(default_factory=dict)
    skips: tuple[str, ...] = ()
    targets: tuple[str, ...] | None = None
    static: bool = False
    groups: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()

    @cached_property
    def _patterns(self) -> dict[str, Patterns]:
        lists = dict(layers=self.layers, skips=self.skips, targets=(*self.layers, *(self.targets or ())))
        return {name: Patterns(entries) for name, entries in lists.items()} | {"groups": Patterns(self._schemes)}

    @cached_property
    def _classes(self) -> list[str]:
        """Patterns of `groups` that are classes of modules: any linear may be one."""
        return [pattern for pattern in self._schemes if _CLASS.fullmatch(pattern)]

    @cached_property
    def _schemes(self) -> dict[str, list[str]]:
        """What `groups` say by their patterns."""
        found: dict[str, list[str]] = {}
        for pattern, scheme in self.groups:
            found.setdefault(pattern, []).append(scheme)
        return found

    def formats_of(self, module: str) -> frozenset[str]:
        """The formats that the weight of `module` may have; empty: any."""
        found = self._patterns["layers"].find(module)
        return frozenset([self.layers[found[0]]]) if found else self.formats

    def leaves(self, module: str) -> str | None:
        """In words, why the linear `module` is not quantized by the config; None if it is."""
        if found := self._patterns["skips"].find(module):
            return f"the config leaves it as it is ({found[0]!r})"
        if self.targets is not None and not self._patterns["targets"].find(module):
            return "no target of the config means it"
        return None

    def clash(self, module: str) -> tuple[str, str] | None:
        """Two patterns of `groups` that mean `module` alike and say different things of it; a name goes before an
        expression, and that before a class."""
        meant = self._patterns["groups"].find(module) + self._classes
        found = [(_rank(pattern), pattern, scheme) for pattern in meant for scheme in self._schemes[pattern]]
        first = min(found, key=lambda each: each[0], default=None)
        others = (pattern for rank, pattern, scheme in found if rank == first[0] and scheme != first[2])
        other = next(others, None)
        return None if other is None else (first[1], other)


def _rank(target: str) -> int:
    """Which targets of groups go before others: names, then expressions, then classes of modules."""
    return 2 if _CLASS.fullmatch(target) else int(target.startswith("re:"))


def check_patterns(argument: str, patterns: Sequence[str]) -> tuple[str, ...]:
    """`patterns`, if it is a sequence of names, wildcards and valid `re:` expressions; raises TypeError or ValueError."""
    found = tuple(patterns) if isinstance(patterns, Iterable) else (None,)
    if isinstance(patterns, str) or any(not isinstance(each, str) for each in found):
        raise TypeError(f"{argument}={patterns!r}: expected a sequence of str, each a name or a wildcard")
    try:
        Patterns(found)
    except ValueError as fault:
        raise ValueError(f"{argument} {fault}") from None
    return found


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
    found = _quantization(config)
    producer = _typed(producer_config, "quantization", dict)
    if found is None and producer:
        found = {"quant_method": "modelopt", **producer}
    method = str(found.get("quant_method")) if found else ""
    dialect = _METHODS.get(method, method)
    transforms = [value for _, value in _nested(config, "transform_config") if _transforms(value)]
    others = {"transform_config": transforms[0]} if transforms else {}
    if given is not None and found and "quant_method" in found and dialect != given:
        return given, others, method
    if found and producer and (given or dialect) == "modelopt":
        found = _merged(found, producer)
    elif found and given is None and get(producer, "quant_algo"):
        raise CheckpointError(
            f"config.json says quant_method {method!r}, and hf_quant_config.json beside it is of modelopt: expected one, or "
            "dialect= to choose"
        )
    if given is not None:
        return given, (found or {}) | others, None
    if found:
        if dialect not in DIALECTS:
            raise ValueError(f"quant_method={method!r} in the config: give dialect=, one of {', '.join(DIALECTS)}")
        return dialect, found | others, None
    if has_codes and not config:
        raise ValueError(f"no config.json says how weights are stored: give dialect=, one of {', '.join(DIALECTS)}")
    return "plain", others, None


def _quantization(config: dict) -> dict | None:
    """What a config says of quantization, of the whole or of a part such as its text_config; raises where two differ."""
    found = [(where, value) for where, value in _nested(config, "quantization_config") if value not in (None, {})]
    for where, value in found:
        if not isinstance(value, dict):
            raise CheckpointError(f"config.json: {where} is no object but {type(value).__name__}")
        if value != found[0][1]:
            raise CheckpointError(f"config.json: {found[0][0]} and {where} say different things: expected one of them")
    return found[0][1] if found else None


def _nested(config: dict, key: str) -> Iterator[tuple[str, Any]]:
    """Where `key` stands in a config and what is there, the outermost first."""
    left = deque([("", config)])
    while left:
        where, found = left.popleft()
        for name, value in found.items():
            if name == key:
                yield where + name, value
            if isinstance(value, dict):
                left.append((f"{where}{name}.", value))


def _transforms(given: Any) -> bool:
    """Whether a transform_config says anything."""
    return bool(given) and not (isinstance(given, dict) and "config_groups" in given and not given["config_groups"])


def _merged(found: dict, producer: dict) -> dict:
    """ModelOpt's two configs as one; raises where they say different things."""
    for key in sorted(found.keys() & (producer.keys() | {"ignore"})):
        other = "exclude_modules" if key == "ignore" else key
        ours, theirs = _comparable(found[key]), _comparable(producer.get(other))
        if ours is not None and theirs is not None and ours != theirs:
            raise CheckpointError(
                f"config.json says {key} {_shown(found[key])} and hf_quant_config.json {other} {_shown(producer[other])}: "
                "expected the same"
            )
    return producer | {key: value for key, value in found.items() if value is not None}


def _comparable(given: Any) -> Any:
    """Text in one case, lists in one order."""
    if isinstance(given, list):
        return sorted(json.dumps(each) for each in given)
    return given.upper() if isinstance(given, str) else given


def declared(dialect: str, quantization: dict) -> Declared:
    """What the config of a checkpoint in `dialect` says of it."""
    says = _READERS.get(dialect, lambda _: Declared())(quantization)
    refused = says.refused
    if _transforms(transform := get(quantization, "transform_config")):
        refused += (_said("transform_config", transform, "none: weights that are stored rotated are not turned back"),)
    found = {key: value for key in _CACHE if (value := get(quantization, key)) and value != "NONE"}
    cache = tuple(_said(key, value, "the KV cache is left as it is") for key, value in found.items())
    return replace(says, refused=refused, cache=cache)


def _said(key: str, given: Any, expected: str) -> str:
    """What a config says and is not followed, in words, and what can be."""
    return f"{key} {_shown(given)}: {expected}"


def _shown(given: Any) -> str:
    text = json.dumps(given)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _odd(key: str, given: Any, read: Mapping[str, tuple]) -> list[str]:
    """In words, what an object says by keys of which only the values in `read` can be followed; null says nothing."""
    found = [(name, get(given, name), known) for name, known in read.items()]
    return [
        _said(f"{key}.{name}", value, f"expected {' or '.join(map(json.dumps, known)) or 'null'}")
        for name, value, known in found
        if value is not None and value not in known
    ]


def _typed(found: Any, key: str, kind: type, *others: type) -> Any:
    """What an object has at `key`, an empty `kind` if nothing. Raises unless it is of that kind, or one of the others."""
    value = get(found, key)
    if value is not None and not isinstance(value, (kind, *others)):
        names = {dict: "an object", list: "a list"}
        expected = " or ".join(names[each] for each in (kind, *others))
        raise CheckpointError(f"the config's {key} is {_shown(value)}: expected {expected}")
    return kind() if value is None else value


def _strings(found: Any, key: str, where: str = "") -> tuple[str, ...]:
    """The patterns of a list; `where` says its key in an error."""
    return _entries(where or key, (entry for entry in _typed(found, key, list) if isinstance(entry, str)))


def _entries(key: str, entries: Iterable[str]) -> tuple[str, ...]:
    """The patterns at a key. Raises for a broken one."""
    found = tuple(entries)
    try:
        Patterns(found)
    except ValueError as fault:
        raise CheckpointError(f"the config's {key}: {fault}") from None
    return found


def _objects(found: Any, key: str) -> list[dict]:
    """The values of an object, or the entries of a list, that are objects themselves."""
    value = _typed(found, key, dict, list)
    return [_typed({key: each}, key, dict) for each in (value.values() if isinstance(value, dict) else value)]


def _float_format(args: Any) -> str | None:
    """The block format of compressed-tensors' and ModelOpt's quantization arguments."""
    known = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8_e4m3"}
    pair = (get(args, "num_bits"), get(args, "group_size"))
    return known.get(pair) if get(args, "type") == "float" and all(isinstance(n, int) for n in pair) else None


_OTHER = "{} in other blocks"  # a format that is not read, and that no stored weight has
_GROUP_FORMATS = "expected blocks of nvfp4, mxfp4 or mxfp8_e4m3"


def _groups(quantization: dict, nvfp4_dynamic: Any) -> dict[str, Any]:
    """What config_groups say, as arguments of `Declared`.

    `nvfp4_dynamic`: what their `dynamic` is of inputs in NVFP4 whose tensor scale is stored.
    """
    groups = _objects(quantization, "config_groups")
    keys = get(quantization, "config_groups")
    keys = [f"config_groups.{key}" for key in (keys if isinstance(keys, dict) else range(len(groups)))]
    weights, inputs = ([get(group, key) for group in groups] for key in ("weights", "input_activations"))
    formats, activations = [*map(_float_format, weights)], [*map(_float_format, inputs)]
    unread, refused = [], []
    for key, group, format, of_inputs in zip(keys, groups, formats, activations):
        container = get(group, "format") or get(quantization, "format")
        if container in CONTAINERS.values() or format and isinstance(container, str) and container != "mixed-precision":
            if container != CONTAINERS.get(format):
                refused.append(_said(f"{key}.weights", group.get("weights"), f"not what format {container!r} stores"))
        if (whole := get(quantization, "format")) in CONTAINERS.values() and container != whole:
            refused.append(_said(f"{key}.format", container, f"expected {whole!r}, as format says of all"))
        refused += _odd_arguments(f"{key}.weights", group.get("weights"))
        refused += _odd(f"{key}.weights", group.get("weights"), dict(dynamic=(False,)))
        if group.get("weights") and format is None:
            unread.append(_said(f"{key}.weights", group["weights"], _GROUP_FORMATS))
        given = get(group, "input_activations")
        if given and of_inputs is None:
            unread.append(_said(f"{key}.input_activations", given, _GROUP_FORMATS))
        unread += _odd_arguments(f"{key}.input_activations", given)
        if of_inputs:
            unread += _odd(
                f"{key}.input_activations", given, dict(dynamic=(nvfp4_dynamic if of_inputs == "nvfp4" else True,))
            )
        if get(group, "output_activations"):
            unread.append(_said(f"{key}.output_activations", group["output_activations"], "expected null"))
    if len(set(activations)) > 1:
        unread.append(
            f"input_activations that differ between config_groups, {', '.join(map(str, activations))}: expected one"
        )
    targets = [_strings(group, "targets", f"{key}.targets") for key, group in zip(keys, groups)]
    named = [(target, i) for i, found in enumerate(targets) for target in found]
    by_name = [(target, i) for target, i in named if not _CLASS.fullmatch(target)]
    unsaid = not groups or any(get(group, "targets") is None for group in groups)
    means_all = unsaid or any(_may_be_linear(target) for target, _ in named if _CLASS.fullmatch(target))
    others = [f"{get(weight, 'type')}{get(weight, 'num_bits')}" for weight in weights]
    stored = [format or weight and _OTHER.format(other) for format, weight, other in zip(formats, weights, others)]
    layers, others = {}, {*stored}
    if len(others) > 1 and by_name:  # names go before expressions, and both before classes
        layers = {target: stored[i] for target, i in sorted(by_name, key=lambda each: _rank(each[0])) if stored[i]}
        others = {format for i, format in enumerate(stored) if i not in {i for _, i in by_name}}
    return dict(
        formats=frozenset(filter(None, others)),
        activations=min({*activations} - {None}, default=None),
        layers=layers,
        targets=None if means_all else tuple(target for target, _ in by_name),
        groups=tuple((target, _scheme(groups[i])) for target, i in named) if len(groups) > 1 else (),
        unread=tuple(unread),
        refused=tuple(refused),
    )


def _may_be_linear(target: str) -> bool:
    """Whether a class of modules may be one of linears: it is `Linear`, what that derives from, or not torch's."""
    known = getattr(nn, target, None)
    return not isinstance(known, type) or issubclass(nn.Linear, known)


def _odd_arguments(key: str, given: Any) -> list[str]:
    """What quantization arguments of a known format say that its blocks are not."""
    format = _float_format(given)
    if format is None:
        return []
    strategy, scales = ("tensor_group", "torch.float8_e4m3fn") if format == "nvfp4" else ("group", "torch.uint8")
    read = dict(strategy=(strategy,), symmetric=(True,), scale_dtype=(scales,), actorder=(False, "static", "weight"))
    return _odd(key, given, read | dict(block_structure=()))


def _scheme(group: dict) -> str:
    """What a group says that changes numbers, as text that can be compared."""
    keys = ("num_bits", "type", "strategy", "group_size", "symmetric", "dynamic")
    parts = [get(group, part) for part in ("weights", "input_activations", "output_activations")]
    return json.dumps([part and [get(part, key) for key in keys] for part in parts])


def _read_compressed_tensors(quantization: dict) -> Declared:
    found = _groups(quantization, "local")
    if "quant_method" in quantization and not get(quantization, "config_groups"):
        given = get(quantization, "config_groups")
        found["unread"] += (_said("config_groups", given, "expected a group, to say how inputs are quantized"),)
    sparsity = get(quantization, "sparsity_config")
    if sparsity and get(sparsity, "format") != "dense":
        found["refused"] += (_said("sparsity_config", sparsity, "expected none"),)
    if (status := get(quantization, "quantization_status")) not in (None, "compressed", "frozen"):
        found["refused"] += (_said("quantization_status", status, "expected compressed or frozen"),)
    skips = _strings(quantization, "ignore")
    for entry in sorted({*skips} & {each.__name__ for each in nn.Linear.__mro__}):
        found["refused"] += (_said("ignore", entry, "a class that all linears are of; expected names of modules"),)
    return Declared(**found, static=found["activations"] == "nvfp4", skips=skips)


_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "MXFP4", "MXFP8")  # of ModelOpt, those that are read
# What its names say of inputs where no group does: ModelOpt's own groups of MXFP8 have inputs in blocks of 32
# (export/convert_hf_config.py), and vLLM quantizes them as they come (ModelOptMxFp8Config). MXFP4 is exported of weights
# with their inputs (MXFP4_DEFAULT_CFG) and of weights alone (MXFP4_MLP_WEIGHT_ONLY_CFG): get_quantization_format, which
# names it, looks at the weights.
_ALGORITHMS_INPUTS = {"NVFP4": "nvfp4", "MXFP8": "mxfp8_e4m3"}


def _read_modelopt(quantization: dict) -> Declared:
    found = _groups(quantization, False)
    layers, refused, unread = {}, [*found["refused"]], [*found["unread"]]
    quantized = _typed(quantization, "quantized_layers", dict)
    _entries("quantized_layers", quantized)
    top = str(get(quantization, "quant_algo") or "MIXED_PRECISION").upper()
    for module, settings in {"": quantization, **quantized}.items():
        where = f"quantized_layers.{module}." if module else ""
        for name in ("pre_quant_scale", "has_zero_point"):
            if given := get(settings, name):
                refused.append(_said(where + name, given, "expected false"))
        key, given = where + "quant_algo", get(settings, "quant_algo")
        if module and top not in ("MIXED_PRECISION", str(given).upper()):
            unread.append(_said(key, given, f"expected {top}, as quant_algo says of all"))
        if given is None or not module and quantized and given == "MIXED_PRECISION":
            continue
        name = str(given).upper()
        if name not in _ALGORITHMS:
            changed = "AWQ" in name or "SVD" in name  # the weights, by what stands beside them
            (refused if changed else unread).append(_said(key, given, f"expected one of {', '.join(_ALGORITHMS)}"))
        format = re.search("nvfp4|mxfp4|mxfp8", name.lower())
        if format:
            layers[module] = {"mxfp8": "mxfp8_e4m3"}.get(format[0], format[0])
            size, expected = get(settings, "group_size"), BLOCK_FORMATS[layers[module]].block_size
            if size is not None and size != expected:
                refused.append(_said(where + "group_size", size, f"{given} has blocks of {expected}"))
    whole = layers.pop("", None)
    for group in _objects(quantization, "config_groups"):
        given = get(group, "weights")
        if given and whole and _float_format(given) is None:
            refused.append(
                _said("config_groups.*.weights", given, f"not what quant_algo {quantization['quant_algo']} stores")
            )
    if whole and found["formats"] - {whole}:
        groups = ", ".join(sorted(found["formats"]))
        refused.append(_said("quant_algo", get(quantization, "quant_algo"), f"config_groups say {groups}"))
    activations = found["activations"]
    if top == "W4A16_NVFP4" and activations:
        refused.append(_said("quant_algo", top, f"config_groups say input_activations in {activations}"))
    grouped = bool(get(quantization, "config_groups"))
    if top in _ALGORITHMS_INPUTS and not grouped:
        activations = _ALGORITHMS_INPUTS[top]
    elif top in _ALGORITHMS_INPUTS and activations is None and not found["unread"]:
        refused.append(_said("quant_algo", top, "config_groups say input_activations null"))
    algorithms = {str(get(settings, "quant_algo")).upper() for settings in _objects(quantization, "quantized_layers")}
    if "MXFP4" in (top, *algorithms) and not grouped:
        unread.append(_said("quant_algo", "MXFP4", "expected config_groups, to say whether inputs are quantized"))
    if whole is None and len(algorithms) == 1:
        activations = _ALGORITHMS_INPUTS.get(*algorithms, activations)
    elif len(algorithms) > 1 and top == "MIXED_PRECISION":
        unread.append(f"quantized_layers of {', '.join(sorted(algorithms))}: expected one algorithm")
    skips = tuple(dict.fromkeys(_strings(quantization, "ignore") + _strings(quantization, "exclude_modules")))
    return Declared(
        frozenset({whole} - {None}) | found["formats"],
        activations,
        layers | found["layers"],
        skips,
        None if whole or not layers else (),
        activations == "nvfp4",
        groups=found["groups"],
        unread=tuple(unread),
        refused=tuple(refused),
    )


def _quark_format(spec: Any) -> str | None:
    first = spec[0] if isinstance(spec, list) and spec else spec
    dtype, size = get(first, "dtype"), get(first, "group_size")
    known = {"fp4": {16: "nvfp4", 32: "mxfp4"}, "fp8_e4m3": {32: "mxfp8_e4m3"}}
    known |= {name: {32: f"mx{name}"} for name in ("fp6_e2m3", "fp6_e3m2")}
    return known.get(dtype, {}).get(size) if isinstance(dtype, str) and isinstance(size, int) else None


def _quark_stored(spec: Any) -> str | None:
    """The format of weights by their spec, which may be none that is read; None where they stay as they are."""
    first = spec[0] if isinstance(spec, list) and spec else spec
    return _quark_format(spec) or (_OTHER.format(get(first, "dtype")) if spec else None)


# What Quark's specs may say: of codes, and of how inputs are quantized.
_QUARK_CODES = dict(qscheme=("per_group",), ch_axis=(-1,), symmetric=(True,), block_size=(), is_dynamic=(False,))
_QUARK_INPUTS = _QUARK_CODES | dict(is_dynamic=(True,), round_method=("half_even",), scale_calculation_mode=("even",))
_QUARK_SCALES = dict(dtype=("fp8_e4m3",), qscheme=("per_tensor",), is_dynamic=(False,))  # of NVFP4's block scales
_QUARK_FORMATS = "expected null, or fp4, fp6_e2m3, fp6_e3m2 or fp8_e4m3 in groups of 32, or fp4 of 16"


def _odd_spec(key: str, given: Any, read: Mapping[str, tuple]) -> list[str]:
    levels, has_tensor_scale = given if isinstance(given, list) else [given], _quark_format(given) == "nvfp4"
    odd = _odd(key, levels[0], read | dict(scale_format=("float32" if has_tensor_scale else "e8m0",)))
    if len(levels) != 1 + has_tensor_scale:
        return [*odd, _said(key, given, "expected a second spec, of its scales, for fp4 in groups of 16, and for no other")]
    return odd + (_odd(f"{key}.1", levels[1], _QUARK_SCALES) if has_tensor_scale else [])


def _read_quark(quantization: dict) -> Declared:
    whole = _typed(quantization, "global_quant_config", dict)
    weight, activations = _quark_stored(get(whole, "weight")), _quark_format(get(whole, "input_tensors"))
    specs = _typed(quantization, "layer_quant_config", dict)
    layers = {name: _quark_stored(get(specs[name], "weight")) for name in _entries("layer_quant_config", specs)}
    floats = tuple(name for name, format in layers.items() if format is None)
    unread, refused = [], []
    if "quant_method" in quantization and not whole and not specs:
        given = get(quantization, "global_quant_config")
        unread.append(_said("global_quant_config", given, "expected an object, to say how inputs are quantized"))
    named = {"global_quant_config": whole} | {f"layer_quant_config.{name}": spec for name, spec in specs.items()}
    for key, spec in named.items():
        given = get(spec, "input_tensors")
        if given and _quark_format(given) is None:
            unread.append(_said(f"{key}.input_tensors", given, _QUARK_FORMATS))
        elif given:
            unread += _odd_spec(f"{key}.input_tensors", given, _QUARK_INPUTS)
        for part in ("output_tensors", "bias"):
            if get(spec, part):
                unread.append(_said(f"{key}.{part}", spec[part], "expected null"))
        codes = get(spec, "weight")
        if _quark_format(codes):
            refused += _odd_spec(f"{key}.weight", codes, _QUARK_CODES)
        elif codes:
            whole_alone = spec is whole and not any(layers.values())
            (refused if whole_alone else unread).append(_said(f"{key}.weight", codes, _QUARK_FORMATS))
        elif given:
            unread.append(_said(f"{key}.input_tensors", given, "expected null, as its weight is"))
    if any(_quark_format(get(spec, "input_tensors")) != activations for spec in specs.values() if get(spec, "weight")):
        unread.append("input_tensors that differ between layers: expected the same for all")
    for name, spec in _typed(quantization, "layer_type_quant_config", dict).items():
        if spec != whole:
            refused.append(_said(f"layer_type_quant_config.{name}", spec, "expected none, or what global_quant_config says"))
    refused += _odd("export", get(quantization, "export"), dict(pack_method=("reorder",), weight_format=("real_quantized",)))
    if given := get(quantization, "algo_config"):
        refused.append(_said("algo_config", given, "expected null: what it changes in the model is not undone or run"))
    if given := get(quantization, "softmax_quant_spec"):
        unread.append(_said("softmax_quant_spec", given, "expected null"))
    return Declared(
        frozenset({weight} - {None}),
        activations,
        {name: format for name, format in layers.items() if format},
        _strings(quantization, "exclude") + floats,
        static=activations == "nvfp4",
        unread=tuple(unread),
        refused=tuple(refused),
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


_TORCHAO_CONFIG, _TORCHAO_MAPS = "MXDynamicActivationMXWeightConfig", ("FqnToConfig", "ModuleFqnToConfig")


def _read_torchao(quantization: dict) -> Declared:
    given = get(quantization, "quant_type") or {}
    given = given if isinstance(given, dict) else {"default": given}
    default = get(given, "default")
    choices = [default] if default else []
    if get(default, "_type") in _TORCHAO_MAPS:  # configs by module; modules with none stay as they are
        maps = [get(default, "_data", key) for key in ("fqn_to_config", "module_fqn_to_config")]
        choices = [each for found in maps if isinstance(found, dict) for each in found.values() if each]
    keys = ("activation_dtype", "weight_dtype", "scaling_mode")
    said = [{key: get(each, "_data", key, "_data") for key in keys} for each in choices]
    kinds = [get(each, "_type") for each in choices if get(each, "_type") != _TORCHAO_CONFIG]
    unread = [_said("quant_type", kind, f"expected {_TORCHAO_CONFIG}") for kind in kinds]
    for each in choices:
        unread += _odd("quant_type", get(each, "_data"), dict(block_size=(32,)))
    unread += [_said(f"quant_type.{key}", given[key], "expected default alone") for key in given if key != "default"]
    if given and not choices:
        unread.append(_said("quant_type", given, f"expected a default of {_TORCHAO_CONFIG}"))
    if any(each["activation_dtype"] is None for each in said) and not kinds:
        unread.append(_said("quant_type", default, f"expected an activation_dtype, one of {', '.join(TORCHAO_DTYPES)}"))
    if any(each != said[0] for each in said):
        unread.append(_said("quant_type", get(default, "_type"), "its modules differ; expected one config for all"))
    first, dtypes = said[0] if said else {}, tuple(TORCHAO_DTYPES)
    unread += _odd("quant_type", first, dict(activation_dtype=dtypes, weight_dtype=dtypes, scaling_mode=("RCEIL",)))
    weights, activations = _torchao_format(first.get("weight_dtype")), _torchao_format(first.get("activation_dtype"))
    return Declared(frozenset({weights} - {None}), activations, targets=(), unread=tuple(unread))


def _torchao_format(dtype: Any) -> str | None:
    return TORCHAO_DTYPES.get(dtype) if isinstance(dtype, str) else None


_READERS: dict[str, Callable[[dict], Declared]] = {
    "compressed-tensors": _read_compressed_tensors,
    "modelopt": _read_modelopt,
    "quark": _read_quark,
    "gpt-oss": _read_gpt_oss,
    "torchao": _read_torchao,
}


def header_says(dialect: str, metadata: Mapping[str, str], weight: str, says: Declared) -> tuple[str, str] | None:
    """(format, scale layout) of a weight as torchao's metadata in the header gives them; None in other dialects.

    Raises where the header says other things than the config, `says`, of the weight or of its inputs.
    """
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
    format, inputs = TORCHAO_DTYPES[dtype], _torchao_format(get(data, "act_quant_kwargs", "_data", "elem_dtype", "_data"))
    for what, given, expected in (
        ("weights", format, says.formats or {format}),
        ("inputs", inputs, {says.activations} if says.activations and "act_quant_kwargs" in data else {inputs}),
    ):
        if given not in expected:
            raise CheckpointError(f"{weight}: the header says {what} in {given}, and the config {', '.join(expected)}")
    kwargs = get(data, "act_quant_kwargs", "_data")
    of_inputs = {"block_size": get(kwargs, "block_size"), "scaling_mode": get(kwargs, "scaling_mode", "_data")}
    if odd := _odd("act_quant_kwargs", of_inputs, dict(block_size=(32,), scaling_mode=("RCEIL",))):
        raise CheckpointError(f"{weight}: the header says {odd[0]}")
    return format, "tile_128x4" if swizzled else "linear"
