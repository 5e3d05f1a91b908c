"""What a block format costs a language model: bits per byte and perplexity on held-out text, against the model as stored."""

import contextlib
import datetime
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
from mxref.checkpoints.dialects import check_patterns
from mxref.formats import BLOCK_FORMATS, BlockFormat, block_format, check_choice
from mxref.models.corpus import Corpus, drawn_ids, read_ids, read_text
from mxref.models.layers import inputs_quantized
from mxref.models.load import SCALES
from mxref.models.report import EvaluationReport, EvaluationRow
from mxref.models.sources import Source, open_source, open_tokenizer
from mxref.models.swap import experts_implementation, find_experts, quantize_weights, quantized
from mxref.recipes import Recipe, resolve_recipe
from mxref.registry import counted, selected

WINDOW = 128  # tokens
TOKENS = 24_576  # of the text, from its start
LOGITS_AT_ONCE = 1 << 24  # float32 logits in memory: 64 MiB
WINDOWS_AT_ONCE = 16
SAME = "same"  # activations in the weights' own format
NONE = "none"  # activations left as they are
RANDOM = "random"  # ids drawn from the vocabulary


class MissingTokenizer(ValueError):
    """There is a text to read, and neither a tokenizer nor files of one beside the model."""


@dataclass(frozen=True)
class _Setting:
    """One row to be: its labels, what runs it, and what quantizing did (`elements`: how many weights it is about)."""

    weights: str
    activations: str
    running: Callable[[], contextlib.AbstractContextManager]
    bits_per_weight: float
    snr_db: float | None = None
    recipe: str | None = None
    act_recipe: str | None = None
    elements: int = 0


@dataclass(frozen=True)
class _Found:
    """Of each window, in float64: the summed loss (nats) of its scored tokens; against another model the summed
    divergence (bits) and how many next tokens both find likeliest."""

    losses: Tensor
    divergence: Tensor | None = None
    agreeing: Tensor | None = None


