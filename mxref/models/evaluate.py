"""What a block format costs a language model: bits per byte and perplexity on held-out text, against the model as stored."""

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import mxref
from mxref.formats import BLOCK_FORMATS, BlockFormat, block_format
from mxref.models.report import EvaluationReport, EvaluationRow
from mxref.models.swap import QuantizedWeights, experts_implementation, find_experts, quantize_weights, quantized
from mxref.recipes import Recipe, resolve_recipe

WINDOW = 128  # tokens
TOKENS = 24_576  # of the text, from its start
LOGITS_AT_ONCE = 1 << 24  # float32 logits in memory: 64 MiB
WINDOWS_AT_ONCE = 16
SAME = "same"  # activations in the weights' own format
NONE = "none"  # activations left as they are


@dataclass(frozen=True)
class _Text:
    """Windows of tokens [windows, window] and, for each, the bytes and words of its scored text."""

    name: str
    windows: Tensor
    scored_bytes: Tensor
    scored_words: Tensor


def evaluate(
    model: nn.Module | str | os.PathLike | None = None,
    tokenizer: Any = None,
    *,
    formats: Sequence[str | BlockFormat] | None = None,
    activations: Sequence[str | BlockFormat] = (NONE, SAME),
    recipe: str | Recipe | None = None,
    act_recipe: str | Recipe | None = None,
    layers: str | None = None,
    semantics: str = "blockwise",
    text: str | Path | None = None,
    window: int = WINDOW,
    tokens: int = TOKENS,
    device: str | torch.device | None = None,
    seed: int | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> EvaluationReport:
    """Evaluate a causal language model unquantized and with each of `formats`, on the same text.

    `model`: a transformers model, or the path of one (None: the small model that comes with mxref); `tokenizer`: its
    tokenizer, or the path of one (None: the model's). `formats`: block formats of the weights (None: all that `recipe`
    fits). `activations`: for each format one row per entry, `"none"` (weights only), `"same"` (the weights' format) or
    a block format. `recipe` is for weights and activations, `act_recipe` for activations alone; where a recipe does
    not fit activations (another format's, or one that shares scales between tokens), they take their format's default.
    `layers`: `"experts"`, `"all"`, or None (experts if there are any, else linears). `semantics`: `"blockwise"` or
    `"dequantized"`. `text`: a Path of a UTF-8 file, or the text itself (None: the held-out text that comes with mxref).
    The first `tokens` tokens, without special tokens, are cut into non-overlapping windows of `window`; every token but
    a window's first is scored. `mxref.models.CONVENTIONS` says how each number is counted. `seed`: of stochastic
    recipes. `on_progress(row label, windows done, windows)` is called as work proceeds.

    The model keeps its dtype, and is left as it was. KeyboardInterrupt ends the evaluation early and returns the rows
    that have finished, with `complete=False`; before the first row it is raised. Raises ValueError for unknown names, a
    model with nothing to quantize, or text that has no whole window; ImportError names the extra that is missing.
    """
    chosen = _choose_formats(formats, recipe)
    for choice in activations:
        if choice not in (NONE, SAME):
            block_format(choice)
    if not activations:
        raise ValueError(f"activations={activations!r}: expected at least one of {NONE!r}, {SAME!r} or a block format")
    if semantics not in ("blockwise", "dequantized"):
        raise ValueError(f"semantics={semantics!r}: expected 'blockwise' or 'dequantized'")
    model, tokenizer, name = _load(model, tokenizer, device)
    device = next(model.parameters()).device
    corpus = _read_text(text, tokenizer, model, window, tokens)
    experts = bool(find_experts(model))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    dtype_name = _dtype_name(model)
    rows: list[EvaluationRow] = []
    quantized_weights = 0
    complete = True

    def losses(label: str) -> Tensor:
        def done(windows: int) -> None:
            if on_progress is not None:
                on_progress(label, windows, len(corpus.windows))

        return _window_losses(model, corpus.windows.to(device), done)

    with _evaluating(model):
        try:
            start = time.perf_counter()
            with experts_implementation(model, "eager"):
                baseline = losses(dtype_name)
            bits_stored = 8.0 * next(model.parameters()).element_size()
            rows.append(
                EvaluationRow(
                    weights=dtype_name,
                    activations=dtype_name,
                    **_scores(baseline, corpus, None),
                    bits_per_weight=bits_stored,
                    snr_db=None,
                    recipe=None,
                    act_recipe=None,
                    seconds=time.perf_counter() - start,
                )
            )
            for block in chosen:
                start = time.perf_counter()
                weights = quantize_weights(model, block, recipe=recipe, layers=layers, seed=seed)
                quantized_weights = weights.elements
                for choice in activations:
                    act_format = _act_format(choice, block)
                    act = None if act_format is None else _act_recipe(act_format, recipe, act_recipe)
                    act_name = dtype_name if act_format is None else act_format.name
                    with quantized(model, weights, act_format=act_format, act_recipe=act, semantics=semantics, seed=seed):
                        found = losses(f"{block.name} / {act_name}")
                    rows.append(_quantized_row(weights, act_name, act, _scores(found, corpus, baseline), start))
                    start = time.perf_counter()
        except KeyboardInterrupt:
            if not rows:
                raise
            complete = False

    return EvaluationReport(
        model=name,
        architecture=type(model).__name__,
        text=corpus.name,
        layers=layers or ("experts" if experts else "all"),
        quantized_weights=quantized_weights,
        parameters=parameters,
        semantics=semantics,
        window=window,
        windows=len(corpus.windows),
        scored_tokens=len(corpus.windows) * (window - 1),
        scored_bytes=int(corpus.scored_bytes.sum()),
        scored_words=int(corpus.scored_words.sum()),
        rows=tuple(rows),
        complete=complete,
        machine=_machine(device),
        versions=_versions(),
    )


def _choose_formats(formats: Sequence[str | BlockFormat] | None, recipe: str | Recipe | None) -> list[BlockFormat]:
    if formats is not None:
        chosen = [block_format(name) for name in formats]
        if not chosen:
            raise ValueError(f"formats={formats!r}: expected at least one of {', '.join(BLOCK_FORMATS)}")
        for block in chosen:
            resolve_recipe(recipe, block)
        return chosen
    fitting = [block for block in BLOCK_FORMATS.values() if _fits(recipe, block)]
    if not fitting:
        resolve_recipe(recipe, next(iter(BLOCK_FORMATS.values())))  # raises, saying why
    return fitting


def _fits(recipe: str | Recipe | None, block: BlockFormat) -> bool:
    try:
        resolve_recipe(recipe, block)
    except ValueError:
        return False
    return True


def _act_format(choice: str | BlockFormat, weights: BlockFormat) -> BlockFormat | None:
    if choice == NONE:
        return None
    return weights if choice == SAME else block_format(choice)


def _act_recipe(act_format: BlockFormat, recipe: str | Recipe | None, act_recipe: str | Recipe | None) -> Recipe:
    if act_recipe is not None:
        return resolve_recipe(act_recipe, act_format)
    if _fits(recipe, act_format) and resolve_recipe(recipe, act_format).block_rows == 1:
        return resolve_recipe(recipe, act_format)
    return resolve_recipe(None, act_format)


def _quantized_row(
    weights: QuantizedWeights, act_name: str, act_recipe: Recipe | None, scores: dict[str, Any], start: float
) -> EvaluationRow:
    return EvaluationRow(
        weights=weights.format.name,
        activations=act_name,
        **scores,
        bits_per_weight=weights.bits_per_weight,
        snr_db=weights.snr_db,
        recipe=weights.recipe.name,
        act_recipe=None if act_recipe is None else act_recipe.name,
        seconds=time.perf_counter() - start,
    )


def _load(model: Any, tokenizer: Any, device: Any) -> tuple[nn.Module, Any, str]:
    """The model and tokenizer that were given or that the paths hold, and the model's name in the report."""
    try:
        import transformers
    except ImportError as missing:
        raise ImportError("evaluating models needs transformers: pip install 'mxref[models]'") from missing
    name = str(model)
    if model is None:
        from mxref.models.embedded import MODEL_DIRECTORY

        model, name = MODEL_DIRECTORY, "embedded"
    if isinstance(model, nn.Module):
        name = model.name_or_path or type(model).__name__
        if tokenizer is None:
            raise ValueError("tokenizer=None: expected the model's tokenizer where the model is given as an object")
    else:
        path = os.fspath(model)
        tokenizer = path if tokenizer is None else tokenizer
        with _explained("model", path, "a directory with a transformers causal language model"):
            config = transformers.AutoConfig.from_pretrained(path)
            if getattr(config, "quantization_config", None) is not None:
                raise ValueError("it is quantized already; evaluation quantizes an unquantized model")
            model, loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
            if loaded["missing_keys"]:
                raise ValueError(f"it lacks {len(loaded['missing_keys'])} weights, {min(loaded['missing_keys'])} among them")
    if isinstance(tokenizer, (str, os.PathLike)):
        path = os.fspath(tokenizer)
        with _explained("tokenizer", path, "a directory with a transformers tokenizer (tokenizer.json)"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if device is not None:
        try:
            model = model.to(device)
        except (RuntimeError, AssertionError, NotImplementedError) as failure:
            raise ValueError(f"device={str(device)!r}: {str(failure).splitlines()[0]}") from failure
    return model, tokenizer, name


@contextlib.contextmanager
def _explained(argument: str, path: str, expected: str) -> Iterator[None]:
    """Turn what transformers raises for `path` into one line that names the argument."""
    looks_local = path.startswith((".", "~", os.sep)) or path.count("/") != 1
    if looks_local and not Path(path).is_dir():
        raise ValueError(f"{argument}={path!r}: no such directory; expected {expected}")
    try:
        yield
    except Exception as failure:  # whatever a broken file makes transformers or safetensors raise
        reason = (str(failure).strip() or type(failure).__name__).splitlines()[0]
        raise ValueError(f"{argument}={path!r}: {reason} (expected {expected})") from failure


def _read_text(text: str | Path | None, tokenizer: Any, model: nn.Module, window: int, tokens: int) -> _Text:
    longest = getattr(model.config, "max_position_embeddings", None) or math.inf
    if not 2 <= window <= longest:
        raise ValueError(f"window={window}: expected 2 to {longest} tokens")
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
    if max(ids[: count * window]) >= model.config.get_text_config().vocab_size:
        raise ValueError("tokenizer: it gives ids beyond the model's vocabulary; expected the model's own tokenizer")
    ends = [end for _, end in encoded["offset_mapping"]]
    spans = [(ends[first], ends[first + window - 1]) for first in range(0, count * window, window)]
    return _Text(
        name=name,
        windows=torch.tensor(ids[: count * window]).view(count, window),
        scored_bytes=torch.tensor([len(text[start:end].encode()) for start, end in spans], dtype=torch.float64),
        scored_words=torch.tensor([_words_beginning(text, start, end) for start, end in spans], dtype=torch.float64),
    )


def _words_beginning(text: str, start: int, end: int) -> int:
    """Words (runs of non-space) whose first character lies in `text[start:end]`."""
    continues = start > 0 and not text[start - 1].isspace() and not text[start : start + 1].isspace()
    return len(text[start:end].split()) - (continues and start < end)


def _window_losses(model: nn.Module, windows: Tensor, done: Callable[[int], None]) -> Tensor:
    """Summed negative log-likelihood (nats, float64) of the scored tokens of each window [windows, window]."""
    logits_a_window = windows.shape[1] * model.config.get_text_config().vocab_size
    at_once = max(1, min(WINDOWS_AT_ONCE, LOGITS_AT_ONCE // logits_a_window))
    found = []
    done(0)
    for batch in windows.split(at_once):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        each = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        found.append(each.view(len(batch), -1).double().sum(dim=1).cpu())
        done(sum(map(len, found)))
    return torch.cat(found)


def _scores(losses: Tensor, corpus: _Text, baseline: Tensor | None) -> dict[str, float | None]:
    total, scored_bytes = losses.sum().item(), corpus.scored_bytes.sum().item()
    scored_tokens = corpus.windows.shape[0] * (corpus.windows.shape[1] - 1)
    change = change_error = None
    if baseline is not None:
        change, change_error = paired_change((losses - baseline) / math.log(2), corpus.scored_bytes)
    return {
        "bits_per_byte": total / math.log(2) / scored_bytes,
        "change": change,
        "change_error": change_error,
        "perplexity": _exp(total / scored_tokens),
        "word_perplexity": _exp(total / max(corpus.scored_words.sum().item(), 1.0)),
    }


def paired_change(differences: Tensor, sizes: Tensor) -> tuple[float, float]:
    """The ratio R = sum d / sum b of differences d [n] (bits) and sizes b [n] (bytes), and its standard error.

    The windows are the sample: sqrt(n / (n - 1) * sum (d - R b)^2) / sum b, the linearized standard error of a ratio;
    where all windows have the same size it is the standard error of the mean of d / b. NaN for a single window.

    >>> paired_change(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 1.0]))
    (2.0, 1.0)
    """
    d, b, n = differences.double(), sizes.double(), len(sizes)
    ratio = d.sum() / b.sum()
    if n < 2:
        return ratio.item(), math.nan
    return ratio.item(), ((n / (n - 1) * (d - ratio * b).square().sum()).sqrt() / b.sum()).item()


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module in training:
            module.training = True


def _dtype_name(model: nn.Module) -> str:
    short = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    dtype = next(model.parameters()).dtype
    return short.get(dtype, str(dtype))


def _machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "device": str(device),
        "processor": name,
        "threads": str(torch.get_num_threads()),
        "system": platform.system(),
    }


def _versions() -> dict[str, str]:
    import transformers

    return {
        "mxref": mxref.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
