"""Models and tokenizers to evaluate, as objects or by path: plain ones by transformers, quantized ones by `load`."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxref.checkpoints import Checkpoint, CheckpointError, load_checkpoint
from mxref.checkpoints.files import DTYPES, INDEX, WHOLE
from mxref.models.layers import StoredScheme, stored_scheme
from mxref.models.load import check_runs, config_dtype, load, unannounced

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class Source:
    """A model with its name in a report, what is quantized in it (None: nothing), the path that it was read from and that
    of its tokenizer, where there are such, and what was left out of it."""

    name: str
    model: nn.Module
    stored: StoredScheme | None = None
    path: str | None = None
    tokenizer: str | None = None
    ignore: Sequence[str] = ()

    @property
    def vocabulary(self) -> int:
        """Number of tokens that the model knows."""
        return self.model.config.get_text_config().vocab_size

    def decoded(self) -> nn.Module:
        """The model with its weights decoded, which can be quantized anew."""
        if self.stored is None:
            return self.model
        if self.path is None:
            raise ValueError("model: quantized already; with formats expected the path of its checkpoint")
        return load(self.path, device=next(self.model.parameters()).device, dequantized=True, ignore=self.ignore)


def open_source(argument: str, model: Any, device: Any, semantics: str, scales: str, ignore: Sequence[str] = ()) -> Source:
    """The model that is given, or that a path holds, less `ignore`; None: the one that comes with mxref."""
    try:
        import transformers
    except ImportError as missing:
        raise ImportError("evaluating models needs transformers: pip install 'mxref[models]'") from missing
    name = str(model)
    if model is None:
        from mxref.models.embedded import MODEL_DIRECTORY

        model, name = MODEL_DIRECTORY, "embedded"
    if isinstance(model, nn.Module):
        _check_dtypes(f"{argument}: its parameters are", model)
        return Source(model.name_or_path or type(model).__name__, _on(model, device), stored_scheme(model))
    path = folder = os.fspath(model)
    is_file = path.endswith(".safetensors") and Path(path).is_file()  # whose config.json stands beside it
    if is_file:
        folder = str(Path(path).parent)
    with _explained(argument, folder, "a directory with a transformers causal language model"):
        config = transformers.AutoConfig.from_pretrained(folder)
    config_dtype(f"{argument}={path!r}", config)
    with _explained(argument, folder, "a directory with a transformers causal language model"):
        by_load = (  # what transformers reads wrongly or not at all, or a file alone
            is_file
            or ignore
            or getattr(config.get_text_config(), "quantization_config", None)
            or getattr(config, "quantization_config", None)
            or (Path(path) / "hf_quant_config.json").is_file()
            or (stored := _opened(path)) is not None
            and stored.dialect != "plain"  # its config says so elsewhere
        )
        if not by_load:
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
            if loaded["missing_keys"]:
                raise ValueError(f"it lacks {len(loaded['missing_keys'])} weights, {min(loaded['missing_keys'])} among them")
            left = loaded["unexpected_keys"]
            if left := left if stored is None else unannounced(path, stored, left):
                raise ValueError(f"{len(left)} tensors have no place in {type(model).__name__}, {min(left)} among them")
            if stored is not None:
                _check_floats(stored, model)
            _check_dtypes("its weights are", model)
        elif not Path(folder).is_dir():
            raise ValueError("it is quantized; such a model is read from a directory")
    has_tokenizer = not Path(folder).is_dir() or any((Path(folder) / file).exists() for file in _TOKENIZER_FILES)
    tokenizer = folder if has_tokenizer else None
    if not by_load:
        return Source(name, _on(model, device), None, path, tokenizer)
    if unread := load_checkpoint(path, weights_only=True).declared.unread:
        alone = "what `mxref convert --to plain` writes of it has the weights alone"
        raise CheckpointError(f"{argument}={path!r}: the config says {unread[0]}; {alone}")
    model = load(path, device=device or "cpu", semantics=semantics, scales=scales, ignore=ignore)
    return Source(name, model, stored_scheme(model), path, tokenizer, ignore)


def _opened(path: str) -> Checkpoint | None:
    """The checkpoint in a directory of safetensors; None of anything else."""
    is_safetensors = any((Path(path) / name).is_file() for name in (WHOLE, INDEX))
    return load_checkpoint(path, weights_only=True) if is_safetensors else None


def _check_floats(stored: Checkpoint, model: nn.Module) -> None:
    """Raise ValueError for codes that transformers took for values: tensors that are no floats of 16 bits or more."""
    passed_over, slots = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (), model.state_dict()
    for name, entry in stored.shards.entries.items():
        dtype = DTYPES[entry.dtype]
        is_value = dtype.is_floating_point and dtype.itemsize > 1
        is_count = name in slots and not slots[name].is_floating_point()
        if not is_value and not is_count and not any(re.search(pattern, name) for pattern in passed_over):
            raise ValueError(f"{name} is {entry.dtype}, and nothing says how it is quantized: expected F16, BF16 or F32")


def _check_dtypes(what: str, model: nn.Module) -> None:
    for dtype in dict.fromkeys(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()):
        check_runs(what, dtype)


def _on(model: nn.Module, device: str | torch.device | None) -> nn.Module:
    if device is None:
        return model
    try:
        return model.to(device)
    except (RuntimeError, AssertionError, NotImplementedError) as failure:
        raise ValueError(f"device={str(device)!r}: {str(failure).splitlines()[0]}") from failure


def open_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer that is given, or that a path holds."""
    import transformers

    if not isinstance(tokenizer, (str, os.PathLike)):
        return tokenizer
    path = os.fspath(tokenizer)
    with _explained("tokenizer", path, "a directory with a transformers tokenizer (tokenizer.json)"):
        return transformers.AutoTokenizer.from_pretrained(path)


@contextlib.contextmanager
def _explained(argument: str, path: str, expected: str) -> Iterator[None]:
    """Turn what transformers raises for `path` into one line that names the argument."""
    if not path:
        raise ValueError(f"{argument}='': expected {expected}")
    is_there, parent = Path(path).is_dir(), Path(path).parent
    looks_local = path.startswith((".", "~", os.sep)) or path.count("/") != 1 or parent.is_dir()
    if looks_local and not is_there:
        raise ValueError(f"{argument}={path!r}: no such directory; expected {expected}")
    try:
        yield
    except Exception as failure:  # whatever a broken file makes transformers or safetensors raise
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        tried = "" if is_there else "no such directory; read as a name on the Hugging Face hub instead, it fails too: "
        raise ValueError(f"{argument}={path!r}: {tried}{reason} (expected {expected})") from failure
