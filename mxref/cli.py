"""The `mxref` command: a thin layer over the library.

Exit codes: 0 all well; 1 a negative result (a model whose loss is not a number, bits that differ); 2 bad usage,
explained in a line or two on stderr, or a stdout that cannot be written; 130 interrupted; 141 whoever read stdout went
away. `--json FILE` writes what a command found for machines (`-`: to stdout, instead of the text for people).
"""

import contextlib
import difflib
import logging
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import mxref
from mxref.commands import Terminated
from mxref.faults import FAULTS
from mxref.formats import BLOCK_FORMATS, ELEMENT_FORMATS, BlockFormat, ElementFormat, block_format
from mxref.models.report import EvaluationReport, json_text
from mxref.recipes import RECIPES

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from mxref.checkpoints import Change, Finding
    from mxref.commands.bench import Timing
    from mxref.conformance.report import Outcome

NEGATIVE, BAD_USAGE, INTERRUPTED, UNREAD = 1, 2, 130, 141
PLAIN_WIDTH = 1 << 20  # columns where the output is no terminal: nothing is wrapped
TEXT_WIDTH = 120  # of tables that hold sentences: there cells are
MOST_WORKERS = 8  # that share the cores of a CPU; each holds half a gigabyte
FINDINGS_SHOWN = 8  # of each kind in a table; JSON has them all
TORCHAO_SAYS = (r"Skipping import of cpp extensions", r"Failed to load .*_C.*\.so", r"<enum .*> is an Enum subclass")
PLOT_TYPES = (".png", ".svg", ".pdf", ".jpg", ".eps")

app = typer.Typer(
    name="mxref",
    help="The ground truth of block-scaled number formats (OCP MX, NVFP4).",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _fail(message: str, code: int = BAD_USAGE) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(code)


def _writable(parameter: typer.CallbackParam, given: str | Path | None) -> str | Path | None:
    """The file that an option names, after a look whether it can be written: before the work, not after it."""
    if given is None or (given == "-" and isinstance(given, str)):
        return given
    path, option = Path(given), f"{parameter.opts[0]}={str(given)!r}"
    try:
        if str(given) == "-":
            _fail(f"{option}: expected a file; stdout is taken by --json alone")
        if path.is_dir() or not str(given):
            _fail(f"{option}: expected a file, not a directory")
        if not path.absolute().parent.is_dir():
            _fail(f"{option}: its directory {str(path.parent)!r} does not exist")
        if path.exists() and not os.access(path, os.W_OK):
            _fail(f"{option}: it may not be written")
        if path.is_file() or not path.exists():
            part = _part(path)
            part.touch(exist_ok=False)
            part.unlink()
    except FileExistsError:
        _fail(f"{option}: it is written as {part.name} until it is whole, and that exists already")
    except OSError as refusal:
        _fail(f"{option}: {refusal.strerror}")
    return given


def _keep(files: dict[str, str | Path | None], *sources: str | Path | None) -> None:
    """Raise ValueError if a file that an option names is one of `sources`, or lies in the folder of one: both are read.

    So it does if two options name one file, or one what the other is written as until it is whole.
    """
    named: dict[Path, str] = {}
    for option, given in files.items():
        path = None if given is None or (given == "-" and isinstance(given, str)) else Path(given)
        if path is None:
            continue
        if path.is_file() or not path.exists():  # devices take any number
            for each in (path.resolve(), _part(path)):
                if each in named:
                    raise ValueError(f"{option}={str(given)!r} and {named[each]} are written to one file: expected two")
            named |= dict.fromkeys((path.resolve(), _part(path)), f"{option}={str(given)!r}")
        if not path.exists():
            continue
        for source in map(Path, filter(None, sources)):
            held = [source] if source.is_file() else source.iterdir() if source.is_dir() else ()
            if any(path.samefile(file) for file in held if file.exists()):
                raise ValueError(f"{option}={str(given)!r} would replace a file of {str(source)!r}, which is read")


JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE", callback=_writable, help="Write the result as JSON to FILE; '-' is stdout."),
]


