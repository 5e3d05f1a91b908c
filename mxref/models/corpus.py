"""What a model is evaluated on: windows of tokens, from a text or given as ids."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

DRAWN = "drawn ids"  # what windows are called that hold no text


@dataclass(frozen=True)
class Corpus:
    """Windows of tokens [windows, window] and, where they come from a text, the bytes and words of what each scores."""

    name: str
    windows: Tensor
    scored_bytes: Tensor | None = None
    scored_words: Tensor | None = None

    @property
    def scored_tokens(self) -> Tensor:
        """Scored tokens of each window, float64."""
        count, window = self.windows.shape
        return torch.full((count,), window - 1, dtype=torch.float64)


def _check_window(model: nn.Module, window: int) -> None:
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    if not 2 <= window <= longest:
        raise ValueError(f"window={window}: expected 2 to {longest} tokens")


def read_ids(ids: Tensor | Sequence | Path, model: nn.Module, window: int, tokens: int) -> Corpus:
    """Given token ids: [windows, window] as they are, or one sequence, whose first `tokens` are cut into windows.

    A file is a JSON list, or safetensors with `input_ids`.
    """
    name = "ids"
    if isinstance(ids, Path):
        name = ids.name
        ids = _read_file(ids)
    try:
        ids = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise ValueError(f"ids: {str(failure).splitlines()[0]} (expected integers [windows, window], or a list)") from None
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or ids.ndim not in (1, 2):
        raise ValueError(
            f"ids={name!r}: {ids.dtype} {list(ids.shape)}; expected integers [windows, window], or one sequence"
        )
    given, ids = f"{ids.numel()} ids", ids.long().cpu()
    _check_window(model, window if ids.ndim == 1 else ids.shape[1])
    if ids.ndim == 1:
        count = max(min(len(ids), tokens), 0) // window
        ids = ids[: count * window].view(count, window)
    size = model.config.get_text_config().vocab_size
    if not len(ids):
        raise ValueError(f"ids={name!r}: {given} and tokens={tokens}; expected at least one window of {window}")
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise ValueError(f"ids={name!r} holds {int(outside[0])}: expected ids from 0 to {size - 1}")
    return Corpus(name, ids)


def _read_file(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)["input_ids"]
        return json.loads(path.read_text(encoding="utf-8"))
    except Exception as failure:  # safetensors, json and the system have errors of their own
        reason = " ".join(str(failure).split())
        raise ValueError(f"ids={str(path)!r}: {reason} (expected a JSON list, or safetensors with input_ids)") from None


def drawn_ids(model: nn.Module, window: int, tokens: int) -> Corpus:
    """Ids drawn uniformly from the vocabulary, the same every time: enough to compare models with each other."""
    _check_window(model, window)
    if tokens < window:
        raise ValueError(f"tokens={tokens}: expected at least one window of {window}")
    size = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    return Corpus(DRAWN, torch.randint(size, (tokens // window, window), generator=generator))


def read_text(text: str | Path | None, tokenizer: Any, model: nn.Module, window: int, tokens: int) -> Corpus:
    """The first `tokens` tokens of a text, or of the text in a file, in windows; the text that comes with mxref for None."""
    _check_window(model, window)
    name = "text"
    if text is None:
        from mxref.models.embedded import TEXT_FILE

        text = Path(TEXT_FILE)
    if isinstance(text, Path):
        name = text.name
        try:
            text = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as failure:
            raise ValueError(f"text={str(name)!r}: cannot be read as UTF-8 text ({failure})") from failure
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"tokenizer={type(tokenizer).__name__}: expected a fast tokenizer, which tells each token's place")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = encoded["input_ids"]
    count = min(len(ids), tokens) // window
    if count < 1:
        raise ValueError(
            f"text={name!r}: {min(len(ids), tokens):,} tokens are too few; expected at least one window of {window}"
        )
    largest, size = max(ids[: count * window]), model.config.get_text_config().vocab_size
    if largest >= size:
        raise ValueError(f"tokenizer: it gives the id {largest}, the model has {size}; expected the model's own tokenizer")
    ends = [end for _, end in encoded["offset_mapping"]]
    spans = [(ends[first], ends[first + window - 1]) for first in range(0, count * window, window)]
    return Corpus(
        name=name,
        windows=torch.tensor(ids[: count * window]).view(count, window),
        scored_bytes=torch.tensor([len(text[start:end].encode()) for start, end in spans], dtype=torch.float64),
        scored_words=torch.tensor([_words_beginning(text, start, end) for start, end in spans], dtype=torch.float64),
    )


def _words_beginning(text: str, start: int, end: int) -> int:
    """Words (runs of non-space) whose first character lies in `text[start:end]`."""
    continues = start > 0 and not text[start - 1].isspace() and not text[start : start + 1].isspace()
    return len(text[start:end].split()) - (continues and start < end)
