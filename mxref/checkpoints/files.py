"""The files of a checkpoint: configs, the index of shards, and tensors that are read when asked for.

Nothing here trusts a file: what contradicts itself raises a `CheckpointError` of one line.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import torch

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class CheckpointError(ValueError):
    """A checkpoint whose files contradict themselves or their config; the message names the file or the tensor."""


@dataclass(frozen=True)
class Entry:
    """What a header says of a tensor: its dtype in safetensors' own words, its shape, and the shard that holds it."""

    dtype: str
    shape: tuple[int, ...]
    shard: Path
    handle: Any


class Shards:
    """The tensors of one or more safetensors files; every file is opened once and no tensor read before `read`.

    `entries`: by name, in the order of the files. `metadata`: the strings of all headers.
    """

    def __init__(self, paths: Sequence[Path]):
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        for path in paths:
            handle = _open(path)
            self.metadata |= handle.metadata() or {}
            for name in handle.keys():
                if name in self.entries:
                    both = f"{self.entries[name].shard.name} and {path.name}"
                    raise CheckpointError(f"{name} is in {both}: expected one shard to hold it")
                part = handle.get_slice(name)
                self.entries[name] = Entry(part.get_dtype(), tuple(part.get_shape()), path, handle)

    def read(self, name: str) -> torch.Tensor:
        """One tensor, on the CPU."""
        entry = self.entries[name]
        try:
            return entry.handle.get_tensor(name)
        except Exception as failure:  # safetensors and torch raise many kinds
            raise CheckpointError(f"{entry.shard.name}: {name} cannot be read: {_one_line(failure)}") from None


def open_shards(path: Path) -> tuple[Shards, dict[str, str]]:
    """The shards at `path`, and where its index disagrees with a whole `model.safetensors`, by tensor.

    An index whose other files are all absent is stale, and `model.safetensors` what there is, as in transformers.
    """
    if path.is_file():
        return Shards([path]), {}
    if not path.is_dir():
        raise ValueError(f"{path}: expected a checkpoint directory or a .safetensors file")
    whole = (path / WHOLE).is_file()
    if not whole and not (path / INDEX).is_file():
        raise ValueError(f"{path}: holds neither {INDEX} nor {WHOLE}")
    if not (path / INDEX).is_file():
        return Shards([path / WHOLE]), {}
    listed = read_json(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{INDEX}: expected a weight_map from names of tensors to names of files")
    files = list(dict.fromkeys(listed.values()))
    for file in files:
        if PureWindowsPath(file).name != file or "\0" in file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{INDEX} names {file!r}: expected a .safetensors file of this directory")
    missing = [file for file in files if not (path / file).is_file()]
    stale = whole and set(files) <= {WHOLE, *missing}
    if missing and not stale:
        raise CheckpointError(f"{INDEX} names {missing[0]}, which does not exist")
    shards = Shards([path / WHOLE] if stale else [path / file for file in files])
    notes = {name: f"{INDEX} does not list it" for name in shards.entries if name not in listed}
    for name, file in listed.items():
        if name not in shards.entries or shards.entries[name].shard.name != file:
            if file not in missing:
                raise CheckpointError(f"{INDEX} says that {name} is in {file}, which does not hold it")
            notes[name] = f"{INDEX} says that it is in {file}, which does not exist"
    return shards, notes


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as failure:
        raise CheckpointError(f"{path.name}: no JSON: {_one_line(failure)}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.name}: expected a JSON object, found {type(found).__name__}")
    return found


def get(config: Any, *keys: str) -> Any:
    """The value at nested `keys`; None where something on the way is missing or is no object."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def as_object(found: Any) -> dict:
    """`found` if it is a JSON object, else an empty one."""
    return found if isinstance(found, dict) else {}


def _open(path: Path) -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ImportError("checkpoints need safetensors: pip install 'mxref[models]'") from None
    try:
        return safe_open(str(path), framework="pt")
    except Exception as failure:  # safetensors has an error of its own, which derives from Exception alone
        raise CheckpointError(f"{path.name}: no safetensors file: {_one_line(failure)}") from None


def _one_line(failure: Exception) -> str:
    return " ".join(str(failure).split())