def run() -> NoReturn:
    """The command line as a program: typer's own complaints too become one line on stderr, and so does a full stdout."""
    if sys.stdout is None:
        print("error: stdout is closed", file=sys.stderr)
        raise SystemExit(BAD_USAGE)
    try:
        code = app(prog_name="mxref", standalone_mode=False)
        sys.stdout.flush()
    except (OSError, SystemExit) as end:
        failure = end.__context__ if end.args == (1,) else end  # typer, or rich, made an exit of a broken pipe
        if not isinstance(failure, OSError) or failure.filename is not None:
            raise
        code = UNREAD if isinstance(failure, BrokenPipeError) else BAD_USAGE
        if code == BAD_USAGE:
            print(f"error: stdout: {failure.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python still writes as it ends
    except typer.Abort:
        code = INTERRUPTED
    except Exception as complaint:
        if not hasattr(complaint, "format_message"):
            raise
        print(f"error: {complaint.format_message()} (mxref --help shows what is accepted)", file=sys.stderr)
        code = BAD_USAGE
    raise SystemExit(code)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(f"mxref {mxref.__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


@contextlib.contextmanager
def _usage_errors(command: Callable | None = None, **others: str) -> Iterator[None]:
    """Report what the library refuses, and files that cannot be written, as bad usage; arguments are called as `command`
    does, or `others`."""
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, ImportError, OSError) as refusal:
        _fail(_near(_in_options(" ".join(str(refusal).split()), _options(command) | others)))


def _options(command: Callable | None) -> dict[str, str]:
    """What the parameters of a command are called where it is typed, by their names in Python."""
    named = {}
    for name, hint in get_type_hints(command, include_extras=True).items() if command else ():
        for given in getattr(hint, "__metadata__", ()):
            flags = [flag.partition("/")[0] for flag in given.param_decls or () if flag.startswith("--")]
            typed = given.metavar if isinstance(given, typer.models.ArgumentInfo) else f"--{name.replace('_', '-')}"
            named[name] = flags[0] if flags else typed
    return named


def _in_options(message: str, named: dict[str, str]) -> str:
    """A message of the library, with `name=` as `--name`, and without what can only be given in Python."""

    def typed(match: re.Match) -> str:
        option = named[match["name"]]
        return option if match["alone"] is not None else f"{option} none" if match["none"] else f"{option}="

    message = re.sub(r", or an? \w+ record$", "", message)
    if not named:
        return message
    value = r"(?:(?P<alone>True\b|(?=[\s,;:.)]|$))|(?P<none>None\b))?"
    return re.sub(rf"(?<![\w.'\"/-])(?P<name>{'|'.join(named)})={value}", typed, message)


def _near(message: str) -> str:
    """A message that lists all recipes with the nearest alone."""
    said, found, rest = message.partition(f"expected one of {', '.join(RECIPES)}")
    given = said.rpartition("=")[2].strip(": '").lower()
    near = difflib.get_close_matches(given, RECIPES) or [name for name in RECIPES if given and given in name]
    some = f"such as {', '.join(near)}; `mxref recipes` lists all" if near else "that `mxref recipes` lists"
    return f"{said}expected one {some}{rest}" if found else message


def _print(table: Table, width: int = PLAIN_WIDTH) -> None:
    """Show a table; where the output is no terminal every line of it whole, since a program may read it, or `width` wide."""
    console = Console()
    if console.is_terminal:
        console.print(table)
        return
    title, caption, table.title, table.caption = table.title, table.caption, None, None  # they wrap at the table's width
    for part in filter(None, (title, table, caption)):
        text = isinstance(part, str)
        Console(width=PLAIN_WIDTH if text else width).print(part, soft_wrap=text, markup=not text, highlight=False)


def _deliver(json_file: str | None, value: object, show: Callable[[], None]) -> None:
    """Write `value` as JSON where `--json` says, and show it to people unless stdout is taken."""
    if json_file == "-":
        print(json_text(value), end="")
        return
    if json_file is not None:
        with _usage_errors():
            _write(Path(json_file), json_text(value))
    show()


def _write(path: Path, text: str) -> None:
    """Write a file whole or leave it as it was; a pipe or device is written to."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    part = _part(path)
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path.resolve())
    finally:
        part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    """Where a file is written until it is whole."""
    path = path.resolve()
    return path.with_name(f"{path.name}.part")


def _table(title: str | None, *headings: str) -> Table:
    table = Table(title=title)
    for heading in headings:
        table.add_column(heading)
    return table


def _chosen(backend: str | None) -> list[str]:
    """What `mxref.use` takes for `--backend`, whose kernels can be loaded."""
    if backend is None:
        return []
    _check_loads(backend)
    return [backend]


def _names(given: str) -> list[str]:
    return [name.strip() for name in given.split(",") if name.strip()]


@app.command("eval")
def evaluate_command(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Directory of a transformers causal language model, quantized or not; none: the one that comes with mxref.",
        ),
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            metavar="F,F,...",
            help="Block formats of the weights (default: all that --recipe fits; none of a model quantized already).",
        ),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="A,A,...",
            help="One row per entry: none (weights only), same (as the weights) or a block format (default: none,same).",
        ),
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="The same as --activations none.")] = False,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="Recipe of weights and activations; see `mxref recipes`.")
    ] = None,
    act_recipe: Annotated[str | None, typer.Option(metavar="NAME", help="Recipe of activations alone.")] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="experts|all",
            help="What to quantize (default: experts, or the linears of a model without experts).",
        ),
    ] = None,
    semantics: Annotated[
        str | None,
        typer.Option(
            metavar="blockwise|dequantized|torch",
            help="How products are defined (default: blockwise; torch for what is stored quantized).",
        ),
    ] = None,
    scales: Annotated[
        str,
        typer.Option(
            metavar="stored|vllm", show_default=False, help="Scales of a quantized model's experts (default: as stored)."
        ),
    ] = "stored",
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Tensors of MODEL to leave out: a name, wildcard or re:...; may repeat."),
    ] = None,
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Another model, to compare every row's predictions with.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text to evaluate on (default: a held-out text that comes with mxref)."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="DIR", help="The model's tokenizer, if it is not in MODEL.")
    ] = None,
    ids: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Token ids instead of a text: a JSON list, or safetensors with input_ids."),
    ] = None,
    random_ids: Annotated[
        bool, typer.Option("--random-ids", help="Ids drawn from the vocabulary: to compare models that have no tokenizer.")
    ] = False,
    window: Annotated[int | None, typer.Option(metavar="N", help="Tokens per window (default: 128).")] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="N", help="Use the first N tokens of the text (default: 24576).")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Torch device, such as cpu or cuda (default: where the model loads).")
    ] = None,
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose kernels compute, such as triton (default: the reference).")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Run the reference beside the backend and compare every bit.")
    ] = False,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of stochastic recipes.")] = None,
    json_file: JsonOption = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", callback=_writable, help="Write the rows as CSV.")
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", callback=_writable, help="Write a plot (png, svg, pdf).")
    ] = None,
) -> None:
    """What a format costs a language model: bits per byte and perplexity, against the model as stored.

    A quantized checkpoint runs by its own scheme: with inputs left alone, and quantized as it says.

    Ctrl-C stops early and keeps the rows that have finished.
    """
    if weights_only and (activations is not None or act_recipe is not None):
        other = "--activations" if activations is not None else "--act-recipe"
        _fail(f"--weights-only and {other} contradict each other; expected one of the two")
    if plot_file is not None and plot_file.suffix not in PLOT_TYPES:
        _fail(f"--plot={str(plot_file)!r}: expected a file name that ends in {', '.join(PLOT_TYPES)}")
    if random_ids and (ids is not None or text is not None or tokenizer is not None):
        _fail("--random-ids goes without --ids, --text and --tokenizer; expected one of them")
    if check and backend is None:
        _fail("--check: expected a --backend to compare with the reference")
    from mxref.models import evaluate as evaluation
    from mxref.models.evaluate import MissingTokenizer

    asked = {"window": window, "tokens": tokens, "ids": "random" if random_ids else ids}
    if weights_only:
        asked["activations"] = ["none"]
    elif activations is not None:
        asked["activations"] = _names(activations)
    computing = contextlib.nullcontext() if backend is None else mxref.use(*_chosen(backend), check=check)
    with _usage_errors():
        _keep({"--json": json_file, "--csv": csv_file, "--plot": plot_file}, model, against, text, tokenizer, ids)
    known = formats is None or set(_names(formats)) <= {*BLOCK_FORMATS}
    usage = _usage_errors(evaluate_command, format="--activations" if known else "--formats")
    with usage, computing, _quiet_transformers(), _quiet_torchao(), _progress_bar("windows") as on_progress:
        try:
            report = evaluation(
                model,
                tokenizer,
                formats=None if formats is None else _names(formats),
                recipe=recipe,
                act_recipe=act_recipe,
                layers=layers,
                semantics=semantics,
                scales=scales,
                ignore=ignore or (),
                against=against,
                text=text,
                device=device,
                seed=seed,
                on_progress=on_progress,
                **{name: value for name, value in asked.items() if value is not None},
            )
        except MissingTokenizer:
            instead = "--tokenizer DIR, or instead of a text --ids FILE or --random-ids"
            _fail(f"MODEL={model!r}: its directory has no files of a tokenizer; expected {instead}")
        except AssertionError as difference:
            _fail(str(difference), NEGATIVE)
        except KeyboardInterrupt:
            _fail("interrupted before the first row had finished", INTERRUPTED)
    _write_report(report, json_file, csv_file, plot_file)
    if not report.complete:
        _fail(f"interrupted: kept the {len(report.rows)} rows that had finished", INTERRUPTED)
    if any(row.perplexity != row.perplexity for row in report.rows):
        _fail("the loss of at least one row is not a number", NEGATIVE)
    if check and not any(calls.compared for calls in report.calls.values()):
        _fail(f"--check: nothing was compared with the reference: {report.answers}", NEGATIVE)


def _write_report(report: EvaluationReport, json_file: str | None, csv_file: Path | None, plot_file: Path | None) -> None:
    if json_file == "-":
        print(report.to_json(), end="")
    else:
        console = Console()
        _print(report.table(console.width if console.is_terminal else PLAIN_WIDTH))
    with _usage_errors():
        if json_file not in (None, "-"):
            _write(Path(json_file), report.to_json())
        if csv_file is not None:
            _write(csv_file, report.to_csv())
        if plot_file is not None:
            report.plot(plot_file)


@contextlib.contextmanager
def _progress_bar(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, one task per label."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        tasks = {}

        def on_progress(label: str, done: int, total: int) -> None:
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=total)
            progress.update(tasks[label], completed=done)

        yield on_progress


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' own loading bars off the terminal."""
    try:
        from transformers.utils import logging
    except ImportError:
        yield
        return
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _quiet_torchao() -> Iterator[None]:
    """Keep off the terminal what importing torchao, as transformers does, says where it was built for another torch."""

    def keeps(record: logging.LogRecord) -> bool:
        return not any(re.match(known, record.getMessage()) for known in TORCHAO_SAYS)

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(keeps)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keeps)


