"""`convert_checkpoint`: from one dialect to another, and from a model in floats to any of them.

A plan first, from headers alone; then one job after the other, each tensor read once and written to its place, so that
memory holds one job and never a shard. The directory takes its name when it is whole.
"""

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import inf
from pathlib import Path
from typing import Any

import torch

from mxref.checkpoints.checkpoint import Checkpoint, QuantizedWeight, load_checkpoint, usable
from mxref.checkpoints.dialects import DIALECTS, check_patterns, find_dialect
from mxref.checkpoints.files import INDEX, WHOLE, CheckpointError, Output, ShardWriter, get, read_json, without, write_json
from mxref.checkpoints.inspection import BESIDE, STACK, incomplete, promised, stored_twice
from mxref.checkpoints.plan import DEFAULT, LINEAR, Plan, Wish, make_plan
from mxref.checkpoints.recode import Change, not_finite
from mxref.checkpoints.writers import FLOATS, header_metadata, quantization_configs
from mxref.formats import check_choice, check_number
from mxref.recipes import Recipe

SHARD_SIZE = 5 * 10**9
_SAID = 8  # weights that a note names
HF_CONFIG = "hf_quant_config.json"
_CONFIGS = ("config.json", HF_CONFIG)
_DTYPE_KEYS = ("dtype", "torch_dtype")
_COPIED = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")  # files beside the weights that go along


@dataclass(frozen=True)
class Conversion:
    """What `convert_checkpoint` did. `source`, `target`: dialect and scheme of weights and activations; `recipe`: by which
    it quantized, None if it did not. `activations`: in words, what became of how they are quantized. `changes`: one a
    quantized weight, of the source or of the target. `copied`: tensors that stayed as they are. `files`: of weights;
    `bytes`: of their tensors. `notes`: what the target cannot say.
    """

    path: str
    out: str
    source: str
    target: str
    recipe: str | None
    activations: str
    changes: tuple[Change, ...]
    copied: int
    files: tuple[str, ...]
    bytes: int
    notes: tuple[str, ...] = ()

    @property
    def lossless(self) -> bool:
        """Whether every weight decodes to the values that it had, and every input scale is as it was; of what else becomes
        of activations it says nothing."""
        return not any(c.loss is None or c.loss.changed or c.input_error or c.input_dropped for c in self.changes)

    @property
    def faults(self) -> tuple[Change, ...]:
        """Weights with blocks that the target's scales do not reach, or with values that are finite no longer, or that were
        NaN or Inf and are finite now; of what was not measured those that held NaN or Inf.
        """
        return tuple(change for change in self.changes if _is_fault(change))

    def record(self) -> dict:
        """Everything, as JSON takes it."""
        facts = {name: value for name, value in self.__dict__.items() if name != "changes"}
        return facts | {"lossless": self.lossless, "weights": [change.record() for change in self.changes]}