def evaluate(
    model: nn.Module | str | os.PathLike | None = None,
    tokenizer: Any = None,
    *,
    formats: Sequence[str | BlockFormat] | None = None,
    activations: Sequence[str | BlockFormat] = (NONE, SAME),
    recipe: str | Recipe | None = None,
    act_recipe: str | Recipe | None = None,
    layers: str | None = None,
    semantics: str | None = None,
    scales: str = "stored",
    ignore: Sequence[str] = (),
    against: nn.Module | str | os.PathLike | None = None,
    text: str | Path | None = None,
    ids: Tensor | Sequence | Path | str | None = None,
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
    `layers`: `"experts"`, `"all"`, or None (experts if there are any, else linears). `semantics`: `"blockwise"` (None)
    or `"dequantized"`.

    The path of a quantized checkpoint is evaluated as it is stored: its weights with inputs left alone (`"none"`) and
    quantized as its config says (`"same"`); with `formats`, its decoded weights are quantized anew as well. There
    `semantics`, `scales` and `ignore` are those of `mxref.models.load`, `"torch"` the default for what is stored.

    `against`: another model, or its path; it becomes the first row, and every other row says how its predictions differ.
    `text`: a Path of a UTF-8 file, or the text itself (None: the held-out text that comes with mxref). The first `tokens`
    tokens, without special tokens, are cut into non-overlapping windows of `window`; every token but a window's first is
    scored. `ids`: token ids instead of a text, [windows, window] or one sequence, or a Path of them (a JSON list, or
    safetensors with `input_ids`), or `"random"`: drawn from the vocabulary, the same every time, which is enough to
    compare models with each other. A directory without a tokenizer takes ids of one kind or the other.
    `mxref.models.CONVENTIONS` says how each number is counted. `seed`: of stochastic recipes.
    `on_progress(row label, windows done, windows)` is called as work proceeds.

    The model keeps its dtype, and is left as it was. KeyboardInterrupt ends the evaluation early and returns the rows
    that have finished, with `complete=False`; before the first row it is raised. Raises ValueError for unknown names, a
    model with nothing to quantize, a checkpoint that `load` refuses, or text that has no whole window; ImportError
    names the extra that is missing.
    """
    chosen = _choose_formats(formats, recipe)
    for choice in activations:
        if choice not in (NONE, SAME):
            block_format(choice)
    if not activations:
        raise ValueError(f"activations={activations!r}: expected at least one of {NONE!r}, {SAME!r} or a block format")
    if semantics not in (None, "blockwise", "dequantized", "torch"):
        raise ValueError(f"semantics={semantics!r}: expected 'blockwise' or 'dequantized', or 'torch' for what is stored")
    check_choice("scales", scales, SCALES)
    check_patterns("ignore", ignore)
    if text is not None and ids is not None:
        raise ValueError("text and ids are both given: expected one of the two")
    source = open_source("model", model, device, semantics or "torch", scales, ignore)
    if source.stored is not None and formats is None:
        chosen = []
    if chosen and semantics == "torch":
        raise ValueError("semantics='torch' is for what is stored: with formats expected 'blockwise' or 'dequantized'")
    other = None if against is None else open_source("against", against, device, semantics or "torch", scales, ignore)
    if scales != "stored" and not any(each and each.stored and each.path for each in (source, other)):
        raise ValueError(f"scales={scales!r} is for the path of a quantized checkpoint, which neither model nor against is")
    if ignore and not any(each and each.path for each in (source, other)):
        raise ValueError(f"ignore={ignore!r} is for the path of a checkpoint, which neither model nor against is")
    if other is not None and other.vocabulary != source.vocabulary:
        raise ValueError(f"against: its vocabulary is {other.vocabulary}, expected {source.vocabulary} as the model's")
    corpus = _corpus(source, tokenizer, text, ids, window, tokens)
    device = next(source.model.parameters()).device
    quantizing = dict(recipe=recipe, act_recipe=act_recipe, layers=layers, semantics=semantics or "blockwise", seed=seed)
    rows: list[EvaluationRow] = []
    elements, baseline, complete = 0, None, True

    def measure(setting: _Setting) -> _Found:
        def done(windows: int) -> None:
            if on_progress is not None:
                on_progress(f"{setting.weights} / {setting.activations}", windows, len(corpus.windows))

        reference = None if other is None or baseline is None else other.model
        with setting.running() as running:
            return _window_losses(running, corpus.windows.to(device), done, reference)

    with contextlib.ExitStack() as evaluating:
        calls = evaluating.enter_context(counted())
        for each in (source, other) if other is not None else (source,):
            evaluating.enter_context(_evaluating(each.model))
        try:
            start = time.perf_counter()
            for setting in _settings(source, other, chosen, activations, quantizing):
                found = measure(setting)
                rows.append(_row(setting, found, corpus, baseline, time.perf_counter() - start))
                baseline = found.losses if baseline is None else baseline
                elements = setting.elements or elements
                start = time.perf_counter()
        except KeyboardInterrupt:
            if not rows:
                raise
            complete = False

    stored = source.stored
    semantics_of_rows = ((semantics or "torch") if stored else None, (semantics or "blockwise") if chosen else None)
    return EvaluationReport(
        model=source.name,
        architecture=type(source.model).__name__,
        text=corpus.name,
        layers="as stored" if stored else layers or ("experts" if find_experts(source.model) else "all"),
        quantized_weights=elements,
        parameters=sum(p.numel() for p in source.model.parameters()) + (stored.elements if stored else 0),
        semantics=", ".join(dict.fromkeys(filter(None, semantics_of_rows))),
        window=corpus.windows.shape[1],
        windows=len(corpus.windows),
        scored_tokens=int(corpus.scored_tokens.sum()),
        scored_bytes=None if corpus.scored_bytes is None else int(corpus.scored_bytes.sum()),
        scored_words=None if corpus.scored_words is None else int(corpus.scored_words.sum()),
        rows=tuple(rows),
        complete=complete,
        machine=_machine(device),
        versions=_versions(),
        date=datetime.date.today().isoformat(),
        against=None if other is None else other.name,
        backends=selected(),
        calls=dict(calls),
    )


def _corpus(source: Source, tokenizer: Any, text: Any, ids: Any, window: int, tokens: int) -> Corpus:
    if isinstance(ids, str):
        check_choice("ids", ids, (RANDOM,))
        return drawn_ids(source.model, window, tokens)
    if ids is not None:
        return read_ids(ids, source.model, window, tokens)
    if tokenizer is None and source.tokenizer is None:
        raise MissingTokenizer(
            "tokenizer=None: the model's directory has none, and there is a text to read; expected a tokenizer, or instead "
            f"of a text ids, or ids={RANDOM!r}, drawn from the vocabulary"
        )
    return read_text(
        text, open_tokenizer(source.tokenizer if tokenizer is None else tokenizer), source.model, window, tokens
    )


def _settings(
    source: Source,
    other: Source | None,
    chosen: list[BlockFormat],
    activations: Sequence[str | BlockFormat],
    quantizing: dict[str, Any],
) -> Iterator[_Setting]:
    """The rows in their order; each quantizes when its turn comes."""
    if other is not None:
        yield _as_stored(other, SAME, " (against)")
    if source.stored is None:
        yield _as_stored(source, SAME)
    else:
        own = [choice for choice in activations if choice in (NONE, SAME)] or [SAME]
        for choice in own if source.stored.activations else [NONE]:
            yield _as_stored(source, choice)
    if not chosen:
        return
    model, seed = source.decoded(), quantizing["seed"]
    recipe, act_recipe = quantizing["recipe"], quantizing["act_recipe"]
    for block in chosen:
        weights = quantize_weights(model, block, recipe=recipe, layers=quantizing["layers"], seed=seed)
        for choice in activations:
            act_format = _act_format(choice, block)
            act = None if act_format is None else _act_recipe(act_format, recipe, act_recipe)
            options = dict(act_format=act_format, act_recipe=act, semantics=quantizing["semantics"], seed=seed)
            yield _Setting(
                weights=block.name,
                activations=_dtype_name(model) if act_format is None else act_format.name,
                running=lambda weights=weights, options=options: quantized(model, weights, **options),
                bits_per_weight=weights.bits_per_weight,
                snr_db=weights.snr_db,
                recipe=weights.recipe.name,
                act_recipe=None if act is None else act.name,
                elements=weights.elements,
            )


def _as_stored(source: Source, choice: str, mark: str = "") -> _Setting:
    """The model as it is: a quantized one with its inputs quantized by its own scheme, or left alone."""
    model, stored = source.model, source.stored
    dtype = _dtype_name(model)
    if stored is None:
        bits = 8.0 * next(model.parameters()).element_size()
        return _Setting(dtype + mark, dtype, lambda: _as_is(model, True), bits)
    own = choice == SAME and stored.activations is not None
    return _Setting(
        weights="+".join(stored.formats) + mark,
        activations=stored.activations if own else dtype,
        running=lambda: _as_is(model, own),
        bits_per_weight=stored.bits / stored.elements,
        recipe="+".join(stored.recipes),
        act_recipe=stored.act_recipe if own else None,
        elements=stored.elements,
    )


@contextlib.contextmanager
def _as_is(model: nn.Module, quantizes_inputs: bool) -> Iterator[nn.Module]:
    with experts_implementation(model, "eager"), inputs_quantized(model, quantizes_inputs):
        yield model


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


def _row(setting: _Setting, found: _Found, corpus: Corpus, baseline: Tensor | None, seconds: float) -> EvaluationRow:
    total, scored_tokens = found.losses.sum().item(), corpus.scored_tokens.sum().item()
    sizes = corpus.scored_tokens if corpus.scored_bytes is None else corpus.scored_bytes
    change = change_error = None
    if baseline is not None:
        change, change_error = paired_change((found.losses - baseline) / math.log(2), sizes)
    return EvaluationRow(
        weights=setting.weights,
        activations=setting.activations,
        bits_per_byte=None if corpus.scored_bytes is None else total / math.log(2) / sizes.sum().item(),
        bits_per_token=total / math.log(2) / scored_tokens,
        change=change,
        change_error=change_error,
        perplexity=_exp(total / scored_tokens),
        word_perplexity=None if corpus.scored_words is None else _exp(total / max(corpus.scored_words.sum().item(), 1.0)),
        bits_per_weight=setting.bits_per_weight,
        snr_db=setting.snr_db,
        recipe=setting.recipe,
        act_recipe=setting.act_recipe,
        seconds=seconds,
        divergence=None if found.divergence is None else found.divergence.sum().item() / scored_tokens,
        agreement=None if found.agreeing is None else found.agreeing.sum().item() / scored_tokens,
    )


def _window_losses(
    model: nn.Module, windows: Tensor, done: Callable[[int], None], reference: nn.Module | None = None
) -> _Found:
    """What `model` makes of the windows [windows, window], against `reference` where there is one."""
    logits_a_window = windows.shape[1] * model.config.get_text_config().vocab_size
    at_once = max(1, min(WINDOWS_AT_ONCE, LOGITS_AT_ONCE // logits_a_window))
    losses, divergence, agreeing = [], [], []
    done(0)
    for batch in windows.split(at_once):
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        each = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
        losses.append(each.view(len(batch), -1).double().sum(dim=1).cpu())
        if reference is not None:
            expected = reference(input_ids=batch, use_cache=False).logits[:, :-1].float()
            agreeing.append((expected.argmax(-1) == logits.argmax(-1)).sum(dim=1).double().cpu())
            log_p, log_q = expected.log_softmax(-1), logits.log_softmax(-1)
            each = (log_p.exp() * (log_p - log_q)).sum(-1) / math.log(2)
            divergence.append(each.double().sum(dim=1).cpu())
        done(sum(map(len, losses)))
    against = () if reference is None else (torch.cat(divergence), torch.cat(agreeing))
    return _Found(torch.cat(losses), *against)


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