@app.command("formats")
def formats_command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="An element or block format; none: all of them.")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """The formats; with NAME every code of an element format, or the parameters of a block format."""
    if name is None:
        elements = [_element_facts(element) for element in ELEMENT_FORMATS.values()]
        blocks = [_block_facts(block) for block in BLOCK_FORMATS.values()]

        def show() -> None:
            _print(_facts_table("element formats", elements))
            _print(_facts_table("block formats", blocks))

        _deliver(json_file, {"elements": elements, "blocks": blocks}, show)
    elif name in ELEMENT_FORMATS:
        element = ELEMENT_FORMATS[name]
        facts = _element_facts(element)
        codes = [{"code": code, "value": value} for code, value in enumerate(element.values)]

        def show() -> None:
            _print(_fields_table(name, facts))
            _print(_codes_table(element))

        _deliver(json_file, {**facts, "codes": codes}, show)
    elif name in BLOCK_FORMATS:
        facts = _block_facts(BLOCK_FORMATS[name])
        _deliver(json_file, facts, lambda: _print(_fields_table(name, facts)))
    else:
        _fail(f"NAME={name!r}: expected one of {', '.join([*ELEMENT_FORMATS, *BLOCK_FORMATS])}")


def _element_facts(element: ElementFormat) -> dict:
    return {
        "name": element.name,
        "bits": element.bits,
        "S/E/M": f"{int(element.signed)}/{element.exponent_bits}/{element.mantissa_bits}",
        "bias": element.bias,
        "emax": element.emax,
        "max": element.max,
        "min normal": element.min_normal,
        "min subnormal": element.min_subnormal,
        "specials": element.specials,
        "source": element.source,
    }


