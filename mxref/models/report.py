"""What an evaluation found, as frozen records that print, and that write JSON, CSV and a plot."""

import csv
import dataclasses
import io
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxref.registry import Calls

CONVENTIONS = {
    "tokens": "the text is cut into non-overlapping windows; every token but a window's first is scored",
    "bits_per_byte": "summed negative log-likelihood / ln 2 / UTF-8 bytes of the scored tokens' text",
    "bits_per_token": "summed negative log-likelihood / ln 2 / scored tokens",
    "perplexity": "exp(negative log-likelihood / scored tokens)",
    "word_perplexity": "exp(negative log-likelihood / words that begin in the scored text), a word being a run of non-space",
    "change": "bits per byte (per token, where windows hold no text) minus the first row's in the same evaluation; ± is its "
    "standard error, paired by window (of a ratio of sums over windows)",
    "bits_per_weight": "codes, block scales and tensor scales over the quantized tensors",
    "divergence": "the mean over scored tokens of sum p log2(p / q), p being the predictions of the model in the first row",
    "agreement": "the share of scored tokens for which both models find the same token likeliest",
    "snr_db": "10 log10(sum w^2 / sum (w - quantized w)^2), the mean over the quantized weight matrices",
}


_DROPPED_FIRST = ("ppl/word", "ppl/token", "recipe", "SNR dB", "bits/weight", "top-1")  # by a table on a narrow terminal


