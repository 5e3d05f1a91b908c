"""The house rules that a machine can check: imports point one way, importing stays light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "mxref"
ORDER = [
    "comparison",
    "registry",
    "formats",
    "elements",
    "packing",
    "scales",
    "orders",
    "faults",
    "producers",
    "recipes",
    "grid",
    "block_codec",
    "blocks",
    "functions",
    "matmul",
    "moe",
    "compiled",
    "explain",
]


def imported_modules(source: str) -> set[str]:
    """Names of mxref's modules (first component below the package) that `source` imports anywhere."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "mxref":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("mxref.")}
        assert not (isinstance(node, ast.ImportFrom) and node.level), "imports are absolute"
    return found


def test_every_module_has_its_place_in_the_order():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*ORDER, "__init__", "__main__", "cli"}


@pytest.mark.parametrize("module", ORDER)
def test_a_file_imports_only_those_above_it(module):
    above = set(ORDER[: ORDER.index(module)])
    assert imported_modules((PACKAGE / f"{module}.py").read_text()) <= above


def test_the_import_check_sees_a_planted_fault():
    assert imported_modules("def f():\n    from mxref.moe import route\n") == {"moe"}
    assert imported_modules("import mxref.cli") == {"cli"}
    assert imported_modules("from mxref import models") == {"models"}


def test_mxref_never_imports_kernels():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "accel" for name in names), path


def test_importing_mxref_imports_no_extra():
    script = (
        "import sys, mxref\n"
        "heavy = {'transformers', 'triton', 'typer', 'rich', 'safetensors', 'matplotlib', 'accel', 'tokenizers'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_mxref_takes_under_two_seconds_beyond_torch():
    """The one time in the tests: a ceiling that only an accidental heavy import can reach."""
    script = "import time, torch, numpy\nstart = time.perf_counter()\nimport mxref\nprint(time.perf_counter() - start)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 2


def test_the_reference_stays_small():
    """The formats and their arithmetic: everything but the dispatch to kernels and graphs, and what is odd elsewhere.

    70 lines of 2890 are what producers chose: exponent rules, orders and a rounding that no standard has.
    """
    counted = [m for m in (*ORDER[ORDER.index("formats") :], "__init__") if m not in ("compiled", "faults", "producers")]
    lines = sum(len((PACKAGE / f"{module}.py").read_text().splitlines()) for module in counted)
    assert lines <= 2890


def test_format_constants_live_in_formats_alone():
    """448, 2688, 57344, 28.0 and 7.5 are properties of formats: no other file of the reference types them."""
    typed = {}
    for module in ORDER:
        if module == "formats":
            continue
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
            if isinstance(node, ast.Constant) and node.value in (448, 2688, 57344, 28.0, 7.5, 127, 2688.0):
                typed.setdefault(module, []).append(node.value)
    assert typed == {}