def _block_facts(block: BlockFormat) -> dict:
    return {
        "name": block.name,
        "element": block.element.name,
        "scale": block.scale.name,
        "block": block.block_size,
        "tensor scale": "float32" if block.tensor_scale else None,
        "bits/element": block.bits_per_element,
        "default recipe": block.default_recipe,
        "source": block.source,
    }


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.7g}"
    return "-" if value is None else str(value)


def _facts_table(title: str | None, facts: list[dict]) -> Table:
    table = _table(title, *facts[0])
    for row in facts:
        table.add_row(*map(_shown, row.values()))
    return table


def _fields_table(title: str, values: dict) -> Table:
    table = _table(title, "field", "value")
    for name, value in values.items():
        table.add_row(name, _shown(value))
    return table


def _codes_table(element: ElementFormat, columns: int = 4) -> Table:
    """Every code with its bits and value, reading down the first column, then the next."""
    rows = -(-element.code_count // columns)
    table = _table(None, *["code", "bits", "value"] * columns)
    for row in range(rows):
        cells = []
        for code in range(row, element.code_count, rows):
            cells += [f"0x{code:02X}", f"{code:0{element.bits}b}", _shown(element.values[code])]
        table.add_row(*cells)
    return table


@app.command("recipes")
def recipes_command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A recipe; none: all of them.")] = None,
    json_file: JsonOption = None,
) -> None:
    """The named recipes: what each chooses, and what is wrong in the producer whose bits it gives; with NAME every field."""
    if name is None:
        table = _table(None, "recipe", "formats", "choice", "faults, of its producer")
        table.columns[0].no_wrap, table.columns[1].max_width = True, 12
        for recipe in RECIPES.values():
            faults = "\n".join(f"- {summary}" for summary in _recipe_facts(recipe)["faults"].values())
            table.add_row(recipe.name, ", ".join(_formats_of(recipe)), recipe.summary, faults)
        _deliver(json_file, [_recipe_facts(recipe) for recipe in RECIPES.values()], lambda: _print(table, TEXT_WIDTH))
    elif name in RECIPES:
        facts = _recipe_facts(RECIPES[name])
        shown = facts | {"faults": "\n".join(f"{fault}: {summary}" for fault, summary in facts["faults"].items()) or None}
        _deliver(json_file, facts, lambda: _print(_fields_table(name, shown), TEXT_WIDTH))
    else:
        _fail(_near(f"NAME={name!r}: expected one of {', '.join(RECIPES)}"))


def _formats_of(recipe: mxref.Recipe) -> list[str]:
    from mxref.recipes import resolve_recipe

    fitting = []
    for name, block in BLOCK_FORMATS.items():
        with contextlib.suppress(ValueError):
            resolve_recipe(recipe, block)
            fitting.append(name)
    return ["all MX"] if fitting == [n for n, b in BLOCK_FORMATS.items() if b.scale.is_power_of_two] else fitting


def _recipe_facts(recipe: mxref.Recipe) -> dict:
    facts = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    if recipe.scale_rule != "amax":  # these say something of scales with a mantissa only
        facts |= dict.fromkeys(("encode_order", "decode_order", "scale_max", "scale_min", "element_max", "amax_dtype"))
    return facts | {"faults": {fault: FAULTS[fault].summary for fault in recipe.faults}}


@app.command("explain", context_settings={"ignore_unknown_options": True})
def explain_command(
    format: Annotated[str, typer.Argument(metavar="FORMAT", help="A block format.")],
    values: Annotated[
        list[str], typer.Argument(metavar="VALUES...", help="Numbers (decimal, 0x1.8p-3, nan, inf), rounded to float32.")
    ],
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="See `mxref recipes`.")] = None,
    seed: Annotated[int | None, typer.Option(metavar="N", help="Seed of a stochastic recipe.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Every step from VALUES to scales, codes and decoded values."""
    import torch

    with _usage_errors(explain_command):
        x = torch.tensor([_number(value) for value in values])
        explanation = mxref.explain(x, block_format(format), recipe=recipe, seed=seed)
    _deliver(json_file, explanation, lambda: print(explanation))


def _number(text: str) -> float:
    """A number that is typed, rounded to float32; one beyond its range, or that would be 0 and is not, is refused."""
    import torch

    digits, _, exponent = text.lower().partition("p" if "0x" in text.lower() else "e")
    try:
        value = float.fromhex(text) if "0x" in digits else float(text)
    except OverflowError:
        value = math.inf
    except ValueError:
        raise ValueError(f"VALUES: {text!r} is no number; expected such as 1.5, -2e-3, 0x1.8p-3, nan, inf") from None
    stored = torch.tensor(value).item()
    if re.search("[1-9a-f]" if "0x" in digits else "[1-9]", digits.replace("0x", "")) and stored in (0, math.inf, -math.inf):
        low, high = 2.0**-149, torch.finfo(torch.float32).max
        raise ValueError(f"VALUES: {text!r} is {stored:g} in float32: expected 0, or {low:.3g} to {high:.9g} in magnitude")
    return stored


@app.command("compare", context_settings={"ignore_unknown_options": True})
def compare_command(
    source: Annotated[
        list[str],
        typer.Argument(metavar="FILE|VALUES...", help="A .npy, .npz, .safetensors or .pt file, or numbers as in explain."),
    ],
    recipes: Annotated[str, typer.Option(metavar="A,B", help="The two recipes.")],
    format: Annotated[
        str | None, typer.Option(metavar="F", help="A block format (default: the first that both fit).")
    ] = None,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="Which tensor of a file that holds several.")] = None,
    json_file: JsonOption = None,
) -> None:
    """Where two recipes differ, block by block: scale bytes, codes, decoded values.

    Exit code 0 if nothing differs, 1 if anything does.
    """
    import torch

    from mxref.commands.compare import FILE_TYPES, compare_recipes, read_tensor

    path = Path(source[0])
    with _usage_errors(compare_command, recipe="--recipes"):
        if len(source) == 1 and path.suffix in FILE_TYPES:
            _keep({"--json": json_file}, path)
            x = read_tensor(path, tensor)
        elif tensor is not None:
            raise ValueError(f"--tensor={tensor!r} needs a file that ends in {', '.join(FILE_TYPES)}")
        else:
            x = torch.tensor([_number(value) for value in source])
        comparison = compare_recipes(x, _names(recipes), format)
    _deliver(json_file, comparison, lambda: print(comparison))
    if not comparison.equal:
        raise typer.Exit(NEGATIVE)


