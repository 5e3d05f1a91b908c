"""The files of a checkpoint: configs, the index of shards, and tensors that are read, or written, one at a time.

Nothing here trusts a file: what contradicts itself raises a `CheckpointError` of one line.
"""

import copy
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO

import torch

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}
_LENGTH = 8  # bytes that hold the length of a header, and its alignment
_LANGUAGE = ("text_config", "language_config", "llm_config", "thinker_config")  # a part that is a language model
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class CheckpointError(ValueError):
    """A checkpoint whose files contradict themselves or their config; the message names the file or the tensor."""


class UnreadableError(CheckpointError):
    """A file of a checkpoint that is not of its kind: broken, or cut off."""


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor: its dtype in safetensors' own words, its shape, the shard that holds it, and between
    which bytes of that."""

    dtype: str
    shape: tuple[int, ...]
    shard: Path
    handle: Any
    place: tuple[int, int]


class Shards:
    """The tensors of one or more safetensors files; every file is opened once and no tensor read before `read`.

    `entries`: by name, in the order of the files. `metadata`: the strings of all headers, of two shards that differ the
    first's, and `clashes` in words by key where they do. `mapped`: whether a tensor that is read is its file's memory, which
    counts as the process's own from then on, or a copy.
    """

    mapped = True

    def __init__(self, paths: Sequence[Path]):
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self.clashes: dict[str, str] = {}
        described: dict[str, str] = {}
        for path in paths:
            handle = _open(path)
            with path.open("rb") as file:
                header, start = _header(file), file.tell()
            for key, text in (handle.metadata() or {}).items():
                if differing := _difference(self.metadata.setdefault(key, text), text):
                    self.clashes[key] = f"the headers of {described[key]} and {path.name} say {differing}: expected the same"
                described.setdefault(key, path.name)
            for name in handle.keys():
                if name in self.entries:
                    both = f"{self.entries[name].shard.name} and {path.name}"
                    raise CheckpointError(f"{name} is in {both}: expected one shard to hold it")
                part = handle.get_slice(name)
                place = tuple(start + offset for offset in header[name]["data_offsets"])
                self.entries[name] = Entry(part.get_dtype(), tuple(part.get_shape()), path, handle, place)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        entry = self.entries[name]
        try:
            return entry.handle.get_tensor(name) if self.mapped else self._copy(entry)
        except Exception as failure:  # safetensors and torch raise many kinds
            raise CheckpointError(f"{entry.shard.name}: {name} cannot be read: {_one_line(failure)}") from None

    def copying(self) -> "Shards":
        """The same tensors, each read into memory of its own: what is let go of after it was read takes no memory."""
        shards = copy.copy(self)
        shards.mapped, shards._files = False, {}
        return shards

    def _copy(self, entry: Entry) -> torch.Tensor:
        if entry.shard not in self._files:
            self._files[entry.shard] = entry.shard.open("rb", buffering=0)
        file, (begin, end) = self._files[entry.shard], entry.place
        data = torch.empty(end - begin, dtype=torch.uint8)
        view, done = memoryview(data.numpy()), 0
        file.seek(begin)
        while done < len(view):
            read = file.readinto(view[done:])
            if not read:
                raise EOFError("the file ends before its tensors do")
            done += read
        return data.view(DTYPES[entry.dtype]).reshape(entry.shape)


@dataclass(frozen=True)
class Output:
    """A tensor that will be written: its name, its dtype in safetensors' own words, its shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def like(cls, name: str, tensor: torch.Tensor) -> "Output":
        """What writing `tensor` as `name` makes."""
        return cls(name, _NAMES[tensor.dtype], tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """Size in the file."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


class ShardWriter:
    """Writes tensors, one at a time and in any order, into safetensors files whose headers are known beforehand.

    `outputs` fill shards of at most `shard_size` bytes (a larger tensor has one for itself) in their order; within a shard
    wide dtypes come first, which aligns them. Several shards get an index. `files`: names of the shards. `metadata`: what
    the header says beside `format` of a shard that holds given outputs.
    """

    def __init__(
        self,
        folder: Path,
        outputs: Iterable[Output],
        shard_size: int,
        metadata: Callable[[Sequence[Output]], dict[str, str]] = lambda outputs: {},
    ):
        self._folder, self._open, self._places, self._metadata = folder, {}, {}, metadata
        self._left: dict[str, int] = {}
        shards, size = [[]], 0
        for output in outputs:
            if shards[-1] and size + output.bytes > shard_size:
                shards.append([])
                size = 0
            shards[-1].append(output)
            size += output.bytes
        count = len(shards)
        self.files = [WHOLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
        for file, shard in zip(self.files, shards):
            self._begin(file, sorted(shard, key=lambda output: (-DTYPES[output.dtype].itemsize, output.name)))
        if count > 1:
            listed = {output.name: file for file, shard in zip(self.files, shards) for output in shard}
            total = sum(output.bytes for shard in shards for output in shard)
            write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))})

    def _begin(self, file: str, outputs: list[Output]) -> None:
        header, offset = {"__metadata__": {"format": "pt"} | self._metadata(outputs)}, 0
        for output in outputs:
            end = offset + output.bytes
            header[output.name] = {"dtype": output.dtype, "shape": output.shape, "data_offsets": (offset, end)}
            offset = end
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % _LENGTH)
        for output in outputs:
            self._places[output.name] = file, _LENGTH + len(encoded) + header[output.name]["data_offsets"][0], output
        with (self._folder / file).open("wb") as handle:
            handle.write(len(encoded).to_bytes(_LENGTH, "little") + encoded)
            handle.truncate(_LENGTH + len(encoded) + offset)
            if not outputs:
                os.fsync(handle.fileno())
        self._left[file] = len(outputs)

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Write one tensor to its place; a shard reaches the disk with its last one."""
        file, place, output = self._places.pop(name)
        if Output.like(name, tensor) != output:
            raise AssertionError(f"{Output.like(name, tensor)} was announced as {output}")
        handle: BinaryIO = self._open.get(file) or self._open.setdefault(
            file, (self._folder / file).open("r+b", buffering=0)
        )
        view, done = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()), 0
        handle.seek(place)
        while done < len(view):
            done += handle.write(view[done:])
        self._left[file] -= 1
        if not self._left[file]:
            os.fsync(handle.fileno())
            self._open.pop(file).close()

    def close(self) -> None:
        """Close what is still open."""
        while self._open:
            self._open.popitem()[1].close()


