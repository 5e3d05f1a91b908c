"""How a page is rendered.

A page is Markdown in which `{{ expression }}` stands for what it computes (Jinja, with the modules of this package and
`mxref` as names), and in which every block of Python is run: what it prints follows it. One namespace a page; code
runs in a folder that holds nothing but the repository's `tests`. A fence that starts with `{code-block}` is only shown.
"""

import contextlib
import functools
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jinja2
import torch

import mxref
from docs._generate import formats, markdown, measured, producers, products, questions, scales, storage
from docs._generate.markdown import listing
from mxref.cli import app

DOCS = Path(__file__).parent.parent
ROOT = DOCS.parent
FENCE = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def render(source: str, docname: str = "page") -> str:
    """The Markdown of a page: its expressions computed, its code run."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    text = environment.from_string(source).render(**NAMES)
    return run_code(text, docname) if FENCE.search(text) else text


def run_code(text: str, docname: str) -> str:
    """`text` with what each block of Python prints, if it prints, after it."""
    namespace: dict[str, object] = {"__name__": "__main__"}

    def run(fence: re.Match) -> str:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(fence[1], f"<code of {docname}>", "exec"), namespace)
        output = printed.getvalue()
        return fence[0] + (f"\n```{{code-block}} text\n:class: output\n{output.rstrip()}\n```\n" if output.strip() else "")

    random, here = torch.random.get_rng_state(), os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.symlink(ROOT / "tests", Path(folder) / "tests")
        os.chdir(folder)
        torch.manual_seed(0)
        try:
            return FENCE.sub(run, text)
        finally:
            os.chdir(here)
            torch.random.set_rng_state(random)


def console(command: str) -> str:
    """A command of `mxref` and what it prints, both shown. It runs from the root of the repository, and must succeed."""
    program, *arguments = shlex.split(command)
    if program != "mxref":
        raise ValueError(f"command={command!r}: expected an mxref command")
    printed, here = io.StringIO(), os.getcwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(printed):
            app(args=arguments, prog_name="mxref", standalone_mode=False)
    finally:
        os.chdir(here)
    return listing(f"$ {command}\n{printed.getvalue()}")


@functools.cache
def installed_example() -> tempfile.TemporaryDirectory:
    """A folder that pip has installed the example kernel into, once."""
    site = tempfile.TemporaryDirectory()
    with tempfile.TemporaryDirectory() as package:  # a copy: building leaves files behind
        for name in ("pyproject.toml", "example_kernel.py"):
            shutil.copy(DOCS / "example_kernel" / name, package)
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site.name, package]
        subprocess.run(install, check=True, capture_output=True)
    return site


def kernel_console(command: str, fault: tuple[str, str] = ("", ""), lines: int | None = None) -> str:
    """`console` in a process of its own that has the example kernel installed, with `fault[0]` in it become `fault[1]`.

    `lines`: how many lines of its output are shown; None: all.
    """
    with tempfile.TemporaryDirectory() as site:
        shutil.copytree(installed_example().name, site, dirs_exist_ok=True)
        kernel = Path(site) / "example_kernel.py"
        if fault[0]:
            kernel.write_text(kernel.read_text(encoding="utf-8").replace(*fault), encoding="utf-8")
        path = os.pathsep.join(filter(None, [site, str(ROOT), os.environ.get("PYTHONPATH", "")]))
        run = [sys.executable, "-m", *shlex.split(command)]
        result = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    if result.returncode != (1 if fault[0] else 0):
        raise RuntimeError(f"{command}: exit code {result.returncode}\n{result.stdout}{result.stderr}")
    printed = result.stdout.splitlines()
    cut = [] if lines is None or len(printed) <= lines else ["..."]
    return listing("\n".join([f"$ {command}", *printed[:lines], *cut]))


def command_line() -> str:
    """The help of `mxref` and of each of its commands."""
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    parts = [console("mxref --help")]
    for name in names:
        parts += [f"## mxref {name}", console(f"mxref {name} --help")]
    return "\n\n".join(parts)


def file(path: str, language: str = "python") -> str:
    """A file of the repository, shown and not run."""
    return f"```{{code-block}} {language}\n:caption: {path}\n\n{(ROOT / path).read_text(encoding='utf-8').rstrip()}\n```"


NAMES = {
    "mxref": mxref,
    "torch": torch,
    "formats": formats,
    "markdown": markdown,
    "measured": measured,
    "producers": producers,
    "products": products,
    "questions": questions,
    "scales": scales,
    "storage": storage,
    "console": console,
    "kernel_console": kernel_console,
    "command_line": command_line,
    "file": file,
    "exact": markdown.exact,
    "hex": markdown.hexadecimal,
    **mxref.ELEMENT_FORMATS,
    **mxref.BLOCK_FORMATS,
}


def generated_pages() -> dict[str, str]:
    """The pages that exist as records alone, by their path below docs/."""
    pages = {f"formats/{name}.md": formats.block_page(block) for name, block in mxref.BLOCK_FORMATS.items()}
    pages |= {f"elements/{name}.md": formats.element_page(element) for name, element in mxref.ELEMENT_FORMATS.items()}
    return pages


def write_generated_pages() -> None:
    """Write them, where they are not there already as they should be (so that an unchanged page is not built again)."""
    for name, text in generated_pages().items():
        path = DOCS / name
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