@app.command("kernels")
def kernels_command(json_file: JsonOption = None) -> None:
    """The kernels that installed packages offer: where they run, what they promise, what they refuse and why.

    A kernel that cannot be used is listed with what is wrong with it; the exit code is 0 all the same.
    """
    from mxref import registry

    with contextlib.redirect_stdout(sys.stderr):  # what other projects' modules print is no part of the list
        ending = _ending_modules(_foreign_offers())
        facts = [_kernel_facts(op, backend, ending.get(f"{op}.{backend}")) for op, backend in registry.offers()]
    table = _table(None, *_KERNEL_COLUMNS)
    for row in facts:
        table.add_row(*[escape(row[name]) for name in _KERNEL_COLUMNS[:-1]], escape("\n".join(row["refuses"])) or "-")
    _deliver(json_file, facts, lambda: _print(table))


_KERNEL_COLUMNS = ("op", "backend", "formats", "dtypes", "devices", "contract", "here", "refuses")


def _kernel_facts(op: str, backend: str, ending: str | None) -> dict[str, str | list[str]]:
    """A row of the list; `ending`: what importing the kernel does to a process that it ends."""
    from mxref import registry
    from mxref.conformance.refusals import refusals

    facts = {**dict.fromkeys(_KERNEL_COLUMNS, "-"), "op": op, "backend": backend, "refuses": []}
    if ending is not None:
        return {**facts, "here": f"broken: {ending}"}
    try:
        kernel = registry.kernel(op, backend)
    except RuntimeError as broken:  # a package's fault, to be listed like any other
        return {**facts, "here": f"broken: {' '.join(str(broken).split())}"}
    try:
        here = registry.ask(kernel, "requires") or "runs"
    except registry.AskingFailed as broken:
        here = f"broken: {' '.join(str(broken).split())}"
    return {
        **facts,
        "formats": "any" if kernel.formats is None else ", ".join(kernel.formats),
        "dtypes": ", ".join(str(dtype).removeprefix("torch.") for dtype in kernel.dtypes),
        "devices": ", ".join(kernel.devices),
        "contract": kernel.contract,
        "here": here,
        "refuses": refusals(kernel),
    }


def _check_loads(backend: str) -> None:
    """End with bad usage if a kernel of `backend` cannot be loaded; another project's is first loaded by another process,
    which it may end."""
    from mxref import registry
    from mxref.conformance.settings import settings_kept

    if backend not in {offered for _, offered in registry.offers()}:
        return
    try:
        with mxref.use(backend):
            ending = _ending_modules([offer for offer in _foreign_offers() if offer.name.endswith(f".{backend}")])
        if not ending:
            with settings_kept(f"importing the kernels of {backend}"):
                registry.kernels(backend)
    except RuntimeError as broken:
        _fail(" ".join(str(broken).split()))
    for said in ending.values():
        _fail(said)


def _foreign_offers() -> list["EntryPoint"]:
    """The entry points of other projects' kernels."""
    from importlib.metadata import entry_points

    from mxref import registry

    return [o for o in entry_points(group=registry.GROUP) if o.dist is not None and o.dist.name != "mxref"]


def _ending_modules(offers: Sequence["EntryPoint"]) -> dict[str, str]:
    """By the name of an offer what importing its module does, of those whose import ends a process."""
    modules = {offer.name: offer.value.partition(":")[0] for offer in offers}
    waiting, codes = sorted(set(modules.values())), {}
    while waiting:
        begun, code = _imported(waiting)
        if code is None:
            break
        codes[waiting[begun - 1]] = code
        waiting = waiting[begun:]
    ended = "importing it ended the process, with exit code"
    return {name: f"{module}: {ended} {codes[module]}" for name, module in modules.items() if module in codes}


def _imported(modules: Sequence[str]) -> tuple[int, int | None]:
    """How many of `modules` another process began to import, one after the other, and its exit code if one ended it."""
    script = "import contextlib, importlib, os, sys\ntold = os.dup(1)\nos.dup2(2, 1)\nfor name in sys.argv[1:]:\n"
    script += (
        "    os.write(told, b'.')\n    with contextlib.suppress(BaseException):\n        importlib.import_module(name)\n"
    )
    script += "os.write(told, b'!')\nos._exit(0)\n"
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    found = subprocess.run([sys.executable, "-c", script, *modules], env=path, capture_output=True)
    return found.stdout.count(b"."), None if found.stdout.endswith(b"!") else found.returncode