def convert_checkpoint(
    path: str | os.PathLike,
    out: str | os.PathLike,
    *,
    to: str,
    format: str | None = None,
    activations: str | None = DEFAULT,
    recipe: str | Recipe | None = None,
    ignore: Sequence[str] = (),
    include: Sequence[str] = (),
    dialect: str | None = None,
    shard_size: int = SHARD_SIZE,
    measure_losses: bool = True,
    force: bool = False,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> Conversion:
    """Write the checkpoint at `path` to the directory `out`, in the dialect `to`.

    `format`: of the weights, a block format, or bf16, f16 or f32 for `to="plain"`; default: what the source has.
    Weights that have it already keep codes and block scales; MXFP4 becomes NVFP4 with its codes where the scales allow
    it; others are decoded and quantized by `recipe` (default: the target's own, `Layout.recipe`), which also makes
    MXFP4's way to NVFP4 one of those. `activations`: a block format that the target's config can go with, None for
    weights alone; by default the source's, or for a model in floats what the target's producer does. NVFP4 activations
    need stored input scales, which only a source with them provides.

    Of a model in floats every linear is quantized whose name ends in `_proj` or `w1`, `w2`, `w3`, or matches a pattern
    of `include`, and matches none of `ignore` (names, wildcards, `re:` expressions); of a layer's experts all matrices or
    none, and neither embeddings nor routers. `dialect`: as for `load_checkpoint`.
    `shard_size`: bytes. `measure_losses`: compare what was quantized from floats too. `force`: replace a checkpoint at
    `out`, all of it: a folder of a config.json, weights that are `model.safetensors` or that its index names, and else
    only hf_quant_config.json, that index, and files that are copied anew from beside the source, none of them a link.

    One job at a time is in memory: a weight, gate and up that share a scale, or a stack of experts. Everything is
    written to `.NAME.part` beside `out`, which only one run has at a time, and which takes the name at the end; whatever
    goes wrong before leaves `out` as it was. So does what comes to be at `out` meanwhile, or changes there: it is never
    replaced, and the finished checkpoint stays where it was written, which the error names. A run that is killed outright
    leaves `.NAME.part`, and later ones refuse until that is removed. Raises ValueError for what cannot be asked for or
    read, OSError for what cannot be written.

    >>> convert_checkpoint("nowhere", "out", to="quark")
    Traceback (most recent call last):
    ValueError: nowhere: expected a checkpoint directory or a .safetensors file
    """
    path, out = Path(path), Path(out)
    check_choice("to", to, tuple(DIALECTS))
    check_number("shard_size", shard_size, 1)
    checkpoint = load_checkpoint(path, dialect=dialect, weights_only=True).streamed()
    beside = path if path.is_dir() else path.parent
    others = _others(beside)
    left = tuple(_left(beside, others))
    _check_out(path, out, force, {file.name for file in others})
    seen = _held(out)
    ignore, include = check_patterns("ignore", ignore), check_patterns("include", include)
    plan = make_plan(checkpoint, Wish(to, format, activations, recipe, ignore, include, measure_losses))
    jobs = plan.jobs()
    _check_source(path, checkpoint)
    outputs = [output for job in jobs for output in job.outputs]
    size = sum(output.bytes for output in outputs)
    free = shutil.disk_usage(_parent(out)).free
    if size > free:
        raise OSError(f"{out}: {size:,} bytes are to be written where {free:,} are free")
    changes, odd_inputs, kept_beyond = [], [], []
    with _new_directory(out, seen) as folder:
        writer = ShardWriter(folder, outputs, shard_size, partial(header_metadata, plan.scheme, plan.dtype))
        try:
            _write_configs(plan, beside, folder, outputs)
            _check_written(folder)
            for done, job in enumerate(jobs, start=1):
                read = {name: checkpoint[name] for name in job.sources}
                odd_inputs += [name for name, value in read.items() if _has_odd_input(value)]
                tensors, changed = job.run(read)
                del read
                for name, tensor in tensors.items():
                    writer.write(name, tensor)
                    kept_beyond += [name] if not job.converts and _overflows(tensor, plan.scheme.format) else []
                changes += changed
                if on_progress is not None:
                    on_progress("tensors", done, len(jobs))
        finally:
            writer.close()
        for file in others:
            shutil.copyfile(file, folder / file.name)
    return Conversion(
        path=str(path),
        out=str(out),
        source=f"{checkpoint.dialect} {checkpoint.scheme}",
        target=f"{to} {plan.scheme}",
        recipe=plan.recipe.name if any(change.how == "quantized" for change in changes) else None,
        activations=plan.activations,
        changes=tuple(changes),
        copied=sum(not job.converts for job in jobs),
        files=tuple(writer.files),
        bytes=size,
        notes=(
            *plan.notes,
            *_in_part(path, checkpoint),
            *_dropped(changes),
            *_not_finite(changes),
            *_beyond(plan.scheme.format, changes, kept_beyond),
            *_odd(odd_inputs),
            *left,
        ),
    )


def _is_fault(change: Change) -> bool:
    loss = change.loss
    return bool(change.not_finite) if loss is None else loss.outside > 0 or loss.max_error == inf


def _not_finite(changes: Sequence[Change]) -> Iterator[str]:
    """What to say of weights that hold NaN or Inf."""
    said = [f"{change.not_finite} in {change.name}" for change in changes if change.not_finite]
    if said:
        others = f" and in {len(said) - _SAID} other weights" if len(said) > _SAID else ""
        yield f"NaN or Inf in the source: {', '.join(said[:_SAID])}{others}"


def _overflows(tensor: torch.Tensor, format: str) -> bool:
    """Whether a tensor that stays as it is holds finite values that the dtype of the new config, if it is one, has not."""
    if format not in FLOATS or not tensor.is_floating_point() or tensor.itemsize == 1:
        return False
    return not_finite(tensor.to(FLOATS[format])) > not_finite(tensor)


def _beyond(format: str, changes: Sequence[Change], kept: Sequence[str]) -> Iterator[str]:
    """What to say of finite values that floats of the new dtype do not reach; `kept`: names of what stays as it is."""
    became = [change.name for change in changes if change.how == "decoded" and change.loss.max_error == inf]
    for names, what in ((became, "are Inf now"), (kept, f"stay as they are, and are Inf to who reads them in {format}")):
        if names:
            others = f" and {len(names) - _SAID} others" if len(names) > _SAID else ""
            yield f"beyond {format}: finite values of {', '.join(names[:_SAID])}{others} {what}"


def _in_part(path: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """What to say of one file of a model that has several, by the index beside it or by what the config counts."""
    listed = get(read_json(path.parent / INDEX), "weight_map") if path.is_file() else None
    others = len(set(listed) - set(checkpoint.shards.entries)) if isinstance(listed, dict) else 0
    lacks = next((each.name for each in incomplete(checkpoint) if path.is_file() and each.what == "missing"), None)
    if others or lacks:
        why = f"it lacks {others} of the {len(listed)} tensors in {INDEX}" if others else f"it lacks {lacks}"
        yield f"{path.name} is a part of the model: {why}, and the config that goes along is that of the whole"


def _has_odd_input(value: QuantizedWeight | torch.Tensor) -> bool:
    scale = getattr(value, "input_scale", None)
    return scale is not None and not bool(usable(scale).all())


def _odd(names: Sequence[str]) -> Iterator[str]:
    """What to say of input scales by which no input can be quantized."""
    if names:
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"the input scale of {names[0]}{others} is no positive finite number in the source"


def _dropped(changes: Sequence[Change]) -> Iterator[str]:
    """What to say of input scales that are not written."""
    names = [change.name for change in changes if change.input_dropped]
    if names:
        others = f" and {len(names) - 1} others" if len(names) > 1 else ""
        yield f"the input scale of {names[0]}{others} is not written: what quantizes inputs cannot be had back"


def _check_source(path: Path, checkpoint: Checkpoint) -> None:
    """Raise for a checkpoint that is not what its config says, or that holds what changes its weights in unknown ways."""
    modules = {name.removesuffix(".weight") for name in checkpoint.quantized}
    for name in checkpoint.plain:
        parents = accumulate(name.split(".")[:-1], lambda above, part: f"{above}.{part}")
        if name.rpartition(".")[2] not in BESIDE and not modules.isdisjoint(parents):
            raise CheckpointError(f"{path}: {name} lies beside a quantized weight, and what it does to it is not known")
    for finding in (*promised(checkpoint), *(incomplete(checkpoint) if path.is_dir() else ())):
        raise CheckpointError(f"{path}: {finding.name}: {finding.detail}")
    for finding in stored_twice(checkpoint):
        raise CheckpointError(f"{path}: {finding.name}: {finding.what}, {finding.detail}")


def _check_out(path: Path, out: Path, force: bool, written: Collection[str]) -> None:
    """Raise unless `out` may be written, before anything is. `written`: files that are copied there."""
    source, target = path.resolve(), out.resolve()
    if out.name in ("", "..") or target == Path.cwd():
        raise ValueError(f"out={str(out)!r} is the working directory or has no name: expected a directory that is made anew")
    if target == source or target in source.parents or source in target.parents:
        raise ValueError(f"out={str(out)!r} is the source, lies in it or holds it: expected another directory")
    if not _parent(out).is_dir():
        raise ValueError(f"out={str(out)!r}: its directory {str(out.parent)!r} does not exist")
    for left in (_beside(out, "part"), _beside(out, "old")):
        if os.path.lexists(left):
            raise ValueError(_taken(out, left))
    if not out.exists() and not out.is_symlink():
        return
    if not force:
        raise ValueError(f"out={str(out)!r} exists: force=True replaces it")
    refusal = f"out={str(out)!r}: force=True replaces a checkpoint and nothing else, and "
    if out.is_symlink() or not out.is_dir():
        raise ValueError(f"{refusal}this is no directory")
    held = sorted(out.iterdir())
    for file in held:
        if file.is_symlink() or not file.is_file():
            raise ValueError(f"{refusal}{file.name} in it is {'a link' if file.is_symlink() else 'no file'}")
        if file.suffix != ".safetensors" and file.name not in (*_CONFIGS, INDEX, *written):
            raise ValueError(f"{refusal}{file.name} in it is neither weights nor config, nor written anew")
    if held and not ((out / "config.json").is_file() and any(file.suffix == ".safetensors" for file in held)):
        raise ValueError(f"{refusal}this holds not both a config.json and a .safetensors file")
    listed = get(read_json(out / INDEX), "weight_map")
    weights = {WHOLE, *(map(str, listed.values()) if isinstance(listed, dict) else ())}
    for file in held:
        if file.suffix == ".safetensors" and file.name not in weights:
            raise ValueError(f"{refusal}{file.name} in it is neither {WHOLE} nor named by {INDEX}")
    folder = path if path.is_dir() else path.parent
    linked = [each.name for each in folder.iterdir() if target in each.resolve().parents]
    if linked:
        raise ValueError(f"out={str(out)!r} holds what {linked[0]} of the source links to: expected another directory")


def _parent(out: Path) -> Path:
    return out.absolute().parent


def _beside(out: Path, what: str) -> Path:
    """`part`: where a checkpoint is written until it is whole; `old`: where what it replaces is for a moment."""
    return out.with_name(f".{out.name}.{what}")


def _taken(out: Path, left: Path) -> str:
    return (
        f"out={str(out)!r}: another conversion writes there, or one that was killed left {str(left)!r}: "
        "wait for the one, or look at what the other left and remove it"
    )


def _held(folder: Path) -> dict[str, tuple[int, int, int]] | None:
    """By file of a folder what changes when the file does; None where nothing is."""
    if not os.path.lexists(folder):
        return None
    facts = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    return {name: (fact.st_ino, fact.st_size, fact.st_mtime_ns) for name, fact in facts.items()}


@contextmanager
def _new_directory(out: Path, seen: dict | None) -> Iterator[Path]:
    """A directory beside `out` that takes its name at the end, or goes. `seen`: what `out` held, which may be replaced."""
    folder = _beside(out, "part")
    try:
        folder.mkdir()  # by one run alone
    except FileExistsError:
        raise ValueError(_taken(out, folder)) from None
    try:
        yield folder
        _sync(folder)
        _name(folder, out, seen)
    except _Unnamed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    _sync(_parent(out))
    if seen is not None:
        shutil.rmtree(_beside(out, "old"), ignore_errors=True)


class _Unnamed(OSError):
    """A checkpoint is finished and its name cannot be had."""


def _name(folder: Path, out: Path, seen: dict | None) -> None:
    """Give a whole directory the name `out`, in place of what was `seen` there and of nothing else."""
    old = _beside(out, "old")
    try:
        if seen is not None and os.path.lexists(out):
            out.rename(old)  # and looked at under that name, where nobody else adds to it
        if os.path.lexists(out) or os.path.lexists(old) and (old.is_symlink() or _held(old) != seen):
            raise OSError("what is there came or changed during the conversion, and is not replaced")
        folder.rename(out)  # which replaces no file, and no directory that holds anything
    except BaseException as failure:
        if seen is not None and os.path.lexists(old) and not os.path.lexists(out):
            with suppress(OSError):
                old.rename(out)
        if isinstance(failure, OSError):
            kept = f", and what it was to replace {str(old)!r}" if os.path.lexists(old) else ""
            reason = f"out={str(out)!r}: {failure.strerror or failure}"
            raise _Unnamed(f"{reason}; the finished checkpoint is {str(folder)!r}{kept}") from None
        raise


def _sync(folder: Path) -> None:
    """See the names in a directory to the disk."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_configs(plan: Plan, source: Path, folder: Path, outputs: Sequence[Output]) -> None:
    """config.json, and what a producer writes beside it."""
    config, beside = plan.checkpoint.config, read_json(source / HF_CONFIG)
    if not (plan.is_same and _names_dialect(config, beside, plan.scheme.dialect)):
        config = without(config, "quantization_config")
        modules = list(dict.fromkeys(filter(None, map(_module_in_floats, outputs))))
        if not any("lm_head" in output.name.split(".") for output in outputs):
            modules.append("lm_head")  # tied to the embeddings, and a module all the same
        quantization, beside = quantization_configs(plan.scheme, modules)
        if quantization is not None:
            config["quantization_config"] = quantization
        elif plan.scheme.format in FLOATS:
            config = _with_dtype(config, str(FLOATS[plan.scheme.format]).removeprefix("torch."))
    if config:
        write_json(folder / "config.json", config)
    if beside:
        write_json(folder / HF_CONFIG, beside)


def _names_dialect(config: dict, beside: dict, dialect: str) -> bool:
    """Whether the configs say by themselves that a checkpoint is in `dialect`."""
    with suppress(ValueError):
        return find_dialect(config, beside, None, has_codes=False)[0] == dialect
    return False


def _module_in_floats(output: Output) -> str | None:
    """The module of what stays floats and might be taken for quantized: a matrix, or a stack of matrices."""
    module, rank = output.name.removesuffix(".weight"), len(output.shape)
    if output.dtype not in ("F32", "F16", "BF16", "F64") or rank < 2:
        return None
    if STACK.fullmatch(output.name):
        return module.rpartition(".")[0]
    return module if (module != output.name and rank == 2) or LINEAR.fullmatch(module) else None


def _with_dtype(config: Any, dtype: str) -> Any:
    """A config that says `dtype` wherever it, or a part of it, said one."""
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in _DTYPE_KEYS and not isinstance(value, dict) else _with_dtype(value, dtype)
        for key, value in config.items()
    }


def _check_written(folder: Path) -> None:
    """Raise unless headers and configs, which stand before the first weight, are those of a checkpoint as it is read."""
    for finding in promised(load_checkpoint(folder)):
        raise CheckpointError(f"what would be written contradicts itself: {finding.name}: {finding.detail}")


def _others(source: Path) -> list[Path]:
    """Tokenizer, generation config and what else stands beside weights and goes along. Raises for links that lead away."""
    found, home = [], source.resolve()
    for path in sorted(source.iterdir()):
        if path.suffix not in _COPIED and not path.name.startswith("LICENSE"):
            continue
        if path.name in _CONFIGS or path.name.endswith(".index.json"):
            continue
        target = path.resolve()
        if path.is_symlink() and not path.exists():
            raise ValueError(f"{path} links to {target}, which is not there: it cannot be copied; put the file itself there")
        if not path.is_file():
            continue
        cached = home.parent.name == "snapshots" and target.parent == home.parent.parent / "blobs"
        if target.parent != home and not cached:
            raise ValueError(f"{path} links to {target}, outside of its folder: it is not copied; put the file itself there")
        found.append(path)
    return found


def _left(source: Path, copied: Sequence[Path]) -> Iterator[str]:
    """What to say of what stands beside the weights and does not go along; of hidden files nothing."""
    others = {path for path in source.iterdir() if not path.name.startswith(".") and path.suffix != ".safetensors"}
    others = {path.name for path in others - set(copied) if not path.name.endswith(".index.json")} - {*_CONFIGS}
    said = sorted(others)
    if said:
        more = f" and {len(said) - _SAID} more" if len(said) > _SAID else ""
        yield f"not copied: {', '.join(said[:_SAID])}{more}"