def write_json(path: Path, value: Any) -> None:
    """Write an object as JSON, and see it to the disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def open_shards(path: Path) -> tuple[Shards, tuple[str, ...]]:
    """The shards at `path`, and in words what lies there and is not read.

    An index counts before a whole `model.safetensors`: its files must be there and hold what it says, neither less nor more.
    """
    if path.is_file():
        return Shards([path]), ()
    if not path.is_dir():
        raise ValueError(f"{path}: expected a checkpoint directory or a .safetensors file")
    whole = (path / WHOLE).is_file()
    if not whole and not (path / INDEX).is_file():
        raise ValueError(f"{path}: holds neither {INDEX} nor {WHOLE}")
    if not (path / INDEX).is_file():
        return Shards([path / WHOLE]), ()
    listed = read_json(path / INDEX).get("weight_map")
    if not listed or not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        given = "an empty one" if listed == {} else "none" if listed is None else type(listed).__name__
        raise CheckpointError(f"{INDEX}: expected a weight_map from names of tensors to names of files, found {given}")
    files = list(dict.fromkeys(listed.values()))
    for file in files:
        if PureWindowsPath(file).name != file or "\0" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} names {file!r}: expected a .safetensors file of this directory")
    absent = [file for file in files if not (path / file).is_file()]
    if absent:
        held = [name for name, file in listed.items() if file == absent[0]]
        others = f" ({len(absent)} of {len(files)} files are absent)" if len(absent) > 1 else ""
        alone = f": give {path / WHOLE} to read that file alone" if whole else ""
        count = f"{len(held)} of {len(listed)} tensors are" if len(held) > 1 else f"1 of {len(listed)} tensors is"
        raise CheckpointError(f"{INDEX} says that {count} in {absent[0]} ({held[0]}), which does not exist{others}{alone}")
    shards = Shards([path / file for file in files])
    for name, file in listed.items():
        if name not in shards.entries or shards.entries[name].shard.name != file:
            raise CheckpointError(f"{INDEX} says that {name} is in {file}, which does not hold it")
    for name, entry in shards.entries.items():
        if name not in listed:
            raise CheckpointError(f"{entry.shard.name} holds {name}, which {INDEX} does not list")
    return shards, (f"{WHOLE} is not read: {INDEX} counts, and does not name it",) if whole and WHOLE not in files else ()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once(path.name))
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as failure:
        raise UnreadableError(f"{path.name}: no JSON: {_one_line(failure)}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name}: expected a JSON object, found {type(found).__name__}")
    return found


def get(config: Any, *keys: str) -> Any:
    """The value at nested `keys`; None where something on the way is missing or is no object."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of the language model: the whole, overridden by the part that a model of several kinds nests."""
    says, inner = config, config
    while inner := next((part for key in _LANGUAGE if isinstance(part := inner.get(key), dict)), None):
        says = says | inner
    return says


def without(config: Any, key: str) -> Any:
    """A config without `key`, in it and in its parts at any depth."""
    if not isinstance(config, dict):
        return config
    return {name: without(value, key) for name, value in config.items() if name != key}


def _header(file: BinaryIO) -> dict[str, Any]:
    """The header of a safetensors file that `_open` found to be one. Raises for a name that is there twice."""
    text = file.read(int.from_bytes(file.read(_LENGTH), "little"))
    return json.loads(text, object_pairs_hook=_once(f"{Path(file.name).name}: the header"))


def _difference(one: str, other: str) -> str | None:
    """In words, the first place where two strings of headers say different things; None if they are the same, or as JSON."""
    if one == other:
        return None
    try:
        first, second = json.loads(one), json.loads(other)
    except (ValueError, RecursionError):
        first, second = one, other
    key = ""
    while isinstance(first, dict) and isinstance(second, dict):
        differing = next((name for name in first | second if first.get(name) != second.get(name)), None)
        if differing is None:
            return None
        key, first, second = f"{key}.{differing}", first.get(differing), second.get(differing)
    return f"{key[1:]} {first!r:.80} and {second!r:.80}".strip()


def _once(where: str) -> Callable[[list[tuple[str, Any]]], dict[str, Any]]:
    """What makes an object of JSON of its pairs, and raises for a key that it has twice: readers keep one or the other."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
            raise CheckpointError(f"{where} has {key} twice: expected once")
        return found

    return once


def _open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'mxref[models]'") from None
    try:
        return safe_open(str(path), framework="pt")
    except Exception as failure:  # safetensors has an error of its own, which derives from Exception alone
        raise UnreadableError(f"{path.name}: no safetensors file: {_one_line(failure)}") from None


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split())