@app.command("verify")
def verify_command(
    backend: Annotated[
        str, typer.Argument(metavar="BACKEND", help="Whose kernels; reference: the reference itself.")
    ] = "reference",
    ops: Annotated[
        str | None, typer.Option("--op", metavar="O,O,...", help="Ops to verify (default: all that BACKEND offers).")
    ] = None,
    case: Annotated[str | None, typer.Option(metavar="ID", help="One case of the one op given by --op.")] = None,
    level: Annotated[int, typer.Option(metavar="1|2", help="2 adds what is large.")] = 1,
    device: Annotated[str, typer.Option(help="Torch device on which BACKEND runs.")] = "cpu",
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            show_default=False,
            help="Processes that share the work (default: on a CPU one a core, else 1); 0: none but this, which a kernel "
            "may end (not by os._exit).",
        ),
    ] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="HASH", help="Commit that the record names (default: git's).")
    ] = None,
    known_failures: Annotated[
        Path | None,
        typer.Option("--known-failures", metavar="FILE", help="Failures to expect, one 'op id reason' a line; # comments."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="A refused case is a failure.")] = False,
    timeout: Annotated[
        float,
        typer.Option("--timeout", metavar="SECONDS", help="A case that takes longer fails; not with --workers 0."),
    ] = 1800.0,
    allow_refused: Annotated[
        bool, typer.Option("--allow-refused", help="Exit code 0 even where every case is refused.")
    ] = False,
    json_file: JsonOption = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", callback=_writable, help="Write a page to read.")
    ] = None,
) -> None:
    """Whether a backend keeps its contract, nearly always the bits of the reference on the CPU, case by case.

    Exit code 1 if a case fails, passes although --known-failures lists it, or if all are refused, so that nothing is
    verified; 2 if that file lists what is not run.
    """
    import torch

    from mxref.conformance.html import html_page
    from mxref.conformance.runner import check_device, find_case, run_case, run_case_apart, verify

    with _usage_errors():
        _keep({"--json": json_file, "--html": html_file}, known_failures)
    _check_loads(backend)
    if workers is None:
        workers = min(MOST_WORKERS, torch.get_num_threads()) if device == "cpu" else 1
    with _usage_errors(verify_command, op="--op"), _terminated(), _progress_bar("cases") as on_progress:
        if case is not None:
            if ops is None:
                raise ValueError("--case needs --op: expected the op that the case is of")
            if known_failures is not None or html_file is not None:
                raise ValueError("--case runs one case: --known-failures and --html are for many")
            check_device(device)
            apart = partial(run_case_apart, timeout=timeout)
            outcome = (apart if workers else run_case)(find_case(ops, case), backend, device, strict)
            _deliver(json_file, outcome, lambda: print(outcome.failure or outcome.refused or "passed"))
            _end_verification([outcome], allow_refused)
            return
        report = verify(
            backend,
            ops=None if ops is None else _names(ops),
            level=level,
            device=device,
            workers=workers,
            commit=commit,
            known_failures=known_failures,
            strict=strict,
            timeout=timeout,
            on_progress=on_progress,
        )
    if html_file is not None:
        with _usage_errors():
            _write(html_file, html_page(report))
    _deliver(json_file, report.record(), lambda: print(report))
    _end_verification(report.outcomes, allow_refused)


def _end_verification(outcomes: Sequence["Outcome"], allow_refused: bool) -> None:
    """End with a negative result if a case failed, or if there is nothing that was verified."""
    if any(outcome.kind == "failed" for outcome in outcomes):
        raise typer.Exit(NEGATIVE)
    refused = [outcome for outcome in outcomes if outcome.kind == "refused"]
    if refused and not allow_refused and all(outcome.kind == "refused" or outcome.left for outcome in outcomes):
        count = f"all {len(refused)} cases were" if len(refused) > 1 else "the case was"
        _fail(f"{count} refused, so nothing was verified; --allow-refused makes that exit code 0", NEGATIVE)


@app.command("bench")
def bench_command(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Benchmarks to run; none: all.")] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Whose benchmarks.")] = "cpu",
    listed: Annotated[bool, typer.Option("--list", help="Say which there are, and run none.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny sizes, one round: do they run? (cpu)")] = False,
    json_file: JsonOption = None,
) -> None:
    """How fast everything is beside a ceiling of the same run, such as a copy. It needs a checkout of the repository.

    Nothing is timed before it is checked, kernels against the reference, bit for bit. Exit code 1 if anything is wrong: then
    no JSON is written, and no number of that benchmark shown.
    """
    from mxref.commands.bench import BenchmarkFailed, find_benchmarks, merged, run_benchmark, timings

    with _usage_errors(bench_command):
        benchmarks = find_benchmarks(device, names or ())
        if listed:
            facts = [{"name": b.name, "device": b.device, "summary": b.summary} for b in benchmarks]
            _deliver(json_file, facts, lambda: _print(_facts_table(None, facts)))
            return
        _check_bench(device, quick)
    records, failed = [], []
    with _terminated(), _progress_bar("timed") as on_progress:
        for benchmark in benchmarks:
            try:
                record = run_benchmark(benchmark, quick, on_progress)
            except BenchmarkFailed as failure:
                print(f"{benchmark.name}: FAILED, no number\n{failure}", file=sys.stderr)
                failed.append(benchmark.name)
                continue
            except KeyboardInterrupt:
                _fail(f"interrupted during {benchmark.name}: nothing is written", INTERRUPTED)
            records.append(record)
            if json_file != "-":
                _print(_timings_table(benchmark.summary, timings(record)))
    if failed:
        _fail(f"{', '.join(failed)} failed: no JSON is written", NEGATIVE)
    _deliver(json_file, merged(records), lambda: None)