def json_text(value: Any) -> str:
    """`value` (records, mappings, sequences, numbers, tensors) as JSON; numbers JSON lacks become "NaN", "Infinity",
    "-Infinity"."""
    return json.dumps(_plain(value), indent=2, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    return str(value)


@dataclass(frozen=True)
class EvaluationRow:
    """One evaluated setting: `weights` and `activations` are format names, or the model's own dtype; the fields
    that only a quantized row has are None in the baseline's. `CONVENTIONS` says how each number is counted."""

    weights: str
    activations: str
    bits_per_byte: float | None
    bits_per_token: float
    change: float | None
    change_error: float | None
    perplexity: float
    word_perplexity: float | None
    bits_per_weight: float
    snr_db: float | None
    recipe: str | None
    act_recipe: str | None
    seconds: float
    divergence: float | None = None
    agreement: float | None = None

    @property
    def bits(self) -> float:
        """Bits per byte, or per token where there is no text."""
        return self.bits_per_token if self.bits_per_byte is None else self.bits_per_byte

    @property
    def label(self) -> str:
        return f"{self.weights} / {self.activations}"

    @property
    def recipes(self) -> str:
        """Both recipes, or the one they share."""
        return " / ".join(dict.fromkeys(name for name in (self.recipe, self.act_recipe) if name))


@dataclass(frozen=True)
class EvaluationReport:
    """The rows of an evaluation, the baseline first, and what they were measured on.

    `complete` is False if it was interrupted; the rows are then those that had finished. `backends`: whose kernels were
    asked first; none: the reference answered. `calls`: by op, what became of the calls of which they were asked.
    """

    model: str
    architecture: str
    text: str
    layers: str
    quantized_weights: int
    parameters: int
    semantics: str
    window: int
    windows: int
    scored_tokens: int
    scored_bytes: int | None
    scored_words: int | None
    rows: tuple[EvaluationRow, ...]
    complete: bool
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    date: str
    against: str | None = None
    backends: tuple[str, ...] = ()
    calls: Mapping[str, Calls] = dataclasses.field(default_factory=dict)

    @property
    def answers(self) -> str | None:
        """Who answered, in a line, op by op; None where no backend was asked."""
        if not self.backends:
            return None
        kinds = {"answered": "answered", "compared": "of these compared, every bit the reference's", "refused": "refused"}
        said = []
        for kind, text in kinds.items():
            counts = {op: getattr(calls, kind) for op, calls in sorted(self.calls.items())}
            listed = ", ".join(f"{op} {count}" for op, count in counts.items() if count)
            if listed:
                said.append(f"{text}: {listed}")
            elif kind == "answered":
                said.append("answered no call, so that every number is the reference's")
        return f"{', '.join(self.backends)} {'; '.join(said)}"

    @property
    def unit(self) -> str:
        """What bits are counted by: `byte`, or `token` where the windows hold no text."""
        return "token" if self.scored_bytes is None else "byte"

    def to_json(self) -> str:
        """Everything, with `CONVENTIONS`, as JSON text."""
        return json_text({**_plain(self), "answers": self.answers, "conventions": CONVENTIONS})

    def to_csv(self) -> str:
        """The rows as CSV text with a header."""
        text = io.StringIO()
        names = [field.name for field in dataclasses.fields(EvaluationRow)]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([getattr(row, name) for name in names] for row in self.rows)
        return text.getvalue()

    def table(self, width: int = 140):
        """The rows as a `rich.table.Table` for `width` columns; ImportError names the extra where rich is missing."""
        try:
            from rich.table import Table
        except ImportError as missing:
            raise ImportError("tables need rich: pip install 'mxref[models]'") from missing
        columns = {
            "weights": [row.weights for row in self.rows],
            "activations": [row.activations for row in self.rows],
            f"bits/{self.unit}": [f"{row.bits:.4f}" for row in self.rows],
            "change": [_number(row.change, "+.4f") for row in self.rows],
            "±": [_number(row.change_error, ".4f") for row in self.rows],
            "divergence": [_number(row.divergence, ".4f") for row in self.rows],
            "top-1": [_number(row.agreement, ".1%") for row in self.rows],
            "ppl/token": [f"{row.perplexity:.5g}" for row in self.rows],
            "ppl/word": [_number(row.word_perplexity, ".5g") for row in self.rows],
            "bits/weight": [f"{row.bits_per_weight:.3f}" for row in self.rows],
            "SNR dB": [_number(row.snr_db, ".2f") for row in self.rows],
            "recipe": [row.recipes for row in self.rows],
        }
        if self.against is None:
            del columns["divergence"], columns["top-1"]
        if self.scored_words is None:
            del columns["ppl/word"]
        if all(row.snr_db is None for row in self.rows):  # no row was quantized here, from weights to compare with
            del columns["SNR dB"]
        for name in _DROPPED_FIRST:  # what does not fit is left out, rather than shown in pieces
            if sum(max(map(len, (heading, *cells))) + 3 for heading, cells in columns.items()) + 1 > width:
                columns.pop(name, None)
        table = Table(title=f"{self.model} ({self.architecture})", caption=self._caption(), caption_justify="left")
        for heading in columns:
            text = heading in ("weights", "activations", "recipe")
            table.add_column(heading, justify="left" if text else "right", no_wrap=True)
        for row, *cells in zip(self.rows, *columns.values()):
            table.add_row(*cells, end_section=row.change is None)
        return table

    def _caption(self) -> str:
        share = self.quantized_weights / self.parameters
        lines = [
            f"layers={self.layers}: {self.quantized_weights:,} of {self.parameters:,} parameters quantized ({share:.0%}); "
            f"semantics={self.semantics}",
            f"{self.text}: {self.windows} windows of {self.window} tokens; {self.scored_tokens:,} tokens"
            + ("" if self.scored_bytes is None else f", {self.scored_bytes:,} bytes, {self.scored_words:,} words")
            + " scored",
            f"change: bits/{self.unit} against the first row; ±: its standard error, paired by window",
        ]
        if self.against is not None:
            lines.append(f"first row: {self.against}; divergence from it in bits/token, top-1: share of equal predictions")
        if self.answers is not None:
            lines.append(self.answers)
        if not self.complete:
            lines.append("INTERRUPTED: only the rows that had finished")
        return "\n".join(lines)

    def __str__(self) -> str:
        """The table as plain text."""
        table = self.table()
        from rich.console import Console

        console = Console(file=io.StringIO(), width=140)
        console.print(table)
        return console.file.getvalue()

    def plot(self, path: str | os.PathLike) -> None:
        """Write the change in bits per byte of each format, with its standard error, as an image (png, svg, pdf ...).

        Raises ImportError (naming the extra) without matplotlib and ValueError for a file type it cannot write.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as missing:
            raise ImportError("plots need matplotlib: pip install 'mxref[models]'") from missing
        rows = [row for row in self.rows if row.change is not None]
        formats = list(dict.fromkeys(row.weights for row in rows))
        own = {row.activations for row in self.rows if row.change is None}
        series = list(dict.fromkeys(_series(row, own) for row in rows))
        figure = Figure(figsize=(7.5, 1.4 + 0.45 * max(len(formats), 1)), layout="constrained")
        axes = figure.subplots()
        for index, name in enumerate(series):
            members = [row for row in rows if _series(row, own) == name]
            offset = 0.12 * (2 * index - len(series) + 1)
            axes.errorbar(
                [row.change for row in members],
                [formats.index(row.weights) + offset for row in members],
                xerr=[0.0 if math.isnan(row.change_error) else row.change_error for row in members],
                fmt="os^Dv"[index % 5],
                capsize=3,
                label=name,
            )
        bits = {row.weights: row.bits_per_weight for row in rows}
        axes.set_yticks(range(len(formats)), [f"{name}\n{bits[name]:.2f} bits" for name in formats])
        axes.invert_yaxis()
        axes.axvline(0.0, color="black", linewidth=0.8)
        axes.grid(axis="x", alpha=0.3)
        axes.set_xlabel(f"change in bits per {self.unit} against the first row (± 1 standard error)")
        axes.set_title(f"{self.model}: {self.scored_tokens:,} tokens of {self.text}", fontsize="medium")
        if series:
            axes.legend()
        figure.savefig(path, dpi=150)


def _series(row: EvaluationRow, own: set[str]) -> str:
    if row.activations in own:
        return "weights only"
    return "weights and activations" if row.activations == row.weights else f"activations {row.activations}"


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else "-" if math.isnan(value) else format(value, spec)
