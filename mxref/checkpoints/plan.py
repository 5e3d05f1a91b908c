"""The plan of a conversion, made from headers alone: which tensors are read together, and what is written of them.

A weight is a matrix `[out, in]`, or one of a stack; where source and target stack experts differently, stacks are taken
apart or matrices stacked. What is read together is a job: a matrix, those that share a tensor scale, or a stack.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

import torch

from mxref.blocks import BlockTensor, dequantize
from mxref.checkpoints.checkpoint import Checkpoint, QuantizedWeight, StoredWeight, usable
from mxref.checkpoints.dialects import FUSED, Declared, Layout, Patterns, activation_recipe
from mxref.checkpoints.files import CheckpointError, Output, get, language_config
from mxref.checkpoints.recode import (
    Change,
    Matrix,
    can_keep_codes,
    keep_codes,
    measure,
    not_finite,
    quantize_together,
    turned,
    unchanged,
)
from mxref.checkpoints.writers import ACTIVATIONS, FLOATS, STACKING_MODELS, Scheme, expert_module, placed
from mxref.elements import reciprocal
from mxref.packing import to_layout
from mxref.recipes import RECIPES, Recipe, resolve_recipe

LINEAR = re.compile(r".*(_proj|\.w[123])")  # names of modules that are quantized unless they are ignored
DEFAULT = "default"
_FLOATS = ("F32", "F16", "BF16")
_KEPT = (*_FLOATS, "F64", "BOOL", "I16", "I32", "I64", "U16", "U32", "U64")
_HALVES = ("gate_proj", "up_proj")
_STACK = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_OF_EXPERTS = re.compile(r"(.*\.experts)\.(\d+\.\w+\.weight|\w+_proj)")  # a matrix of an expert, or a stack
_EMBEDDING = re.compile(r"(.*\.)?(\w*embed(?!_out)\w*|wte|wpe)")
_ROUTERS = ("gate", "router")  # beside experts
_TRANSPOSED = ("gpt2", "openai-gpt")  # models whose matrices are [in, out]
_TOGETHER = re.compile(r"(.*\.)(?:(gate_proj|up_proj|w1|w3)|(q_proj|k_proj|v_proj))")


@dataclass(frozen=True)
class Part:
    """One matrix: a tensor or weight `source`, or of a stack one expert and, of its rows, gate's (0) or up's (1).

    `module`: its name where it is written, or the stack's. `shape`: `[out, in]`.
    """

    module: str
    source: str
    shape: tuple[int, int]
    expert: int | None = None
    half: int | None = None


@dataclass(frozen=True)
class Job:
    """Tensors of the source that are read together, what is written of them, and how; `converts`: or they are copied."""

    sources: tuple[str, ...]
    outputs: tuple[Output, ...]
    run: Callable[[Mapping], tuple[dict[str, torch.Tensor], list[Change]]]
    converts: bool = True


@dataclass(frozen=True)
class Wish:
    """What a caller asks of a conversion, as `convert_checkpoint` takes it."""

    to: str
    format: str | None = None
    activations: str | None = DEFAULT
    recipe: str | Recipe | None = None
    ignore: tuple[str, ...] = ()
    include: tuple[str, ...] = ()
    measures: bool = True


@dataclass(frozen=True, eq=False)
class Plan:
    """What is converted to what. `layout`: the row by which weights are written, None for floats. `recipe`: by which they
    are quantized. `stacks`: whether experts are stacked where they are written. `notes`: what the target cannot say.
    """

    checkpoint: Checkpoint
    wish: Wish
    scheme: Scheme
    layout: Layout | None
    recipe: Recipe | None
    stacks: bool
    notes: list[str] = field(default_factory=list)

    @cached_property
    def _ignored(self) -> Patterns:
        return Patterns(self.wish.ignore)

    @cached_property
    def _included(self) -> Patterns:
        return Patterns(self.wish.include)

    @property
    def is_same(self) -> bool:
        """Whether only shards change, and nothing that is in them."""
        given, scheme = self.checkpoint, self.scheme
        same = (given.dialect, given.formats) == (scheme.dialect, (scheme.format,)) and not given.contradicted
        return same and not given.declared.unread and given.declared.activations == scheme.activations

    @property
    def activations(self) -> str:
        """What becomes of how the config says activations are quantized, in words."""
        given, written = self.checkpoint.declared, Declared(activations=self.scheme.activations)
        before, after = given.activations, written.activations
        says = given.formats or given.layers or not self.checkpoint.quantized
        if given.unread or self.checkpoint.contradicted or not says:
            return f"unknown before, {after or 'not quantized'} now"
        if before != after:
            how = "dropped" if after is None else "added" if before is None else "changed"
            return f"{how}: {before or 'not quantized'} before, {after or 'not quantized'} now"
        if after is None:
            return "not quantized, as before"
        tools = activation_recipe(self.checkpoint.dialect, given), activation_recipe(self.scheme.dialect, written)
        return f"kept: {after}" + (f" (rounded by {tools[1]} now, before by {tools[0]})" if tools[0] != tools[1] else "")

    @property
    def model(self) -> object:
        """The model_type of the language model."""
        return language_config(self.checkpoint.config).get("model_type")

    @property
    def dtype(self) -> str:
        """The config's dtype of what is not quantized; bfloat16 if it says none."""
        named = [get(language_config(self.checkpoint.config), key) for key in ("dtype", "torch_dtype")]
        return next((name for name in named if name in ("float32", "bfloat16", "float16")), "bfloat16")

    def jobs(self) -> list[Job]:
        """Every tensor of the source in one job, in the order of the files. Raises ValueError for what cannot be done."""
        groups: dict[str, list[Part]] = {}
        biases: dict[str, list[Part]] = {}
        jobs = []
        parts_of = {name: self._parts(name, weight) for name, weight in self.checkpoint.stored.items()}
        if not self.checkpoint.quantized:
            self._check_experts(parts_of)
        for name, parts in parts_of.items():
            bias = self._bias_parts(name, parts_of) if parts is None else None
            if parts is None and bias is None:
                jobs.append(self._copy(name))
            for part in bias or ():
                biases.setdefault(self._stack(part) or part.source, []).append(part)
            for part in parts or ():
                groups.setdefault(self._group(part), []).append(part)
        seen: set[str | tuple] = set()
        for part in (part for parts in groups.values() for part in parts):
            _see(seen, (part.module, part.expert), part.module)
        if not groups:
            raise ValueError(f"nothing to quantize: no weight is called {LINEAR.pattern} or matches a pattern of include=")
        jobs += [self._convert(parts) for parts in groups.values()] + [self._move(parts) for parts in biases.values()]
        places = {name: place for place, name in enumerate(self.checkpoint.stored)}
        jobs.sort(key=lambda job: min(places[source] for source in job.sources))
        for output in (output for job in jobs for output in job.outputs):
            _see(seen, output.name, output.name)
        return jobs

    # which matrices there are

    def _parts(self, name: str, weight: StoredWeight | None) -> list[Part] | None:
        """The matrices of a tensor or weight; None of what stays as it is."""
        entry = self.checkpoint.shards.entries[name if weight is None else weight.codes]
        if weight is None:
            if not self._is_quantized(name):
                return None
            if entry.dtype not in _FLOATS:
                raise ValueError(f"{name} is {entry.dtype}: expected {', '.join(_FLOATS)}, or a pattern of ignore= for it")
            shape = entry.shape if len(entry.shape) == 2 else (entry.shape[0], entry.shape[2], entry.shape[1])
        else:
            shape = weight.shape
        self._check_length(name, shape, weight)
        if len(shape) == 2:
            module = expert_module(name.removesuffix(".weight"), self.scheme.dialect, self.model)
            if not self._holds_matrices and not self._stack(Part(module, name, shape)):
                raise ValueError(
                    f"{name} belongs to no expert, and {self.scheme.dialect} stores nothing else in {self.scheme.format}"
                )
            return [Part(module, name, shape)]
        if self.stacks:
            return [Part(name, name, shape[1:], expert) for expert in range(shape[0])]
        return self._taken_apart(name, shape)

    @property
    def _holds_matrices(self) -> bool:
        """Whether the target has a form for what is no stack."""
        return self.layout is None or self.scheme.layout(stacked=False) is not None

    def _is_quantized(self, name: str) -> bool:
        """Whether a tensor of a model in floats is to be quantized; a note, if its name alone says so."""
        entry, module = self.checkpoint.shards.entries[name], name.removesuffix(".weight")
        if self.checkpoint.quantized or self._ignored.find(module):
            return False
        if len(entry.shape) == 3 and _STACK.fullmatch(name) and 0 not in entry.shape:
            if self.model not in STACKING_MODELS:
                raise ValueError(
                    f"{name} {list(entry.shape)} stacks experts, and how model_type {self.model!r} orders their axes is not "
                    f"known (of {', '.join(STACKING_MODELS)} it is): a pattern of ignore= leaves it as it is"
                )
            return True
        included = [] if module == name else self._included.find(module)
        if not included and not LINEAR.fullmatch(module):
            return False
        if len(entry.shape) != 2 or 0 in entry.shape or module == name:
            self.notes.append(f"{name} {list(entry.shape)} is no weight of a linear, [out, in], and stays as it is")
            return False
        if included:
            self._check_included(included[0], name)
        return self._holds_matrices

    def _check_included(self, pattern: str, name: str) -> None:
        """Raise for what is a matrix and no linear, or has no place in the target."""
        module = name.removesuffix(".weight")
        parent, _, last = module.rpartition(".")
        beside_experts = any(each.startswith(f"{parent}.experts.") for each in self.checkpoint.stored)
        kind = "an embedding" if _EMBEDDING.fullmatch(module) else None
        kind = "a router" if last in _ROUTERS and beside_experts else kind
        if kind is not None:
            raise ValueError(
                f"include={pattern!r} matches {name}, the weight of {kind}: expected linears; a pattern of ignore= leaves it"
            )
        if not self._holds_matrices:
            raise ValueError(
                f"include={pattern!r} matches {name}, and {self.scheme.dialect} stores nothing but experts in "
                f"{self.scheme.format}"
            )

    def _check_experts(self, parts_of: Mapping[str, list[Part] | None]) -> None:
        """Raise where some matrices of a layer's experts are to be quantized and others not, which no layer runs."""
        layers: dict[str, dict[bool, str]] = {}
        for name, parts in parts_of.items():
            if (match := _OF_EXPERTS.fullmatch(name)) and len(self._shape(name)) > 1:
                layers.setdefault(match[1], {}).setdefault(parts is None, name)
        for found in layers.values():
            if len(found) == 2:
                left, taken = found[True], found[False]
                ignored = self._ignored.find(left.removesuffix(".weight"))
                included = self._included.find(taken.removesuffix(".weight"))
                why = f"include={included[0]!r}: " if included else ""
                why = f"ignore={ignored[0]!r}: " if ignored else why
                raise ValueError(
                    f"{why}{left} stays as it is and {taken} beside it is to be quantized: expected all matrices of a "
                    "layer's experts, or none"
                )

    def _check_length(self, name: str, shape: tuple[int, ...], weight: StoredWeight | None) -> None:
        """Raise where blocks would be short, unless they are taken over as they are by a dialect that has such."""
        if self.layout is None or not shape[-1] % self.layout.block.block_size:
            return
        block = self.layout.block
        if weight is None or weight.layout.format != block.name or self.layout.whole_blocks:
            left = "all of its layer's experts as they are" if _OF_EXPERTS.fullmatch(name) else "it as it is"
            hint = f"; a pattern of ignore= leaves {left}" if weight is None else ""
            raise ValueError(
                f"{name} {list(shape)} has {shape[-1]} elements a row: {self.scheme.dialect} takes multiples of "
                f"{block.block_size} in {block.name}{hint}"
            )

    def _taken_apart(self, name: str, shape: tuple[int, ...]) -> list[Part]:
        """The matrices of a stack `[experts, out, in]` as modules of their own."""
        experts, kind = name.rpartition(".")[::2]

        def module(expert: int, kind: str) -> str:
            return expert_module(f"{experts}.{expert}.{kind}", self.scheme.dialect, self.model)

        if kind != FUSED:
            return [Part(module(e, kind), name, shape[1:], e) for e in range(shape[0])]
        if self._rows(name) is None or shape[1] % 2:
            raise ValueError(f"{name} stacks gate and up, and nothing says in which order its {shape[1]} rows are")
        half = (shape[1] // 2, *shape[2:])
        halves = list(enumerate(_HALVES))
        return [Part(module(e, kind), name, half, e, i) for e in range(shape[0]) for i, kind in halves]

    def _rows(self, name: str) -> str | None:
        """How a stack orders its rows."""
        weight = self.checkpoint.stored[name]
        if weight is not None:
            return weight.rows
        return "interleaved" if self.model in STACKING_MODELS else None

    def _bias_parts(self, name: str, parts_of: Mapping[str, list[Part] | None]) -> list[Part] | None:
        """The vectors of a bias that is stacked where its weight was, and has to be where its weight goes."""
        if self.stacks:
            is_bias = name.endswith(".bias") and _EXPERT.fullmatch(name.removesuffix(".bias"))
            return [Part(name.removesuffix(".bias"), name, self._shape(name))] if is_bias else None
        stack = parts_of.get(name.removesuffix("_bias")) if name.endswith("_bias") else None
        if not stack or stack[0].expert is None:
            return None
        return [Part(p.module, name, p.shape[:1], p.expert, p.half) for p in stack]

    def _shape(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.shards.entries[name].shape

    # which go together

    def _stack(self, part: Part) -> str | None:
        """The stack that a matrix is part of where it is written."""
        expert = _EXPERT.fullmatch(part.module) if self.stacks else None
        if expert:
            return f"{expert[1]}.{FUSED if expert[3] in _HALVES else expert[3]}"
        return part.module if self.stacks and part.expert is not None else None

    def _group(self, part: Part) -> str:
        """What names the job of a matrix."""
        return self._stack(part) or (part.source if part.expert is not None else self._sharing(part))

    def _sharing(self, part: Part) -> str:
        """What names the matrices that have one tensor scale: of one format all of a stack, gate and up, or q, k and v."""
        if self.layout is None or self.layout.tensor_scale is None:
            return f"{part.module} {part.expert}"
        stack, together = self._stack(part), _TOGETHER.fullmatch(part.module)
        if stack is None and together:
            return f"{together[1]}{'gate, up' if together[2] else 'q, k, v'} {part.shape[-1]} {self._format(part)}"
        return f"{stack} {self._format(part)}" if stack else part.module

    # what is done with them

    def _copy(self, name: str) -> Job:
        entry, written = self.checkpoint.shards.entries[name], expert_module(name, self.scheme.dialect, self.model)
        return Job((name,), (Output(written, entry.dtype, entry.shape),), lambda read: ({written: read[name]}, []), False)

    def _convert(self, parts: list[Part]) -> Job:
        """The job of matrices that become matrices, or one stack."""
        stack = self._stack(parts[0])
        layout = None if self.layout is None else self.scheme.layout(stack is not None)
        written = _Matrices(parts, layout) if stack is None else _Stack(stack, parts, layout)
        has_input = self.scheme.activations is not None and layout.input_scale is not None
        blanks = [_blank(part.shape, layout, self.scheme) for part in parts]
        stored = self.checkpoint.stored[parts[0].source]
        formats = {self._format(part) for part in parts}
        keeps_scales = layout is not None and layout.format in formats
        one_scale = parts[0].expert is not None and stored is not None and self._scalar(stored.tensor_scale)
        shared = len(formats) == 1 and (not keeps_scales or one_scale)
        shared_input = parts[0].expert is not None and has_input and self._scalar(stored.input_scale)
        input_blanks = [torch.empty((), device="meta") if has_input else None] * len(parts)
        outputs = tuple(
            Output.like(name, tensor) for name, tensor in written.tensors(blanks, input_blanks, shared, shared_input).items()
        )

        def run(read: Mapping) -> tuple[dict[str, torch.Tensor], list[Change]]:
            weights = [self._take(read[part.source], part) for part in parts]
            targets, changes = self._recoded(parts, [weight.tensor for weight in weights], layout)
            inputs = [_turned_input(weight, layout if has_input else None) for weight in weights]
            changes = [
                change.with_input(error, weight.input_scale is not None and scale is None)
                for change, weight, (scale, error) in zip(changes, weights, inputs)
            ]
            tensors = written.tensors(targets, [scale for scale, _ in inputs], shared, shared_input)
            return tensors, changes if stack is None else [Change.total(stack, changes)]

        return Job(tuple(dict.fromkeys(part.source for part in parts)), outputs, run)

    def _format(self, part: Part) -> str | None:
        """The format that a matrix has in the source; None of floats."""
        weight = self.checkpoint.stored[part.source]
        return weight.layout.format if weight else None

    def _scalar(self, name: str | None) -> bool:
        return name is not None and prod(self._shape(name)) == 1

    def _take(self, value: QuantizedWeight | torch.Tensor, part: Part) -> QuantizedWeight:
        """The matrix of `part`; what is no block-scaled weight is taken for one without scales."""
        if isinstance(value, torch.Tensor):
            if part.expert is None:
                return QuantizedWeight(part.source, value)
            matrix = value[part.expert].T
            return QuantizedWeight(part.source, matrix if part.half is None else matrix[self._half(part, len(matrix))])
        q, scale = value.tensor, value.input_scale
        if part.expert is not None:
            q = q[part.expert]
            scale = scale if scale is None or scale.numel() == 1 else scale[part.expert]
        if part.half is not None:
            q = q[self._half(part, q.shape[0])]
            scale = scale if scale is None or scale.numel() == 1 else scale[part.half]
        given = q.tensor_scale
        if given is not None and given.ndim and (given == given.flatten()[0]).all():
            q = BlockTensor.trusted(q.packed, q.length, q.scales, given.flatten()[0], q.format, q.recipe, q.axis)
        return QuantizedWeight(part.source, q, scale, value.input_direction)

    def _half(self, part: Part, rows: int) -> slice:
        if self._rows(part.source) == "interleaved":
            return slice(part.half, None, 2)
        return slice(part.half * rows // 2, (part.half + 1) * rows // 2)

    def _recoded(
        self, parts: list[Part], matrices: list[Matrix], layout: Layout | None
    ) -> tuple[list[Matrix], list[Change]]:
        """The matrices as they are written, and what that changed; those that share a tensor scale at a time."""
        together: dict[str, list[int]] = {}
        for i, part in enumerate(parts):
            together.setdefault(self._sharing(part), []).append(i)
        targets, changes = [None] * len(parts), [None] * len(parts)
        for indices in together.values():
            given = [matrices[i] for i in indices]
            try:
                found, how, outside = self._recoded_together(given, layout)
            except ValueError as fault:
                raise CheckpointError(f"{parts[indices[0]].module.removesuffix('.weight')}.weight: {fault}") from None
            for i, source, target, outer in zip(indices, given, found, outside):
                name = parts[i].module.removesuffix(".weight") + ".weight"
                if how == "quantized":
                    try:
                        replace(target)  # looks at the scales, as a reader does
                    except ValueError as fault:
                        zeros = "" if isinstance(source, BlockTensor) or source.any() else "of zeros alone "
                        raise CheckpointError(
                            f"{name}: recipe {self.recipe.name!r} makes {zeros}what cannot be read: {fault}"
                            + _other_recipe(source, layout)
                        ) from None
                measured = self.wish.measures or isinstance(source, BlockTensor)
                loss = unchanged(target) if how == "kept" else measure(source, target, outer) if measured else None
                odd = not_finite(source) if loss is None else loss.not_finite
                targets[i], changes[i] = target, Change(name, how, loss, not_finite=odd)
        return targets, changes

    def _recoded_together(self, given: list[Matrix], layout: Layout | None) -> tuple[list[Matrix], str, list[int | None]]:
        """Matrices that share a tensor scale as they are written, how they got there, and blocks outside where known."""
        unknown = [None] * len(given)
        if layout is None:
            return [dequantize(q, FLOATS[self.scheme.format]) for q in given], "decoded", unknown
        decoder, quantized = RECIPES[layout.recipe], isinstance(given[0], BlockTensor)
        if quantized and given[0].format == layout.block:
            result = turned(given, decoder)
            return (
                result,
                "kept" if all(a.tensor_scale is b.tensor_scale for a, b in zip(given, result)) else "turned",
                unknown,
            )
        if quantized and self.wish.recipe is None and can_keep_codes(given[0].format, layout.block):
            result, below = keep_codes(given, layout.block, decoder)
            return result, "codes kept", below
        return turned(quantize_together(given, layout.block, self.recipe), decoder), "quantized", unknown

    def _move(self, parts: list[Part]) -> Job:
        """The job of biases that are stacked, or taken apart."""
        stack = self._stack(parts[0])
        sources = tuple(dict.fromkeys(part.source for part in parts))
        dtype = self.checkpoint.shards.entries[sources[0]].dtype
        if stack is None:
            outputs = [Output(f"{part.module}.bias", dtype, part.shape) for part in parts]
        else:
            order = _by_expert(stack, parts)
            shape = (len(order), sum(parts[i].shape[0] for i in order[0]))
            outputs = [Output(f"{stack}_bias", dtype, shape)]

        def run(read: Mapping) -> tuple[dict[str, torch.Tensor], list[Change]]:
            vectors = []
            for part in parts:
                vector = read[part.source] if part.expert is None else read[part.source][part.expert]
                vectors.append(vector if part.half is None else vector[self._half(self._weight_of(part), len(vector))])
            if stack is None:
                return {output.name: vector for output, vector in zip(outputs, vectors)}, []
            return {outputs[0].name: _joined([vector[:, None] for vector in vectors], order)[..., 0]}, []

        return Job(sources, tuple(outputs), run, False)

    def _weight_of(self, bias: Part) -> Part:
        return Part(bias.module, bias.source.removesuffix("_bias"), bias.shape, bias.expert, bias.half)


def _other_recipe(source: Matrix, layout: Layout) -> str:
    """A hint at the format's own recipe, if what it makes of `source` can be read."""
    name = layout.block.default_recipe
    try:
        replace(quantize_together([source], layout.block, resolve_recipe(name, layout.block))[0])
    except ValueError:
        return ""
    return f"; recipe {name!r} makes what can be"


@dataclass(frozen=True)
class _Matrices:
    """Matrices that are written each for itself."""

    parts: Sequence[Part]
    layout: Layout | None

    def tensors(self, targets: list[Matrix], inputs: list, shared: bool, shared_input: bool) -> dict[str, torch.Tensor]:
        """What is written, by name."""
        named = {}
        for part, target, scale in zip(self.parts, targets, inputs):
            if self.layout is None:
                named[part.module + ".weight"] = target
            else:
                suffixes = placed(self.layout, target.packed, target.scales, target.tensor_scale, scale)
                named |= {part.module + suffix: tensor for suffix, tensor in suffixes.items()}
        return named


@dataclass(frozen=True)
class _Stack:
    """Matrices that are written as one stack, in floats as `[experts, in, out]`."""

    name: str
    parts: Sequence[Part]
    layout: Layout | None

    def tensors(self, targets: list[Matrix], inputs: list, shared: bool, shared_input: bool) -> dict[str, torch.Tensor]:
        """What is written, by name. `shared`, `shared_input`: whether all experts have one scale, which is a scalar."""
        order = _by_expert(self.name, self.parts)
        if self.layout is None:
            return {self.name: _joined(targets, order).transpose(1, 2)}
        packed, scales = (_joined([getattr(q, what) for q in targets], order) for what in ("packed", "scales"))
        of_experts = [[targets[i].tensor_scale for i in indices] for indices in order]
        tensor_scale = None
        if self.layout.tensor_scale is not None:
            tensor_scale = of_experts[0][0] if shared else self._one_each(of_experts)[:, None, None]
        input_scale = None
        if inputs[0] is not None:
            of_experts = [[inputs[i] for i in indices] for indices in order]
            input_scale = of_experts[0][0] if shared_input else self._one_each(of_experts)
        suffixes = placed(self.layout, packed, scales, tensor_scale, input_scale)
        return {self.name + suffix: tensor for suffix, tensor in suffixes.items()}

    def _one_each(self, scales: list[list[torch.Tensor]]) -> torch.Tensor:
        for e, of_expert in enumerate(scales):
            if of_expert[0].numel() > 1 or not of_expert[0].is_meta and any(s != of_expert[0] for s in of_expert):
                raise CheckpointError(
                    f"{self.name}, expert {e}: gate and up have scales of their own, which a stack cannot hold"
                )
        return torch.stack([of_expert[0] for of_expert in scales])


def _by_expert(stack: str, parts: Sequence[Part]) -> list[list[int]]:
    """Indices of the parts of each expert, gate before up."""
    found: dict[int, dict[str, int]] = {}
    for i, part in enumerate(parts):
        expert = _EXPERT.fullmatch(part.module)
        number, kind = (int(expert[2]), expert[3]) if expert else (part.expert, "")
        found.setdefault(number, {})[kind] = i
    kinds = [kind for kind in ("", *_HALVES, "down_proj") if any(kind in each for each in found.values())]
    if sorted(found) != list(range(len(found))) or any(set(each) != set(kinds) for each in found.values()):
        raise CheckpointError(f"{stack}: of {len(found)} experts some lack a matrix, so they cannot be stacked")
    if len({tuple(parts[each[kind]].shape for kind in kinds) for each in found.values()}) > 1:
        raise CheckpointError(f"{stack}: experts differ in shape, so they cannot be stacked")
    return [[found[number][kind] for kind in kinds] for number in range(len(found))]


def _joined(matrices: Sequence[torch.Tensor], order: list[list[int]]) -> torch.Tensor:
    """A stack of matrices; gate and up rows interleaved."""
    experts = [[matrices[i] for i in indices] for indices in order]
    return torch.stack([rows[0] if len(rows) == 1 else to_layout(torch.cat(rows), "interleaved") for rows in experts])


def _blank(shape: tuple[int, ...], layout: Layout | None, scheme: Scheme) -> Matrix:
    """What a matrix becomes, without its data."""
    if layout is None:
        return torch.empty(shape, dtype=FLOATS[scheme.format], device="meta")
    block, (rows, length) = layout.block, shape
    packed = torch.empty((rows, -(-length * block.element.bits // 8)), dtype=torch.uint8, device="meta")
    scales = torch.empty((rows, -(-length // block.block_size)), dtype=torch.uint8, device="meta")
    tensor_scale = None if layout.tensor_scale is None else torch.empty((), device="meta")
    return BlockTensor.trusted(packed, length, scales, tensor_scale, block, RECIPES[layout.recipe], -1)


def _see(seen: set[str | tuple], key: str | tuple, name: str) -> None:
    """Raise at the second of one key."""
    if key in seen:
        raise ValueError(f"{name} would be written twice: two tensors of the source come to one name")
    seen.add(key)


def _turned_input(weight: QuantizedWeight, layout: Layout | None) -> tuple[torch.Tensor | None, float | None]:
    """The input scale as it is written, and its relative error if it had to be turned."""
    scale = weight.input_scale
    if scale is None or layout is None:
        return None, None
    if weight.input_direction == layout.direction:
        return scale, None
    other = reciprocal(scale)
    if not usable(other).all():
        raise CheckpointError(f"{weight.name}: its input scale {scale.flatten()[0].item()} has no reciprocal")
    return other, (scale.double() * other.double() - 1).abs().max().item()


# ---- what is asked for ----------------------------------------------------------------------------------------------


def make_plan(checkpoint: Checkpoint, wish: Wish) -> Plan:
    """Check what is asked against what the source is. Raises ValueError for what cannot be done."""
    _check_source(checkpoint)
    to, floats = wish.to, not checkpoint.quantized
    if floats and to == "plain":
        raise ValueError("to='plain': the source holds no quantized weights, so there is nothing to convert")
    if floats and checkpoint.dialect != "plain":
        raise ValueError(
            f"the source holds no weight as {checkpoint.dialect} stores one: dialect='plain' takes it for a model in floats"
        )
    model = language_config(checkpoint.config).get("model_type")
    if floats and model in _TRANSPOSED:
        raise ValueError(
            f"model_type {model!r} stores its matrices as [in, out], and a dialect [out, in]: expected a linear's"
        )
    if not floats and (wish.ignore or wish.include):
        raise ValueError("ignore= and include= choose what is quantized of a model in floats; this one is quantized already")
    modules = [name.removesuffix(".weight") for name in checkpoint.shards.entries]
    for argument, patterns in (("ignore", wish.ignore), ("include", wish.include)):
        entries = Patterns(patterns)
        meant = {pattern for module in modules for pattern in entries.find(module)}
        for pattern in patterns:
            if pattern not in meant:
                raise ValueError(f"{argument}={pattern!r} matches no module of the source")
    formats = tuple(FLOATS) if to == "plain" else tuple(ACTIVATIONS[to])
    format = wish.format
    if format is None:
        known = ("bf16",) if to == "plain" else formats if len(formats) == 1 else checkpoint.formats
        format = known[0] if len(known) == 1 else None
        if format is None:
            holds = ", ".join(checkpoint.formats) or "floats"
            raise ValueError(f"format= is not given and the source holds {holds}: expected one of {', '.join(formats)}")
    if format not in formats:
        again = "" if floats or to == "plain" else ", in which the weights are quantized anew"
        raise ValueError(f"to={to!r}: {to}'s {format} is not written: expected one of {', '.join(formats)}{again}")
    recipe = None
    if wish.recipe is not None and (to == "plain" or checkpoint.formats == (format,)):
        asked = getattr(wish.recipe, "name", wish.recipe)
        raise ValueError(f"recipe={asked!r}: nothing is quantized on the way from {checkpoint.scheme} to {format}")
    notes = [note for note in (*checkpoint.notes, checkpoint.contradicted) if note]
    scheme = Scheme(to, format, _activations(checkpoint, to, format, wish.activations, notes))
    stacks = _stacks(checkpoint, scheme)
    layout = None if to == "plain" else scheme.layout(stacks) or scheme.layout(not stacks)
    if layout is not None:
        recipe = _check_recipe(layout.recipe if wish.recipe is None else wish.recipe, layout)
    plan = Plan(checkpoint, wish, scheme, layout, recipe, stacks, notes)
    if checkpoint.declared.cache and not plan.is_same:
        notes.append("what the config says of the KV cache is not carried over")
    return plan


def _check_source(checkpoint: Checkpoint) -> None:
    entries = checkpoint.shards.entries
    for name in checkpoint.plain:
        if entries[name].dtype not in _KEPT:
            raise ValueError(f"{name} is {entries[name].dtype} and no block-scaled weight: what it means is not known")


def _activations(checkpoint: Checkpoint, to: str, format: str, asked: str | None, notes: list[str]) -> str | None:
    """The format of the activations in the target's config."""
    if checkpoint.declared.unread:
        if asked == DEFAULT and to != "plain":
            said = checkpoint.declared.unread[0]
            raise ValueError(f"the config says {said}; activations=None (weights alone) or a format leaves it out")
        notes += [f"not carried over: {said}" for said in checkpoint.declared.unread]
    if to == "plain":
        if asked not in (DEFAULT, None):
            raise ValueError(f"activations={asked!r}: to='plain' says nothing of activations")
        return None
    known, given = ACTIVATIONS[to][format], checkpoint.declared.activations
    if asked != DEFAULT and asked not in known:
        expected = ", ".join(str(each).lower() for each in known)
        raise ValueError(f"activations={asked!r}: to={to!r} with format {format} can say {expected}")
    chosen = given if asked == DEFAULT else asked
    if chosen == "nvfp4" and chosen in known:
        missing = [name for name in checkpoint.quantized if checkpoint.stored[name].input_scale is None]
        if missing or not checkpoint.quantized:
            said = f"activations={asked!r} takes" if asked != DEFAULT else "the config says activations in nvfp4, which take"
            raise ValueError(
                f"{said} a calibrated input scale for each weight, which "
                f"{missing[0] if missing else 'a model in floats'} lacks: expected it, or activations=None (weights alone)"
            )
    if asked == DEFAULT and not checkpoint.quantized:
        if known[0] is None and len(known) > 1:
            notes.append(
                f"weights alone: activations in {known[1]} take a calibrated input scale for each, which floats lack"
            )
        return known[0]
    if chosen in known:
        return chosen
    instead = known[0] if given is not None or None not in known else None
    notes.append(
        f"the config says {given or 'nothing'} of activations, which {to} with {format} cannot say: "
        + (f"{instead} instead" if instead else "weights alone")
    )
    return instead


def _stacks(checkpoint: Checkpoint, scheme: Scheme) -> bool:
    """Whether experts are stacked where they are written."""
    model = language_config(checkpoint.config).get("model_type")
    entries = checkpoint.shards.entries
    stacked = any(checkpoint.stored[name].layout.stacked for name in checkpoint.quantized)
    stacked |= any(_STACK.fullmatch(name) and len(entries[name].shape) == 3 for name in checkpoint.plain)
    if scheme.dialect == "plain":
        return model in STACKING_MODELS
    same = stacked and checkpoint.dialect == scheme.dialect  # another orders their rows otherwise
    if scheme.layout(stacked=True) is not None and (same or model in STACKING_MODELS):
        return True
    if scheme.layout(stacked=False) is None:
        raise ValueError(f"to={scheme.dialect!r} is for models of type {', '.join(STACKING_MODELS)}: this one is {model!r}")
    if stacked and checkpoint.quantized and scheme.dialect != "compressed-tensors":
        raise ValueError(
            f"the source stacks its experts, and how {scheme.dialect} stores those in {scheme.format} is not known "
            f"(model_type {model!r})"
        )
    return False


def _check_recipe(given: str | Recipe, layout: Layout) -> Recipe:
    """A recipe whose blocks any reader of `layout` decodes."""
    recipe = resolve_recipe(given, layout.block)
    for what, found in (("blocks of several rows", recipe.block_rows > 1), ("a rotation", recipe.transform is not None)):
        if found:
            raise ValueError(f"recipe {recipe.name!r} makes {what}, which no checkpoint stores")
    if recipe.rounding == "stochastic":
        raise ValueError(f"recipe {recipe.name!r} rounds at random: expected one whose result is the same every time")
    return recipe