def _check_bench(device: str, quick: bool) -> None:
    """Raise unless the benchmarks of `device` can run here."""
    import importlib.util

    from mxref.conformance.runner import check_device

    check_device(device)
    if device == "cuda" and quick:
        raise ValueError("--quick is for the CPU: the GPU's benchmarks have no tiny sizes")
    for module, package in (("pytest_benchmark", "pytest-benchmark"), ("ml_dtypes", "ml-dtypes")):
        if device == "cpu" and importlib.util.find_spec(module) is None:
            raise ImportError(f"the benchmarks need {package}: pip install -e '.[test]'")


def _timings_table(title: str, rows: Sequence["Timing"]) -> Table:
    table = _table(title, "op", "format", "dtype", "size", "who", "median ms", "times the ceiling's", "ceiling", "bits")
    for name in ("median ms", "times the ceiling's"):
        next(column for column in table.columns if column.header == name).justify = "right"
    for row in rows:
        ms = "" if row.seconds is None else f"{1e3 * row.seconds:.4g}"
        ratio = "" if row.ratio is None else f"{row.ratio:.3g}"
        size = "x".join(map(str, row.size))
        table.add_row(
            *map(escape, (row.op, row.format, row.dtype, size, row.contender, ms, ratio, row.floor or "", row.note))
        )
    return table


@app.command("inspect")
def inspect_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint directory, or a .safetensors file.")],
    dialect: Annotated[
        str | None, typer.Option(metavar="NAME", help="How weights are stored (default: what the config says).")
    ] = None,
    json_file: JsonOption = None,
) -> None:
    """What a checkpoint of block-scaled weights is, and what is wrong with it.

    A fault makes results wrong or loading fail; a warning is what a checkpoint may be and many readers get wrong. Floats
    whose names no model of the architecture has are found by loading it, not here.

    Exit code 0: no fault, warnings or not. 1: at least one fault. 2: PATH is no checkpoint or
    cannot be read, or its dialect is not known.
    """
    from mxref.checkpoints import inspect_checkpoint

    with _usage_errors(inspect_command), _progress_bar("tensors") as on_progress:
        _keep({"--json": json_file}, path.parent if path.is_file() else path)
        inspection = inspect_checkpoint(path, dialect=dialect, on_progress=on_progress)

    def show() -> None:
        facts = inspection.record()
        facts |= {name: ", ".join(facts[name]) or None for name in ("formats", "recipes")}
        del facts["findings"]
        _print(_fields_table(None, facts))
        if inspection.findings:
            _print(_findings_table(inspection.findings))
        print(inspection.summary)

    _deliver(json_file, inspection.record(), show)
    if inspection.faults:
        raise typer.Exit(NEGATIVE)


def _findings_table(findings: Sequence["Finding"]) -> Table:
    """Findings of a kind together, and of many the first."""
    table = _table(None, "severity", "what", "where", "detail")
    kinds = dict.fromkeys((finding.severity, finding.what) for finding in findings)
    for kind in kinds:
        alike = [finding for finding in findings if (finding.severity, finding.what) == kind]
        for finding in alike[:FINDINGS_SHOWN]:
            table.add_row(*map(escape, (finding.severity, finding.what, finding.name, finding.detail)))
        if len(alike) > FINDINGS_SHOWN:
            table.add_row(*kind, f"... and {len(alike) - FINDINGS_SHOWN} more", "")
    return table


@app.command("convert")
def convert_command(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="Checkpoint directory, or a .safetensors file.")],
    to: Annotated[
        str,
        typer.Option(metavar="DIALECT", help="compressed-tensors, modelopt, quark, gpt-oss, torchao, or plain for floats."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Directory to write; it must not exist, but see --force.")],
    format: Annotated[
        str | None,
        typer.Option(metavar="F", help="Block format of the weights; bf16, f16 or f32 for plain (default: the source's)."),
    ] = None,
    activations: Annotated[
        str | None,
        typer.Option(
            metavar="A",
            help="What the config says of activations: a block format or none (default: as the source, or producer). The "
            "report says whether that keeps, drops or changes what PATH does to them.",
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(metavar="NAME", help="How to quantize; see `mxref recipes` (default: near the producer's).")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN", help="Modules of a model in floats to leave: a name, wildcard or re:...; may repeat."
        ),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Modules to quantize beside those called *_proj, w1, w2, w3; may repeat."),
    ] = None,
    dialect: Annotated[
        str | None, typer.Option(metavar="NAME", help="How PATH stores weights (default: what its config says).")
    ] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file of weights, such as 500MB.")] = "5GB",
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose kernels quantize, such as inductor (default: the reference).")
    ] = None,
    losses: Annotated[
        bool, typer.Option("--losses/--no-losses", help="Also measure what quantizing a model in floats loses.")
    ] = True,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace all of DIR, if it holds nothing but config.json, hf_quant_config.json, its weights "
            "(model.safetensors or what its index names), the index, and files that are copied anew from beside PATH. With "
            "anything else in it DIR is refused and left as it is.",
        ),
    ] = False,
    json_file: JsonOption = None,
) -> None:
    """Convert a checkpoint between dialects, or quantize a model in floats.

    Weights of the same format keep their codes and block scales bit for bit; a tensor scale that DIALECT divides by where
    PATH multiplies, or the other way round, becomes the reciprocal that changes the fewest values. With another --format
    weights are quantized anew (MXFP4 becomes NVFP4 with its codes). torchao is written in MXFP4 and MXFP8, not in its NVFP4.
    All matrices of a layer's experts are quantized or none; embeddings and routers are not.

    What changes is measured on decoded float32 values and shown: how many changed, the largest and the root-mean-square
    (rms) error, that error over the rms of the source ("of rms"), and how many blocks lie "outside" of what the target's
    scales reach: they became zeros, were cut off at the largest value or lost bits of their codes. "lossless" speaks of
    weights and stored input scales; a line of its own says what becomes of how activations are quantized.

    DIR appears when it is whole, and not at all otherwise: until then it is written to
    .DIR.part beside it, by one run at a time. Only a run that is killed outright leaves that; then remove it.

    Exit code 0: written. 1: written, but blocks became zeros or lie outside of what the target's scales reach, or values
    are finite no longer, or were NaN or Inf and are finite now. 2: refused, DIR is as it was; or DIR is whole, and it is
    stdout or the FILE of --json that could not be written at the end. 130, 143: interrupted, DIR is
    as it was, or whole if it was written already: the message says which.
    """
    from mxref.checkpoints import convert_checkpoint
    from mxref.checkpoints.recode import HOW

    asked = {} if activations is None else {"activations": None if activations == "none" else activations}
    usage = _usage_errors(convert_command)
    with usage, _terminated(), mxref.use(*_chosen(backend)), _progress_bar("jobs") as on_progress, _untouched(out):
        _keep({"--json": json_file}, path.parent if path.is_file() else path)
        if json_file not in (None, "-"):
            file = Path(json_file).resolve()
            if out.resolve() in (file, _part(file), *file.parents):
                raise ValueError(f"--json={json_file!r} is --out or lies in it, which is made anew: expected another place")
        conversion = convert_checkpoint(
            path,
            out,
            to=to,
            format=format,
            recipe=recipe,
            ignore=ignore or (),
            include=include or (),
            dialect=dialect,
            shard_size=_bytes(shard_size),
            measure_losses=losses,
            force=force,
            on_progress=on_progress,
            **asked,
        )

    def show() -> None:
        facts = {
            name: value for name, value in conversion.record().items() if name not in ("weights", "notes", "activations")
        }
        _print(_fields_table(None, facts | {"files": len(conversion.files), "weights": len(conversion.changes)}))
        _print(_changes_table(conversion.changes))
        for how in dict.fromkeys(change.how for change in conversion.changes):
            print(f"{how}: {HOW[how]}")
        print("of rms: the rms error over the rms of the source; outside: blocks that the target's scales do not reach")
        print(f"activations: {conversion.activations}")
        for note in conversion.notes[:FINDINGS_SHOWN]:
            print(_in_options(note, _options(convert_command)))
        if len(conversion.notes) > FINDINGS_SHOWN:
            print(f"... and {len(conversion.notes) - FINDINGS_SHOWN} more notes; --json has all")

    _deliver(json_file, conversion.record(), show)
    if conversion.faults:
        raise typer.Exit(NEGATIVE)


@contextlib.contextmanager
def _untouched(out: Path) -> Iterator[None]:
    """Say of a conversion that is interrupted that nothing is at `out` that was not there before."""

    def which() -> int | None:
        return os.lstat(out).st_ino if os.path.lexists(out) else None

    before = which()
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as end:
        code = INTERRUPTED if isinstance(end, KeyboardInterrupt) else end.code
        written = "nothing was written" if which() == before else "the whole checkpoint was written already"
        _fail(f"interrupted: {written} at {out}", code)


def _bytes(given: str) -> int:
    """A size in bytes from a number with or without KB, MB or GB."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    number = given.rstrip("BKMGbkmg ")
    try:
        return int(float(number) * units[given[len(number) :].strip().upper()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(f"--shard-size={given!r}: expected a size such as 500MB or 5GB") from None


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """Within it SIGTERM and SIGHUP end the program as an exception does, so that what is unfinished is cleared away.

    A second one does not disturb that; one that was ignored before, as by nohup, still is.
    """

    def end(number: int, frame: object) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(128 + number)

    names = ("SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    before = {number: handler for number, handler in before.items() if handler not in (None, signal.SIG_IGN)}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _changes_table(changes: Sequence["Change"]) -> Table:
    """What became of the weights: of each kind those that lost most, and all of them together."""
    table = _table(None, "weights", "what became of them", "values changed", "max error", "rms error", "of rms", "outside")
    for how in dict.fromkeys(change.how for change in changes):
        alike = [change for change in changes if change.how == how]
        measured = sorted((change for change in alike if change.loss), key=lambda change: -change.loss.relative_error)
        if len(alike) > 1:
            total = type(alike[0]).total(f"all {len(alike)}", alike)
            table.add_row(total.name, how, *_loss_cells(total))
        for change in measured[:FINDINGS_SHOWN] if any(change.loss.changed for change in measured) else ():
            table.add_row(escape(change.name), how, *_loss_cells(change))
    return table


def _loss_cells(change: "Change") -> tuple[str, ...]:
    loss = change.loss
    if loss is None:
        return ("not measured",)
    if not loss.changed:
        return (f"0 of {loss.elements}", "0", "0", "0", str(loss.outside))
    errors = (loss.max_error, loss.rms_error, loss.relative_error)
    return (f"{loss.changed} of {loss.elements}", *(f"{error:.3g}" for error in errors), str(loss.outside))
