"""The conformance kit: it passes what is right, finds what is wrong, and the Triton kernels pass it in the interpreter."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from heeding import start
from planted import planted

import mxref
from mxref import registry
from mxref.conformance import cases, contracts, failure, html_page, inputs, operands, read_known_failures, runner, verify
from mxref.conformance.cases import OPS, REPEATS, Case
from mxref.conformance.failure import Failure
from mxref.conformance.processes import run_shared
from mxref.conformance.refusals import refusals
from mxref.conformance.report import ConformanceReport, Outcome
from mxref.conformance.runner import find_case, run_case
from mxref.moe import ACTIVATIONS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


@pytest.fixture
def offer(monkeypatch):
    """Offers one kernel, of the backend "wrong", in place of all that are installed."""

    def offer(op, function, contract="bitexact", **fields):
        kernel = registry.Kernel(op, "wrong", function, contract, ("cpu",), DTYPES, **fields)
        monkeypatch.setattr(registry, "_offers", lambda: {(op, "wrong"): None})
        monkeypatch.setattr(registry, "kernel", lambda op, backend: kernel if op == kernel.op else None)
        monkeypatch.setattr(runner, "kernels", lambda backend: (kernel,))
        return kernel

    return offer


def reference(op, *args, **kwargs):
    with mxref.use():
        return registry.OPS[op](*args, **kwargs)


def command(*arguments):
    """`mxref verify` in this process, where kernels are planted."""
    from typer.testing import CliRunner

    from mxref.cli import app

    return CliRunner().invoke(app, [*map(str, arguments), "--workers", "0"])


INTERPRETED = """
import torch
from mxref.conformance import cases
from mxref.conformance.runner import run_case

torch.set_num_threads(1)
everywhere = ("tails-bfloat16", "specials-float32")
once = ("axis_", "transposed", "strided", "one_element", "empty", "tails-", "specials-")
layers = (
    "mxfp4-mxfp8_e4m3-silu", "tails", "mxfp4-mxfp4-worst", "nvfp4-nvfp4-worst", "mxfp8_e4m3-mxfp8_e4m3-worst",
    "mxfp8_e4m3-mxfp8_e4m3-ties", "nvfp4-nvfp4-extremes", "mxfp4-every_addition_rounds",
    "nvfp4-biases_terms", "mxfp4-expert_map_terms", "nvfp4-weight_on_input", "nvfp4-empty", "vllm", "an_expert",
    "mxfp4-None-expert_map_terms", "mxfp4-None-worst_second", "mxfp4-mxfp8_e4m3-dequantized",
)
products = (
    "ties", "ties-many_rows", "nvfp4-every_scale_pair", "mxfp4-mxfp4-near_scales-many_rows", "k_33", "specials",
    "mxfp4-many_rows", "nvfp4-many_rows-bias", "extremes-few", "divided-few_rows", "mxfp4-every_scale",
    "mxfp4-many_rows-every_addition_rounds", "nvfp4-few_rows-bias-float32", "cancelling", "moderate",
    "bfloat16-nvfp4-every_scale", "nvfp4-mxfp4-dequantized-bias-bfloat16", "nvfp4-nvfp4-dequantized-bias-float16",
)
for op in {ops}:
    for case in cases(op):
        if case.raises:
            pass
        elif op in ("quantize", "qdq"):
            format, recipe, label = case.id.split("-", 2)
            by_default = recipe in ("ocp", "nvidia") and label.startswith(once)
            if not (by_default or label in everywhere):
                continue
        elif op == "moe_experts":
            if not case.id.endswith(layers):
                continue
        elif op == "encode" and ("every" in case.id or "random" in case.id):
            continue
        elif op == "matmul":
            if not case.id.endswith(products) or case.level > 1:
                continue
        elif op == "activate_quantize":
            if not case.id.endswith("concatenated-every_gate-bfloat16") or case.format != "mxint8":
                continue
        elif "random_patterns" in case.id:
            continue
        outcome = run_case(case, "triton", "cpu")
        kind = "failed" if outcome.failure else "refused" if outcome.refused else "passed"
        print(kind, op, case.id, outcome.refused or "")
        if outcome.failure:
            print(outcome.failure.difference)
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    "ops",
    [
        ("encode", "decode", "dequantize"),
        ("quantize",),
        ("qdq",),
        ("exp", "sigmoid", "silu", "gelu_tanh", "swiglu_oai", "activate_quantize"),
        ("moe_experts",),
        ("matmul",),
    ],
)
def test_triton_kernels_pass_in_the_interpreter(ops):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    script = INTERPRETED.replace("{ops}", repr(ops))
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [line for line in result.stdout.splitlines() if line.startswith(("passed", "refused", "failed"))]
    assert not [line for line in lines if line.startswith("failed")], result.stdout
    assert {line.split()[1] for line in lines if line.startswith("passed")} == set(ops)
    reasons = {" ".join(line.split()[3:]) for line in lines if line.startswith("refused")}
    expected = ("scale format", "searches for scales", "compares exact quotients", "blocks of 16 rows", "transforms")
    expected += ("is the reference's alone",)
    assert all(any(words in reason for words in expected) for reason in reasons), reasons


def test_the_reference_passes_itself():
    report = verify(ops=["exp", "decode", "dequantize"], on_progress=lambda op, done, total: None)
    assert report.failed == report.refused == 0 and report.passed == sum(
        len(list(cases(o))) for o in ("exp", "decode", "dequantize")
    )
    record = json.loads(report.to_json())
    assert {"device", "torch", "triton", "commit", "date", "level", "passed", "failed", "refused", "rows"} <= record.keys()
    assert {"op", "format", "dtype", "passed", "failed", "refused"} <= record["rows"][0].keys()


def test_two_processes_find_the_same():
    one, two = verify(ops=["decode"], level=2), verify(ops=["decode"], level=2, workers=2)
    assert one.outcomes == two.outcomes and one.refused == 7  # what is repeated


def test_every_case_has_its_own_id_and_every_op_has_cases():
    for op in OPS:
        ids = [case.id for case in cases(op, level=2)]
        assert ids and len(ids) == len(set(ids)), op


def test_a_wrong_kernel_is_found(offer):
    """A kernel that loses the sign of zero: seen, shown in hex, with the command that repeats it."""

    def relu2(x):
        with mxref.use():
            return mxref.functions.relu2(x) * -1 * -1 - 0.0 if x.numel() != 65536 else -mxref.functions.relu2(-x)

    offer("relu2", relu2)
    report = verify("wrong", ops=["relu2"])
    failed = {outcome.id: outcome.failure for outcome in report.outcomes if outcome.failure}
    assert {"every_bfloat16", "every_float16"} <= failed.keys() and report.failed == len(failed)
    assert "0x" in failed["every_bfloat16"].difference
    assert failed["every_bfloat16"].repeat == "mxref verify wrong --device cpu --op relu2 --case every_bfloat16"
    assert "FAILED relu2 every_bfloat16" in str(report)


def test_one_fault_is_shown_in_full_once_and_counted_in_a_line_a_dtype():
    def failed(op, id, format, dtype):
        return Outcome(op, id, format, dtype, failure=Failure(f"{id} differs\nhere", "block\n" * 40, f"mxref verify {id}"))

    ids = {dtype: [f"{i}-{dtype}" for i in range(30)] for dtype in ("float32", "float16")}
    outcomes = [failed("qdq", id, "mxfp4", dtype) for dtype, found in ids.items() for id in found]
    outcomes += [failed("qdq", "x", "nvfp4", "float32"), failed("silu", "alone", "-", "float32")]
    another = Failure("it raised IndexError: 16", "", "mxref verify another")
    outcomes.insert(1, Outcome("qdq", "another", "mxfp4", "float16", failure=another))
    report = ConformanceReport("b", 1, tuple(outcomes), "cpu", "2", None, "3", None, "today")
    text = str(report)
    assert [line for line in text.splitlines() if line.startswith(("FAILED", "again"))] == [
        "FAILED qdq 0-float32",
        "again: mxref verify 0-float32",
        f"FAILED qdq mxfp4 float32: 30 cases ({', '.join(ids['float32'][:3])}, ...), the first: 0-float32 differs",
        "FAILED qdq mxfp4 float16: 1 case (another), the first: it raised IndexError: 16",
        f"FAILED qdq mxfp4 float16: 30 cases ({', '.join(ids['float16'][:3])}, ...), the first: 0-float16 differs",
        "FAILED qdq nvfp4 float32: 1 case (x), the first: x differs",
        "FAILED silu alone",
        "again: mxref verify alone",
    ]
    assert text.count("block\n") == 2 * 40 and len(report.record()["failures"]) == 63


@pytest.mark.parametrize(
    "given",
    [{"known_failures": ["relu2 x reason"]}, {"known_failures": {"relu2": "r"}}, {"known_failures": b"/f"}, {"ops": "qdq"}],
)
def test_arguments_of_other_types_are_refused(given):
    ((name, value),) = given.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: expected ")):
        verify(**{"ops": ["relu2"], **given})


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="op='expp': expected one of .*exp"):
        verify(ops=["expp"])
    with pytest.raises(ValueError, match="level=3"):
        verify(level=3)
    with pytest.raises(ValueError, match="ops is empty"):
        verify(ops=[])
    with pytest.raises(ValueError, match="workers=-1"):
        verify(workers=-1)
    with pytest.raises(ValueError, match="backend='nowhere'"):
        verify("nowhere")
    with pytest.raises(ValueError, match="device='nowhere'"):
        verify(device="nowhere")


def test_the_commands():
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "mxref", *arguments], capture_output=True, text=True)

    passed = run("verify", "--op", "decode", "--json", "-")
    assert passed.returncode == 0 and json.loads(passed.stdout)["failed"] == 0
    assert run("verify", "--op", "decode", "--case", "e2m1-every_code").stdout == "passed\n"
    case = ("--op", "decode", "--case", "e2m1-every_code")
    other = command("verify", "--op", "decode", "--case", "e2m1-every_cod")
    assert "--case='e2m1-every_cod': decode has no such case; expected one of its" in other.stderr
    assert "such as e2m1-every_code," in other.stderr and other.exit_code == 2
    for bad in (("--op", "nothing"), (*case[2:],), (*case[:3], "x"), ("nowhere",), (*case, "--html", "x.html")):
        refused = command("verify", *bad)
        assert refused.exit_code == 2 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1, bad
    listed = json.loads(run("kernels", "--json", "-").stdout)
    assert {row["backend"] for row in listed} == {"inductor", "triton"} and {"qdq", "encode"} <= {
        row["op"] for row in listed
    }
    assert all(row.keys() >= {"formats", "dtypes", "devices", "contract", "here", "refuses"} for row in listed)
    assert [row["refuses"] for row in listed if row["op"] == "encode"] == [["e8m0 is a scale format"]]
    assert run("kernels").stderr == ""


# cases


def test_every_scale_meets_every_turning_point():
    """Each scale that the default recipe can choose is chosen, as often as any other, and meets each value and midpoint of
    the element and their float32 neighbours, of both signs."""
    for name, block in mxref.BLOCK_FORMATS.items():
        for tensor_scale in (1.0, 0.0123) if block.tensor_scale else (1.0,):
            x = inputs.every_scale(block, tensor_scale)
            given = torch.tensor(tensor_scale) if block.tensor_scale else None
            codes, counts = mxref.quantize(x, name, tensor_scale=given).scales.unique(return_counts=True)
            positive = [code for code, value in enumerate(block.scale.positive) if value > 0]
            reachable = [c for c in positive if block.scale.is_power_of_two and c <= 254 - block.element.emax]
            assert codes.tolist() == (reachable or positive) and len(counts.unique()) == 1
            for code in (codes[0], codes[len(codes) // 2], codes[-1]):
                rows = x.reshape(len(codes), -1)[codes == code].flatten()
                for point in (*block.element.positive, *block.element.midpoints):
                    exact = Fraction(point) * Fraction(block.scale.values[code]) * Fraction(tensor_scale)
                    near = torch.tensor(float(exact))
                    for value in (near, near.nextafter(torch.tensor(0.0)), near.nextafter(torch.tensor(1e38))):
                        assert (rows == value).any() and (rows == -value).any(), (name, code, point)
    levels = {c.level for c in cases("qdq", 2) if "every_scale" in c.id and ("-ocp-" in c.id or "-nvidia-" in c.id)}
    others = {c.level for c in cases("qdq", 2) if "every_scale" in c.id and ("-ocp_" in c.id or "-exact-" in c.id)}
    assert levels == {1} and others == {2}


def half(q, dtype=torch.float32):
    return dtype.itemsize == 2


def scales_of(tensor_scale):
    return tensor_scale.shape if isinstance(tensor_scale, torch.Tensor) else ()


def between_words(x, *_, **__):
    return x.dtype == torch.bfloat16 and x.is_contiguous() and x.storage_offset() % 2 == 1


def expanded(x, *_, **__):
    return any(stride == 0 and size > 1 for size, stride in zip(x.shape, x.stride()))


LAID_OUT = {
    "five axes": lambda x, *_, **__: x.ndim == 5,
    "expanded": expanded,
    "between words": between_words,
    "negated": lambda x, *_, **__: x.is_neg(),
}


PLACES = {  # where a kernel is wrong, and nowhere else
    "dequantize": {
        "long blocks": lambda q, dtype=torch.float32: q.format != mxref.BLOCK_FORMATS[q.format.name],
        "recipes under the name of others": lambda q, dtype=torch.float32: q.recipe != mxref.RECIPES[q.recipe.name],
        "strided tensor scales": lambda q, dtype=torch.float32: (
            q.tensor_scale is not None and not q.tensor_scale.is_contiguous()
        ),
        "square blocks": lambda q, dtype=torch.float32: q.recipe.block_rows > 1,
        "square blocks along columns": lambda q, dtype=torch.float32: q.recipe.block_rows > 1 and q.axis == -2,
        "transforms": lambda q, dtype=torch.float32: q.recipe.transform is not None,
        "large transforms": lambda q, dtype=torch.float32: q.recipe.transform and q.recipe.transform.size > 16,
        "one axis": lambda q, dtype=torch.float32: q.ndim == 1,
        "four axes": lambda q, dtype=torch.float32: q.ndim == 4,
        "bfloat16 tails": lambda q, dtype=torch.float32: dtype == torch.bfloat16 and q.length % q.format.block_size,
        "float16 tails": lambda q, dtype=torch.float32: dtype == torch.float16 and q.length % q.format.block_size,
        "scales of rows": lambda q, dtype=torch.float32: (
            half(q, dtype) and q.tensor_scale is not None and q.tensor_scale.ndim
        ),
        "divided": lambda q, dtype=torch.float32: (
            half(q, dtype) and q.recipe.tensor_scale_direction == "divide" and scales_of(q.tensor_scale)
        ),
    },
    "quantize": {
        "scales of rows": lambda x, format, tensor_scale=None, **_: scales_of(tensor_scale) == x.shape[:1] and x.ndim == 2,
        "scales of experts": lambda x, format, tensor_scale=None, **_: (
            scales_of(tensor_scale) == x.shape[:1] and x.ndim == 3
        ),
        "scales of gate and up": lambda x, format, tensor_scale=None, **_: len(scales_of(tensor_scale)) == 2,
        "divided by": lambda x, format, recipe=None, tensor_scale=None, **_: (
            scales_of(tensor_scale) and recipe.tensor_scale_direction == "divide"
        ),
        "long seeds": lambda x, format, seed=None, **_: (seed or 0) >= 2**32,
        "seeds of 64 bits": lambda x, format, seed=None, **_: (seed or 0) >= 2**63,
        "one axis": lambda x, format, **_: x.ndim == 1,
        "four axes": lambda x, format, **_: x.ndim == 4,
        "longer rows": lambda x, format, **_: x.shape[-1] > 8192,
        "seed 0": lambda x, format, seed=None, **_: seed == 0,
        "long blocks": lambda x, format, **_: not isinstance(format, str),
        "recipes under the name of others": lambda x, format, recipe=None, **_: (
            isinstance(recipe, mxref.Recipe) and recipe != mxref.RECIPES.get(recipe.name, recipe)
        ),
        "scales of experts of four axes": lambda x, format, tensor_scale=None, **_: (
            x.ndim == 4 and isinstance(tensor_scale, str) and tensor_scale == "per_expert"
        ),
        "scales of rows longer than 1,024": lambda x, format, tensor_scale=None, **_: (
            x.shape[-1] > 1024 and isinstance(tensor_scale, str) and tensor_scale == "per_row"
        ),
        "strided tensor scales": lambda x, format, tensor_scale=None, **_: (
            isinstance(tensor_scale, torch.Tensor) and not tensor_scale.is_contiguous()
        ),
        "tensor scale without a reciprocal": lambda x, format, tensor_scale=None, **_: (
            isinstance(tensor_scale, torch.Tensor) and bool((1 / tensor_scale).isinf().any())
        ),
        **LAID_OUT,
    },
    "encode": {
        "long seeds": lambda x, element, seed=None, **_: (seed or 0) >= 2**32,
        "seed 0": lambda x, element, seed=None, **_: seed == 0,
        "beyond 16 bits": lambda x, element, seed=None, **_: seed is not None and x.numel() > 65536,
        **LAID_OUT,
    },
    "exp": LAID_OUT,
    "swiglu": LAID_OUT,
    "activate_quantize": {
        "seed 0": lambda hidden, format, seed=None, **_: seed == 0,
        "long blocks": lambda hidden, format, **_: not isinstance(format, str),
        "recipes under the name of others": lambda hidden, format, recipe=None, **_: recipe is not None,
        "scales of rows longer than 2,048": lambda hidden, format, tensor_scale=None, **_: (
            hidden.shape[-1] > 2048 and isinstance(tensor_scale, str) and tensor_scale == "per_row"
        ),
        "strided tensor scales": lambda hidden, format, tensor_scale=None, **_: (
            isinstance(tensor_scale, torch.Tensor) and not tensor_scale.is_contiguous()
        ),
        "expanded": expanded,
        "negated": lambda hidden, format, **_: hidden.is_neg(),
    },
    "swiglu_oai": {
        "alpha": lambda gate, up, alpha=1.702, limit=7.0: alpha != 1.702,
        "negative alpha": lambda gate, up, alpha=1.702, limit=7.0: alpha < 0,
        "limit": lambda gate, up, alpha=1.702, limit=7.0: limit != 7.0,
        "alpha in float16": lambda gate, up, alpha=1.702, limit=7.0: alpha != 1.702 and gate.dtype == torch.float16,
        "limit 0": lambda gate, up, alpha=1.702, limit=7.0: str(limit) == "0.0",
        "limit -0": lambda gate, up, alpha=1.702, limit=7.0: str(limit) == "-0.0",
        "infinite limit": lambda gate, up, alpha=1.702, limit=7.0: limit == float("inf"),
    },
}
PLACES["qdq"] = PLACES["quantize"]


@pytest.mark.parametrize("op, place", [(op, place) for op in PLACES for place in PLACES[op]])
def test_a_kernel_that_is_wrong_only_there_fails(op, place, offer):
    def wrong(*args, **kwargs):
        y = reference(op, *args, **kwargs)
        if PLACES[op][place](*args, **kwargs):
            memory = getattr(y, "packed", y).view(torch.uint8)
            memory[(0,) * memory.ndim] ^= 1
        return y

    offer(op, wrong)
    there = [case for case in cases(op) if case.raises is None]
    there = [case for case in there if PLACES[op][place](*case.arguments()[0], **case.arguments()[1])]
    assert there and {run_case(case, "wrong", "cpu").kind for case in there} == {"failed"}
    formats = {case.format for case in cases(op) if case.raises is None}
    assert {case.format for case in there} == ({"nvfp4"} if "scale" in place or "divided" in place else formats)


@pytest.mark.parametrize(
    "op", [op for op in OPS if any(case.id.endswith("no_axes") for case in cases(op) if not case.raises)]
)
def test_a_kernel_that_adds_an_axis_fails(op, offer):
    offer(op, lambda *args, **kwargs: torch.atleast_1d(reference(op, *args, **kwargs)))
    there = [case for case in cases(op) if case.id.endswith("no_axes") and not case.raises]
    assert {run_case(case, "wrong", "cpu").kind for case in there} == {"failed"}


@pytest.mark.parametrize("op, size", [("dequantize", 16384), ("qdq", 32768), ("qdq", 1024), ("quantize", 1024)])
def test_a_kernel_that_forgets_the_end_of_long_rows_fails(op, size, offer):
    """At the first level of the amax of rows, at the second of what they become."""
    level = 1 if size == 1024 else 2

    def forgets(x, *args, **kwargs):
        y = reference(op, x, *args, **kwargs)
        if level == 2 and y.shape and y.shape[-1] > size:
            y[..., size:] = 0
        if level == 1 and isinstance(kwargs.get("tensor_scale"), str) and kwargs["tensor_scale"] == "per_row":
            q = reference("quantize", x.narrow(kwargs["axis"], 0, min(size, x.shape[kwargs["axis"]])), *args, **kwargs)
            return reference(op, x, *args, **kwargs | {"tensor_scale": q.tensor_scale})
        return y

    offer(op, forgets)
    found = [run_case(case, "wrong", "cpu") for case in cases(op, level) if "long" in case.id and case.level == level]
    failed = {outcome.format for outcome in found if outcome.failure}
    assert failed == ({"nvfp4"} if level == 1 else set(mxref.BLOCK_FORMATS))


def test_what_is_negated_as_it_is_read_stays_so():
    x = torch._neg_view(torch.arange(6.0).reshape(2, 3))[:, 1:]
    moved = runner.to_device(x, "cpu")
    assert moved.is_neg() and moved.stride() == x.stride() and torch.equal(moved, x) and not torch.equal(moved, -x)


def test_every_gate_meets_every_activation():
    for dtype in (torch.bfloat16, torch.float16):
        for layout in ("concatenated", "interleaved"):
            hidden = inputs.every_gate(dtype, layout)
            gate, up = hidden.chunk(2, -1) if layout == "concatenated" else (hidden[..., ::2], hidden[..., 1::2])
            assert gate.numel() == 65536 and len(gate.view(torch.int16).unique()) == 65536 and (up > 0).all()
    found = {case.id for case in cases("activate_quantize") if "every_gate" in case.id}
    assert len(found) == len(mxref.BLOCK_FORMATS) * len(ACTIVATIONS) * 4


def nearest_float32(exact: Fraction) -> float:
    """Rounded to nearest even, in rationals; for normal numbers."""
    exponent = max(e for e in range(-60, 61) if Fraction(2) ** e <= abs(exact))
    unit = Fraction(2) ** (exponent - 23)
    return float(round(exact / unit) * unit)  # round() of a Fraction rounds ties to even


@pytest.mark.parametrize("a, b", [(a, b) for a in ("mxfp8_e4m3", "mxfp8_e5m2") for b in ("mxfp8_e4m3", "mxfp8_e5m2")])
def test_ties_are_decided_by_the_smallest_products(a, b):
    """In rationals: without the low x low products, or without the mixed ones, other dots round otherwise."""
    q, w = operands.ties(mxref.BLOCK_FORMATS[a], mxref.BLOCK_FORMATS[b])
    found = reference("matmul", q, w).diagonal().tolist()
    needs_low, needs_mixed = 0, 0
    for x, y, value in zip(mxref.dequantize(q).tolist(), mxref.dequantize(w).tolist(), found):
        terms = [(Fraction(p) * Fraction(r), (abs(p) < 1) + (abs(r) < 1)) for p, r in zip(x, y)]
        exact, low, mixed = sum(t for t, _ in terms), [t for t, n in terms if n == 2], [t for t, n in terms if n == 1]
        assert value == nearest_float32(exact)
        needs_low += nearest_float32(exact - sum(low)) != value
        needs_mixed += nearest_float32(exact - sum(mixed)) != value
    assert needs_low >= 4 and needs_mixed >= 8
    assert {f"{a}-{b}-ties", f"{a}-{b}-ties-many_rows"} <= {case.id for case in cases("matmul")}


def small_repeated(op, repeats=5):
    """A case of `op` that is repeated, of a few rows."""
    x = inputs.spread_normal(6, 64, seed=1, dtype=torch.bfloat16)
    arguments = {
        "quantize": lambda: ((x, "nvfp4"), {"tensor_scale": torch.linspace(0.5, 1, 6)}),
        "qdq": lambda: ((x.reshape(3, 32, 4), "mxfp4"), {"axis": 1}),
        "dequantize": lambda: ((mxref.quantize(x, "nvfp4", tensor_scale="per_row"), torch.bfloat16), {}),
        "decode": lambda: ((torch.arange(64, dtype=torch.uint8).reshape(4, 16), "e2m3"), {}),
        "swiglu": lambda: ((x, x.flip(0)), {}),
    }
    return Case(op, "small", "-", "bfloat16", arguments[op], 2, repeats)


@pytest.mark.parametrize("at_once", [1, 1000, 1 << 26])
@pytest.mark.parametrize("op", ["quantize", "qdq", "dequantize", "decode", "swiglu"])
def test_a_repeated_case_compares_every_copy(op, at_once, offer, monkeypatch):
    monkeypatch.setattr(runner, "COMPARED_AT_ONCE", at_once)
    case = small_repeated(op)
    assert run_case(case, "reference", "cpu").kind == "passed"
    tile = run_case(replace(case, repeats=1), "reference", "cpu")
    assert tile.kind == "passed"

    def beyond(*args, **kwargs):  # as if an index had overflowed in the last copy
        y = reference(op, *args, **kwargs)
        last = y.packed if op == "quantize" else y
        assert len(last) == 5 * len(case.arguments()[0][0]) if op != "dequantize" else 30
        last[-1].view(torch.uint8)[..., -1] ^= 1
        return y

    offer(op, beyond)
    outcome = run_case(case, "wrong", "cpu")
    assert outcome.kind == "failed" and outcome.failure.difference.startswith("copy 4 of 5: ")
    assert "no block to show" not in outcome.failure.block and outcome.failure.block
    offer(op, lambda *args, **kwargs: reference(op, *args, **kwargs)[:-1])
    assert "along the first axis" in run_case(case, "wrong", "cpu").failure.difference


def test_more_elements_than_32_bits_count_are_asked_for_and_refused_where_they_do_not_fit():
    for op in ("encode", "decode", "quantize", "qdq", "dequantize", "exp", "sigmoid", "silu", "gelu_tanh", "swiglu_oai"):
        repeated = [case for case in cases(op, 2) if case.repeats > 1]
        assert {case.format for case in repeated} >= {case.format for case in cases(op) if case.raises is None}
        assert all(case.level == 2 for case in repeated) and not [case for case in cases(op) if case.repeats > 1]
        subject = repeated[0].arguments()[0][0]
        assert subject.shape.numel() * REPEATS > 2**31 and repeated[0].repeats == REPEATS
    report = verify(ops=["decode"], level=2)
    assert (report.passed, report.failed, report.refused) == (30, 0, 7)
    assert all(
        re.fullmatch(r"needs \d+ GiB on the device; cpu has 1 for it", reason) for r in report.rows for reason in r.reasons
    )


def test_arguments_lie_in_poison():
    x = inputs.in_poison(torch.ones(3, 5, dtype=torch.bfloat16))
    q = mxref.quantize(torch.ones(4, 40), "mxfp4", tensor_scale=None)[::2]
    (moved, q_moved, ids), _ = runner.to_device((x, q, torch.ones(2, dtype=torch.int64)), "cpu"), None
    assert torch.equal(moved, x) and moved.stride() == x.stride() and moved.data_ptr() % 64 == x.data_ptr() % 64
    assert torch.empty(0, dtype=x.dtype).set_(x.untyped_storage()).isnan().sum() == 7 * 14 - 15
    whole = torch.empty(0, dtype=x.dtype).set_(moved.untyped_storage())
    assert whole.isnan().sum() == len(whole) - 15 and len(whole) >= 15 + 128
    assert mxref.comparison.difference(q_moved, q) is None and q_moved.packed.stride() == q.packed.stride()
    expanded = runner.to_device(torch.tensor([3.0, 4.0])[1:].expand(5, 6, 1), "cpu")
    assert expanded.stride() == (0, 0, 1) and torch.equal(expanded, torch.full((5, 6, 1), 4.0))
    for part, values in ((q_moved.packed, 2 * 20), (q_moved.scales, 2 * 2), (ids, 2 * 8)):
        memory = torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
        assert (memory == 0xAB).sum() >= len(memory) - values and len(memory) > values


def test_a_kernel_that_reads_beyond_its_rows_is_found(offer):
    """One that reads whole blocks without a mask is right where what follows is small, and wrong in poison."""

    def unmasked(x, format, **others):
        missing = -x.shape[-1] % mxref.BLOCK_FORMATS[format].block_size
        if x.ndim == 2 and x.stride(-1) == 1 and missing and not others.get("axis", -1) == 0:
            wide = x.as_strided((x.shape[0], x.shape[1] + missing), x.stride(), x.storage_offset())
            return reference("qdq", wide, format, **others)[:, : x.shape[1]]
        return reference("qdq", x, format, **others)

    offer("qdq", unmasked)
    zeros = torch.zeros(9, 96)
    zeros[:7, :77] = inputs.spread_normal(7, 77, seed=4)
    assert torch.equal(unmasked(zeros[:7, :77], "mxfp4"), reference("qdq", zeros[:7, :77], "mxfp4"))
    assert run_case(find_case("qdq", "mxfp4-ocp-strided_in_poison"), "wrong", "cpu").kind == "failed"
    for op in ("encode", "decode", "quantize", "qdq", "dequantize", "silu", "matmul"):
        assert any("strided" in case.id for case in cases(op)), op


# what a kernel does beside its result


def overwrites(x):
    y = reference("relu2", x)
    if x.dim() == 2 and x.numel():
        x[0, 0] = 3.0
    return y


def writes_beside(x):
    y = reference("relu2", x)
    if x.dim() == 2 and x.numel():
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(3.0)
    return y


BUFFERS = {}


def takes_turns(x):
    """Two buffers: what a call gave is overwritten by the next but one."""
    turns = BUFFERS.setdefault((x.shape, x.dtype), [torch.empty_like(x) for _ in range(2)])
    turns.reverse()
    return turns[0].copy_(reference("relu2", x))


def keeps_its_buffer(x):
    y = reference("relu2", x)
    return BUFFERS.setdefault(y.shape, y).copy_(y) if x.dim() == 2 else y


def asks_for_a_gradient(x):
    return torch.nn.Parameter(reference("relu2", x)) if x.dim() == 2 else reference("relu2", x)


@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        (overwrites, "it wrote into or beside an argument; of all bytes of tensor 0: "),
        (writes_beside, "it wrote into or beside an argument; of all bytes of tensor 0: "),
        (keeps_its_buffer, "its results of two calls lie in the same memory"),
        (asks_for_a_gradient, "requires_grad is True, expected False"),
    ],
)
def test_what_a_kernel_does_beside_its_result_is_seen(kernel, said, offer):
    offer("relu2", kernel)
    failed = {
        outcome.id: outcome.failure.difference for outcome in verify("wrong", ops=["relu2"]).outcomes if outcome.failure
    }
    assert failed["strided"].startswith(said) and failed.keys() <= {"strided", "empty", *inputs.layouts()}


def test_buffers_that_take_turns_are_seen(offer):
    offer("relu2", takes_turns)
    found = {outcome.id: outcome.failure for outcome in verify("wrong", ops=["relu2"]).outcomes if outcome.failure}
    assert found.keys() == {"strided", "negated"}
    assert {failure.difference for failure in found.values()} == {"its results of two calls lie in the same memory"}
    for op in set(OPS) - {"to_layout", "block_dot", "route"}:
        assert {case.calls for case in cases(op)} == {2, 3}, op


def test_a_result_has_memory_of_its_own_where_the_references_has(offer):
    codes = torch.arange(8, dtype=torch.uint8)
    assert reference("to_layout", codes, "linear").data_ptr() == codes.data_ptr()
    offer("to_layout", lambda tensor, layout: tensor)
    assert (
        run_case(Case("to_layout", "same", "-", "uint8", lambda: ((codes, "linear"), {})), "wrong", "cpu").kind == "passed"
    )
    zeros = Case("relu2", "zeros", "-", "float32", lambda: ((torch.zeros(4),), {}))
    offer("relu2", lambda x: x)
    assert run_case(zeros, "wrong", "cpu").failure.difference == "its result lies in the memory of an argument"
    scaled = find_case("quantize", "nvfp4-nvidia-tails-bfloat16-static")  # the scale that is given is the result's
    offer("quantize", lambda *args, **kwargs: reference("quantize", *args, **kwargs))
    assert run_case(scaled, "wrong", "cpu").kind == "passed"


# calls that must be refused


def test_every_op_has_calls_that_must_be_refused_and_the_reference_refuses_them():
    for op in OPS:
        wrong = [case for case in cases(op) if case.raises is not None]
        assert wrong and all(run_case(case, "reference", "cpu").kind == "passed" for case in wrong), op


def test_a_kernel_that_takes_what_must_be_refused_fails(offer):
    def careless(gate, up, alpha=1.702, limit=7.0):
        if not alpha == alpha:
            return torch.zeros_like(gate)
        if limit == -1.0:
            raise RuntimeError("no")
        return reference("swiglu_oai", gate, up, alpha, limit)

    offer("swiglu_oai", careless)
    case = find_case("swiglu_oai", "refused-alpha_nan")
    found = run_case(case, "wrong", "cpu")
    assert found.failure.difference == "it gave a result; expected ValueError, as of the reference"
    found = run_case(find_case("swiglu_oai", "refused-limit_-1.0"), "wrong", "cpu")
    assert found.failure.difference == "it raised RuntimeError: no; expected ValueError, as of the reference"
    assert run_case(find_case("swiglu_oai", "refused-limit_nan"), "wrong", "cpu").kind == "passed"
    for accepts in (
        lambda gate, up, alpha=1.702, limit=7.0: "alpha" if alpha != alpha else None,
        lambda gate, up, **_: 1 / 0,
    ):
        offer("swiglu_oai", careless, accepts=accepts)
        for strict in (False, True):
            assert run_case(case, "wrong", "cpu", strict).kind == "passed"


# failures


def flipped(op, part="packed"):
    """A kernel whose result has one bit wrong, in the second block of the third row."""

    def wrong(*args, **kwargs):
        y = reference(op, *args, **kwargs)
        if op == "quantize":
            place = (2, 17) if part == "packed" else (2, 1)
            getattr(y, part)[place] ^= 1
        else:
            y[2, 35:36].view(torch.uint8)[0] ^= 4
        return y

    return wrong


def test_a_failure_shows_the_block(offer):
    case = find_case("quantize", "mxfp4-ocp-tails-bfloat16")
    x, q = case.arguments()[0][0], mxref.quantize(case.arguments()[0][0], "mxfp4")
    offer("quantize", flipped("quantize"))
    found = run_case(case, "wrong", "cpu").failure
    assert found.block.splitlines()[0] == "block [2, 32:64], mxfp4, recipe ocp(scale_rule='floor')"
    scale = int(q.scales[2, 1])
    shown = f"0x{scale:02X} {scale:08b} = {re.sub('.?0+p', 'p', float(2.0 ** (scale - 127)).hex())}"
    assert found.block.splitlines()[1] == f"scale: expected {shown}, got {shown}"
    (marked,) = [line for line in found.block.splitlines() if line.endswith("<")]
    code = int(q.codes[2, 34])
    bits = f"{code:04b}"
    other = f"{code ^ 1:04b}"
    assert marked.split() == [
        re.sub(r"\.?0+p", "p", float(x[2, 34]).hex()),
        f"0x{code:02X}",
        f"{bits[0]}|{bits[1:3]}|{bits[3]}",
        f"0x{code ^ 1:02X}",
        f"{other[0]}|{other[1:3]}|{other[3]}",
        "<",
    ]
    assert all(float.fromhex(line.split()[0]) == value for line, value in zip(found.block.splitlines()[3:], x[2, 32:64]))
    assert str(mxref.explain(x[2, 32:64], "mxfp4")) in found.block
    assert str(found).endswith(f"again: mxref verify wrong --device cpu --op quantize --case {case.id}")


def test_a_wrong_scale_shows_its_block(offer):
    offer("quantize", flipped("quantize", "scales"))
    for id, size in (("nvfp4-nvidia-tails-bfloat16-per_row", 16), ("mxint8-ocp-tails-float32", 32)):
        case = find_case("quantize", id)
        q = reference("quantize", *case.arguments()[0], **case.arguments()[1])
        block = run_case(case, "wrong", "cpu").failure.block
        assert block.startswith(f"block [2, {size}:{2 * size}]")
        assert f"expected 0x{int(q.scales[2, 1]):02X} " in block and f"got 0x{int(q.scales[2, 1]) ^ 1:02X} " in block
        assert f"scale code 0x{int(q.scales[2, 1]):02X}" in block  # the explanation has the tensor scale of the row
    x = inputs.spread_normal(48, 64, seed=1)
    case = Case("quantize", "rows", "nvfp4", "float32", lambda: ((x, "nvfp4"), {"recipe": "nvidia_16x16"}))
    block = run_case(case, "wrong", "cpu").failure.block
    assert block.startswith("block [32, 16:32]") and "no explanation: recipe 'nvidia_16x16' spans rows" in block


def test_a_failure_of_other_ops_shows_what_went_in(offer, monkeypatch):
    def third_row_is_3(op):
        return lambda *args, **kwargs: reference(op, *args, **kwargs).index_fill(0, torch.tensor(2), 3.0)

    for op, id, first in (
        ("qdq", "mxfp6_e2m3-ocp-tails-bfloat16", "block [2, 32:64], mxfp6_e2m3, recipe ocp(scale_rule='floor')"),
        ("dequantize", "mxfp4-axis_2-None", "block [2, 0, 0:32]"),
        ("encode", "e4m3-strided_in_poison", "place"),
        ("block_dot", "e2m1-e2m3-32", "[2, 35]: expected "),
        ("matmul", "mxfp4-nvfp4-float32", "place"),
    ):
        offer(op, third_row_is_3(op) if op in ("dequantize", "matmul") else flipped(op))
        found = run_case(find_case(op, id), "wrong", "cpu").failure
        assert found.block.splitlines()[0].strip().startswith(first), found.block
        assert op == "block_dot" or "expected" in found.block and "<" in found.block
        assert "0x" in found.block and "no block" not in found.block
        assert ("step by step" in found.block) == (op == "qdq")
        assert op != "block_dot" or re.search(r"0x\w\w \d\|\d\d\|\d\d\d", found.block)
    offer("qdq", flipped("qdq"))
    block = run_case(find_case("qdq", "mxfp4-ocp_stochastic-tails-float32"), "wrong", "cpu").failure.block
    assert "random words" in block and "expected" in block
    monkeypatch.setattr(mxref, "explain", lambda *args, **kwargs: 1 / 0)
    found = run_case(find_case("qdq", "mxfp4-ocp-tails-float32"), "wrong", "cpu").failure
    assert "no explanation: division by zero" in found.block and found.block.startswith("block [2, 32:64]")
    monkeypatch.setattr(failure, "_table", lambda columns: 1 / 0)
    found = run_case(find_case("qdq", "mxfp4-ocp-tails-float32"), "wrong", "cpu").failure
    assert found.difference.startswith("1 of ") and found.block == "no block to show: ZeroDivisionError: division by zero"


def test_a_kernel_that_raises_fails_and_the_run_goes_on(offer):
    def relu2(x):
        if x.dtype == torch.float16:
            raise NotImplementedError("no float16 yet")
        return reference("relu2", x)

    offer("relu2", relu2)
    report = verify("wrong", ops=["relu2"])
    (found,) = [o for o in report.outcomes if o.failure]
    assert found.id == "every_float16" and found.failure.difference == "it raised NotImplementedError: no float16 yet"
    assert "in relu2" in found.failure.block and (report.passed, report.failed, report.refused) == (11, 1, 0)
    offer("relu2", relu2, accepts=lambda x: "it is float16" if x.dtype == torch.float16 else None)
    report = verify("wrong", ops=["relu2"])
    assert (report.passed, report.failed, report.refused) == (11, 0, 1)
    report = verify("wrong", ops=["relu2"], strict=True)
    assert (report.passed, report.failed, report.refused) == (11, 1, 0)
    assert "refused: it is float16" in str(report)
    assert command("verify", "wrong").exit_code == 0 and command("verify", "wrong", "--strict").exit_code == 1
    offer("relu2", relu2, accepts=lambda x: 1 / 0)
    assert verify("wrong", ops=["relu2"]).failed == 11


def test_known_failures(offer, tmp_path):
    def relu2(x):
        return reference("relu2", x) + 1 if x.dtype == torch.float16 else reference("relu2", x)

    offer("relu2", relu2)
    listed = tmp_path / "known.txt"
    listed.write_text("# float16 is wrong\n\nrelu2 every_float16   off by one,  # as said\n")
    assert read_known_failures(listed) == {("relu2", "every_float16"): "off by one,  # as said"}
    listed.write_text("relu2 every_float16 off by one,  # as said\n", encoding="utf-8-sig")  # a byte order mark before relu2
    assert read_known_failures(listed) == {("relu2", "every_float16"): "off by one,  # as said"}
    for given in (listed, str(listed), {("relu2", "every_float16"): "off by one,  # as said"}):
        report = verify("wrong", ops=["relu2"], known_failures=given)
        assert (report.passed, report.failed, report.known, report.refused) == (11, 0, 1, 0)
    assert [(r.known, r.known_reasons) for r in report.rows if r.known] == [(1, ("off by one,  # as said",))]
    record = report.record()
    assert record["known"] == 1 and record["failures"] == [] and record["known_failures"][0]["id"] == "every_float16"
    assert record["known_failures"][0]["reason"] == "off by one,  # as said"
    assert "known: relu2 every_float16: off by one" in str(report) and "11 passed, 0 failed, 1 known, 0 refused" in str(
        report
    )
    assert command("verify", "wrong", "--known-failures", listed).exit_code == 0
    assert command("verify", "wrong").exit_code == 1

    with listed.open("a") as file:
        file.write("relu2 empty nothing is wrong with it\n")
    passes = command("verify", "wrong", "--known-failures", listed)
    assert passes.exit_code == 1 and "it passes, though listed as a known failure" in passes.stdout
    for line, complaint in (
        ("relu2 every_float17 x", "no case of this run .* is relu2 every_float17"),
        ("relu2 beyond_int32 x", "no case of this run .*level 1.* is relu2 beyond_int32"),
        ("relu2 empty", "line 1: 'relu2 empty': expected the op, the id of a case and a reason"),
        ("relu2 empty x\nrelu2 empty y", "line 2: relu2 empty is listed twice"),
    ):
        listed.write_text(line)
        with pytest.raises(ValueError, match=complaint):
            verify("wrong", ops=["relu2"], known_failures=listed)
        assert command("verify", "wrong", "--known-failures", listed).exit_code == 2
    listed.write_bytes(b"relu2 every_float16 caf\xe9\n")
    for file, why in (
        (tmp_path / "none", "No such file or directory"),
        (listed, "byte 23 is not UTF-8: expected a text file"),
    ):
        found = command("verify", "wrong", "--known-failures", file)
        assert found.exit_code == 2 and found.stderr == f"error: --known-failures={str(file)!r}: {why}\n"


def test_the_commands_with_a_wrong_kernel(offer, tmp_path):
    offer("relu2", lambda x: reference("relu2", x) + 1, accepts=lambda x: None if x.is_contiguous() else "not <contiguous>")
    one = command("verify", "wrong", "--op", "relu2", "--case", "every_float16")
    assert one.exit_code == 1 and "argument 0" in one.stdout and "again: mxref verify wrong" in one.stdout
    refused = ("verify", "wrong", "--op", "relu2", "--case", "strided")
    assert command(*refused).stdout == "not <contiguous>\n" and command(*refused).exit_code == 1
    assert command(*refused, "--allow-refused").exit_code == 0
    assert command(*refused, "--strict").exit_code == 1
    page, record = tmp_path / "page.html", tmp_path / "record.json"
    assert command("verify", "wrong", "--html", page, "--json", record).exit_code == 1
    assert json.loads(record.read_text())["failed"] == 8
    assert "FAILED" not in page.read_text() and "not &lt;contiguous&gt;" in page.read_text()
    stdout = command("verify", "wrong", "--html", "-")
    assert stdout.exit_code == 2 and stdout.stderr == "error: --html='-': expected a file; stdout is taken by --json alone\n"
    early = command("verify", "wrong", "--html", tmp_path / "none" / "page.html")
    assert early.exit_code == 2 and early.stdout == ""
    assert f"its directory {str(tmp_path / 'none')!r} does not exist" in early.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "record.json"]


def test_where_everything_is_refused_nothing_was_verified(offer):
    offer("relu2", lambda x: x, requires=lambda: "no such chip")
    result = command("verify", "wrong")
    assert result.exit_code == 1 and "11 refused" in result.stdout
    assert result.stderr == (
        "error: all 11 cases were refused, so nothing was verified; --allow-refused makes that exit code 0\n"
    )
    allowed = command("verify", "wrong", "--allow-refused", "--json", "-")
    assert allowed.exit_code == 0 and json.loads(allowed.stdout)["refused"] == 11 and allowed.stderr == ""


DEADLY = """
import ctypes
import os

import torch

import mxref
from mxref.registry import Kernel


def relu2(x):
    if x.dtype == torch.float16:
        os.kill(os.getpid(), 9)
    if x.dtype == torch.bfloat16:
        ctypes.CDLL(None)._exit(0)
    if x.ndim == 2 and x.numel():
        os._exit(0)
    if x.numel() == 0:
        raise SystemExit(0)
    with mxref.use():
        return mxref.functions.relu2(x)


KERNEL = Kernel("relu2", "deadly", relu2, "bitexact", ("cpu",), (torch.float32, torch.bfloat16, torch.float16))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_kernel_that_ends_its_process_fails(workers, tmp_path):
    planted(tmp_path, "deadly", DEADLY, ["relu2"])
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def run(*arguments):
        arguments = [sys.executable, "-m", "mxref", "verify", "deadly", *arguments]
        return subprocess.run(arguments, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})

    result = run("--json", "-", "--workers", str(workers))
    record = json.loads(result.stdout)
    assert result.returncode == 1 and (record["passed"], record["failed"], record["refused"]) == (5, 7, 0)
    assert {failure["id"]: failure["difference"] for failure in record["failures"]} == {
        "every_bfloat16": "the process that ran it died with exit code 0",
        "every_float16": "the process that ran it died by SIGKILL",
        "odd_offset": "the process that ran it died with exit code 0",
        **dict.fromkeys(("strided", "expanded", "negated"), "it raised SystemExit: os._exit(0)"),
        "empty": "it raised SystemExit: 0",
    }
    assert record["failures"][0]["repeat"] == "mxref verify deadly --device cpu --op relu2 --case every_bfloat16"
    if workers == 1:
        one = run("--op", "relu2", "--case", "every_bfloat16")
        assert one.returncode == 1 and one.stdout.startswith("the process that ran it died with exit code 0\nagain: mxref")
        here = run("--op", "relu2", "--case", "strided", "--workers", "0")
        assert here.returncode == 1 and here.stdout.startswith("it raised SystemExit: os._exit(0)\n")


WAITING = """
import sys
import time

import torch

from mxref.registry import Kernel


def relu2(x):
    if x.numel() == 0:
        print("waiting", file=sys.stderr, flush=True)
        time.sleep(600)
    raise ValueError


KERNEL = Kernel("relu2", "waiting", relu2, "bitexact", ("cpu",), (torch.float32,))
"""


def test_a_signal_ends_a_case_that_runs_in_this_process(tmp_path):
    planted(tmp_path, "waiting", WAITING, ["relu2"])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    asked = [sys.executable, "-m", "mxref", "verify", "waiting", "--workers", "0"]
    process = start(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(signal.SIGTERM)
    stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM and stdout == ""


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_a_limit_of_time_is_positive(seconds):
    refused = command("verify", "reference", "--op", "relu2", "--timeout", seconds)
    assert refused.exit_code == 2 and refused.stderr == f"error: --timeout={float(seconds)}: expected seconds > 0\n"


def test_an_interruption_is_no_failure(offer):
    def interrupted(x):
        raise KeyboardInterrupt

    offer("relu2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        verify("wrong", ops=["relu2"])


def test_a_kernel_that_refuses_late_has_failed(offer):
    """Asked before, it takes the call; asked again, it does not: the reference must not answer in its place."""
    asked = []

    def accepts(x):
        asked.append(x)
        return "late" if len(asked) % 2 == 0 else None

    offer("relu2", lambda x: x, accepts=accepts)
    report = verify("wrong", ops=["relu2"])
    assert report.failed == len(report.outcomes) - 1 and "it had said to take" in report.outcomes[0].failure.difference


@pytest.mark.parametrize("answer", ["", False, True, 3])
def test_an_answer_that_is_neither_none_nor_a_sentence_is_a_failure(offer, answer):
    offer("relu2", lambda x: x, accepts=lambda x: answer)
    report = verify("wrong", ops=["relu2"])
    said = f"kernel relu2.wrong: accepts returns {answer!r}: expected None or a sentence that says why not"
    assert report.failed == len(report.outcomes) - 1 and said in report.outcomes[0].failure.difference


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise SystemExit(0)", ("kernel relu2.leaving", "cannot be loaded")),
        ("import os\nos._exit(0)", ("leaving: importing it ended the process, with exit code 0",)),
    ],
)
def test_a_module_that_exits_when_it_is_imported_is_broken(source, said, tmp_path):
    planted(tmp_path, "leaving", source, ["relu2"])
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = [sys.executable, "-m", "mxref", "verify", "leaving"]
    result = subprocess.run(run, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert result.returncode == 2 and all(words in " ".join(result.stderr.split()) for words in said)


def test_after_some_deaths_the_rest_of_a_group_is_not_run():
    group = ("relu2", "-", "float32", False)
    died = lambda group, number, why: (number, why)  # noqa: E731
    ((found, outcomes),) = run_shared({group: 5}, 2, dies_after_one, died)
    killed = "the process that ran it died with exit code 7"
    rest = "not run: 3 processes had died of cases like it"
    assert found == group and outcomes == ["whole", (1, killed), (2, killed), (3, killed), (4, rest)]


def test_a_process_that_dies_between_its_last_case_and_its_end_has_failed_that_case():
    group = ("relu2", "-", "float32", False)
    died = lambda group, number, why: (number, why)  # noqa: E731
    ((_, outcomes),) = run_shared({group: 2}, 1, dies_at_the_end, died)
    assert outcomes == ["whole", (1, "the process that ran it died by signal 40")]


def test_a_case_that_does_not_end_has_failed_and_the_next_one_runs():
    group = ("relu2", "-", "float32", False)
    died = lambda group, number, why: (number, why)  # noqa: E731
    ((_, outcomes),) = run_shared({group: 3}, 1, hangs, died, timeout=1.0)
    assert outcomes == ["whole", (1, "the process that ran it died by SIGKILL: no result within 1 seconds"), "whole"]


def hangs(group, first):
    yield from ["whole"][first:]
    while first == 0:
        time.sleep(1)
    yield "whole"


def dies_at_the_end(group, first):
    yield from ["whole", "whole"][first:]
    if first == 0:
        os.kill(os.getpid(), 40)  # a real-time signal, which Python has no name for


def dies_after_one(group, first):
    if first == 0:
        yield "whole"
    if first < 5:
        os._exit(7)


def raises(group, first):
    raise KeyError(group)
    yield


def prints(group, first):
    print("a kernel speaks")
    os.write(1, b"and so does its C")
    yield "whole"


def test_what_kernels_print_is_not_on_stdout(capfd):
    list(run_shared({("relu2", "-", "float32", False, 0): 1}, 1, prints, None))
    out, err = capfd.readouterr()
    assert out == "" and "a kernel speaks" in err and "and so does its C" in err


def test_what_a_process_raises_is_raised():
    with pytest.raises(KeyError, match="relu2"):
        list(run_shared({("relu2", "-", "float32", False): 1}, 2, raises, None))


def test_processes_that_cannot_begin_are_an_error(tmp_path):
    """A script that each new process runs again, since nothing guards it."""
    script = tmp_path / "script.py"
    script.write_text("import mxref.conformance as c\nc.verify('reference', ops=['relu2'], workers=2)\n")
    found = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert found.returncode
    assert 'before it began; a script that calls this needs `if __name__ == "__main__":`' in found.stderr


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    from pathlib import Path

    from mxref import cli

    path = tmp_path / "page.html"
    path.write_text("before")
    write = Path.write_text

    def half(self, text, **options):
        write(self, text[:2], **options)
        raise OSError("disk full")

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(OSError, match="disk full"):
        cli._write(path, "after")
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_the_page(offer):
    from html.parser import HTMLParser

    offer("relu2", lambda x: reference("relu2", x) + 1, accepts=lambda x: None if x.is_contiguous() else "not <contiguous>")
    report = verify("wrong", ops=["relu2"], known_failures={("relu2", "every_float16"): "a & b"}, commit="abc123")
    page = html_page(report)
    opened, tags = [], []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)
            opened.extend([tag] if tag not in ("meta", "br") else [])

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Reader().feed(page)
    assert not opened and not {"script", "link", "img", "iframe"} & set(tags) and "url(" not in page and "http" not in page
    assert tags.count("details") == report.failed + report.known == 8 and tags.count("pre") == 8
    for shown in (
        *("width=device-width", "prefers-color-scheme: dark", "abc123", report.date, report.torch, "level"),
        *('<td class="failed">5 failed<br>2 refused<br>1 passed</td>', '<td class="known">1 known</td>', "<td>relu2</td>"),
        *(
            "not &lt;contiguous&gt;",
            "relu2 every_float16: a &amp; b",
            "2 passed, 7 failed, 1 known, 2 refused",
            "again: mxref",
        ),
    ):
        assert shown in page, shown


def test_what_kernels_refuse():
    def accepts(x, format, *, recipe=None, **others):
        return f"{format} is not <done>" if format == "nvfp4" else "it is even" if recipe == "ocp_even" else None

    kernel = registry.Kernel("qdq", "wrong", None, "bitexact", ("cpu",), DTYPES, ("mxfp4",), accepts=accepts)
    assert refusals(kernel) == ["it is even", "nvfp4 is not <done>"]
    element = registry.Kernel(
        "decode", "wrong", None, "bitexact", ("cpu",), DTYPES, accepts=lambda codes, element: element.name
    )
    assert refusals(element) == list(mxref.ELEMENT_FORMATS)
    broken = replace(element, accepts=lambda codes: None)
    assert len(refusals(broken)) == 1 and refusals(broken)[0].startswith("kernel decode.wrong: accepts raises TypeError")

    vague = replace(element, accepts=lambda codes, element: 7)
    assert refusals(vague) == ["kernel decode.wrong: accepts returns 7: expected None or a sentence that says why not"]
    mute = replace(element, accepts=mutely)
    assert refusals(mute) == ["kernel decode.wrong: accepts raises Mute: its text cannot be read: RuntimeError"]


class Mute(Exception):
    def __str__(self):
        raise RuntimeError


def mutely(*args, **kwargs):
    raise Mute


@pytest.mark.parametrize(
    "raised, said", [(Mute(), "Mute: its text cannot be read: RuntimeError"), (ValueError("\udcff"), "ValueError: \\udcff")]
)
def test_a_kernel_whose_error_is_no_text_has_failed_and_the_report_is_text(offer, raised, said):
    def fails(x):
        raise raised

    offer("relu2", fails)
    report = verify("wrong", ops=["relu2"])
    found = [outcome.failure.difference for outcome in report.outcomes if outcome.failure]
    assert len(found) >= 11 and all(text.startswith(f"it raised {said}") for text in found)
    report.to_json().encode("utf-8")


# contracts


def as_fractions(case):
    """The exact factors of a blockwise product, and alpha, by one multiplication after the other."""
    (a, b), _ = case.arguments()

    def rows(q):
        element, scale = q.format.element.values, q.format.scale.values
        return [
            [Fraction(element[c]) * Fraction(scale[row_scales[k // q.format.block_size]]) for k, c in enumerate(row)]
            for row, row_scales in zip(q.codes.tolist(), q.scales.tolist())
        ]

    scales = [torch.ones(()) if q.tensor_scale is None else q.tensor_scale for q in (a, b)]
    return rows(a), rows(b), Fraction(float(scales[0] * scales[1]))


def exact_bound(case, m, n, dtype):
    """(alpha sum ab, alpha sum|a||b|, the bound, whether every order is exact) of one output, in rationals."""
    a, b, alpha = as_fractions(case)
    products = [x * y for x, y in zip(a[m], b[n])]
    exact, total = sum(products), sum(map(abs, products))
    steps = Fraction(len(products), 2**23)
    eps, smallest = Fraction(torch.finfo(dtype).eps), Fraction(torch.finfo(dtype).smallest_normal)
    bound = steps / (1 - steps) * alpha * total + eps / 2 * alpha * abs(exact) + eps * smallest / 2
    lowest = min(Fraction(p.numerator & -p.numerator, p.denominator) for p in products if p) if any(products) else None
    return alpha * exact, bound, lowest is None or total <= 2**24 * lowest


def small_matmul(a_format, b_format, dtype=torch.float32, length=80):
    a = mxref.quantize(inputs.spread_normal(4, length, seed=31), a_format)
    b = mxref.quantize(inputs.spread_normal(3, length, seed=32), b_format)
    return Case("matmul", "small", "-", "-", lambda: ((a, b), {"out_dtype": dtype}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("a_format, b_format", [("mxfp8_e4m3", "mxfp8_e5m2"), ("nvfp4", "nvfp4"), ("nvfp4", "mxint8")])
def test_bounded_is_the_bound(a_format, b_format, dtype):
    """The last value of the output dtype within the exact bound passes, the next one does not, on both sides."""
    case = small_matmul(a_format, b_format, dtype)
    expected = reference("matmul", *case.arguments()[0], **case.arguments()[1])
    assert contracts.bounded(expected, expected, case) is None
    for m, n in ((0, 0), (3, 1)):
        exact, bound, _ = exact_bound(case, m, n, dtype)
        for side in (-1, 1):
            toward = torch.tensor(float(side) * float("inf"), dtype=dtype)
            value = expected[m, n]
            while abs(Fraction(float(torch.nextafter(value, toward))) - exact) <= bound:
                value = torch.nextafter(value, toward)
            inside, outside = expected.clone(), expected.clone()
            inside[m, n], outside[m, n] = value, torch.nextafter(value, toward)
            assert contracts.bounded(inside, expected, case) is None
            assert contracts.bounded(outside, expected, case).startswith("1 of 12 outputs are beyond the bound")


def test_certified_is_every_bit_where_no_order_rounds():
    """The neighbour of the right value is refused where rationals certify the output, and passes elsewhere."""
    seen = set()
    for formats, length in ((("mxfp4", "mxfp8_e5m2"), 336), (("mxfp6_e2m3", "mxfp8_e4m3"), 80), (("nvfp4", "nvfp4"), 80)):
        case = small_matmul(*formats, length=length)
        expected = reference("matmul", *case.arguments()[0], **case.arguments()[1])
        assert contracts.certified(expected, expected, case) is None
        for m, n in ((0, 0), (1, 0), (1, 2), (2, 1), (3, 1), (3, 2)):
            wrong = expected.clone()
            wrong[m, n] = torch.nextafter(wrong[m, n], torch.tensor(float("inf")))
            certain = exact_bound(case, m, n, torch.float32)[2]
            seen.add(certain)
            assert contracts.bounded(wrong, expected, case) is None
            found = contracts.certified(wrong, expected, case)
            assert (found is not None and "certified outputs" in found) == certain
            wrong[m, n] *= 1.01
            assert contracts.certified(wrong, expected, case) is not None
    assert seen == {True, False}


def test_contracts_at_the_edges():
    q = mxref.quantize(torch.tensor([[1.0] * 32, [0.0] * 32, [torch.nan] * 32]), "mxfp8_e4m3")
    case = Case("matmul", "nan", "-", "-", lambda: ((q, q), {}))
    expected = reference("matmul", q, q)
    for contract in contracts.CONTRACTS.values():
        assert contract(expected, expected, case) is None
        for m, n, value in ((0, 2, 0.0), (0, 1, 1e-30), (0, 0, torch.nan), (2, 2, -torch.nan)):
            wrong = expected.clone()
            wrong[m, n] = value
            if value != value:  # another NaN than the canonical one
                wrong.view(torch.int32)[m, n] = 0x7FC00001
            assert contract(wrong, expected, case) is not None, (contract, m, n)
        assert contract(expected.double(), expected, case).startswith("dtype")
        assert contract(expected[:2], expected, case).startswith("shape")

    big = mxref.quantize(
        torch.full((1, 32), 45.25), "mxfp8_e4m3"
    )  # 32 products of 44 * 44 = 61952 or so, near float16's end
    case = Case("matmul", "large", "-", "-", lambda: ((big, big), {"out_dtype": torch.float16}))
    expected = reference("matmul", big, big, out_dtype=torch.float16)
    assert expected.isfinite().all() and contracts.bounded(expected * torch.inf, expected, case) is not None
    bigger = mxref.quantize(torch.full((1, 32), 64.0), "mxfp8_e4m3")
    case = Case("matmul", "overflow", "-", "-", lambda: ((bigger, bigger), {"out_dtype": torch.float16}))
    expected = reference("matmul", bigger, bigger, out_dtype=torch.float16)
    assert expected.isinf().all() and contracts.bounded(expected, expected, case) is None
    assert contracts.bounded(-expected, expected, case) is not None
    assert contracts.bounded(torch.full_like(expected, 65504), expected, case) is not None

    biased = Case("matmul", "biased", "-", "-", lambda: ((q, q), {"bias": torch.ones(3)}))
    with pytest.raises(ValueError, match="before a bias"):
        contracts.bounded(expected, expected, biased)


def test_the_runner_asks_what_the_kernel_promises(offer):
    """A product in another order is bounded, and certified, not bit-exact; weight-only and dequantized products too."""

    def another_order(a, b, *, bias=None, out_dtype=torch.float32, semantics="blockwise"):
        factors = a, b
        alpha = 1.0
        if isinstance(a, torch.Tensor) or semantics == "dequantized":
            a = a if isinstance(a, torch.Tensor) else mxref.dequantize(a, out_dtype)
            factors = a.float(), mxref.dequantize(b, a.dtype).float()
        else:
            alpha = contracts._tensor_factor(a) * contracts._tensor_factor(b)
            factors = contracts._without_tensor_scale(a).float(), contracts._without_tensor_scale(b).float()
        return (alpha * (factors[0].flip(-1) @ factors[1].flip(-1).T)).to(out_dtype)

    formats = ("mxfp8_e4m3-mxfp8", "nvfp4-", "bfloat16-mxfp8")  # of the plain cases: no bias, no specials
    ids = [case.id for case in cases("matmul") if case.id.startswith(formats)]
    ids = [id for id in ids if not id.endswith(("every_scale", "specials"))]
    ids = [id for id in ids if (id.endswith(("float32", "bfloat16")) and "bias" not in id) or id.startswith(formats[2])]
    dequantized = small_matmul("mxfp8_e4m3", "nvfp4")
    arguments = dequantized.arguments()
    dequantized = replace(dequantized, arguments=lambda: (arguments[0], {"semantics": "dequantized"}))
    chosen = [*(find_case("matmul", id) for id in ids), dequantized]
    kinds = {}
    for contract in contracts.CONTRACTS:
        offer("matmul", another_order, contract)
        kinds[contract] = {run_case(case, "wrong", "cpu").kind for case in chosen}
    assert kinds == {"bitexact": {"passed", "failed"}, "certified": {"passed"}, "bounded": {"passed"}}
    offer("matmul", lambda a, b, **others: 1.001 * another_order(a, b, **others), "bounded")
    assert run_case(chosen[0], "wrong", "cpu").kind == "failed"
    with pytest.raises(ValueError, match="a kernel for qdq declares contract='bounded': expected 'bitexact'"):
        offer("qdq", None, "bounded")


@pytest.mark.parametrize(
    "format, act_format", [("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp8_e4m3"), ("mxint8", "mxfp4")]
)
def test_a_layer_can_be_made_to_multiply_given_rows(format, act_format):
    """What the second product of such a layer gives is the product of the rows that were meant, all of them to the bit."""
    for case in cases("moe_experts"):
        if case.id in (f"{format}-{act_format}-extremes", f"{format}-{act_format}-ties"):
            (x, _, w2, *_), options = case.arguments()
            rows, scales = x[:, : w2.shape[2]] * 64.0, options["act_tensor_scales"]
            q = mxref.quantize(rows, act_format, tensor_scale=None if scales is None else scales[1])
            assert torch.equal(mxref.dequantize(q), rows)
            terms = reference("moe_experts", *case.arguments()[0], **options)
            assert mxref.comparison.difference(terms[:, 0], reference("matmul", q, w2[0])) is None


@pytest.mark.parametrize("op, id", [("matmul", "nvfp4-beyond_int32"), ("moe_experts", "mxfp8_e4m3-mxfp8_e4m3-beyond_int32")])
def test_products_and_layers_are_repeated_too(op, id, offer):
    """Matmuls along the rows of A, layers along their experts, each copy with its own tokens: every copy is compared."""
    case = find_case(op, id)
    args, options = case.arguments()
    large = (args[0].shape[0] * args[1].shape[0]) if op == "matmul" else args[1].packed.numel()
    assert large * case.repeats > 2**31 and case.level == 2
    assert run_case(case, "reference", "cpu").kind == "refused"
    case = replace(case, repeats=3)
    assert run_case(case, "reference", "cpu").kind == "passed"

    def beyond(*args, **kwargs):  # as if an index had overflowed in the last copy
        y = reference(op, *args, **kwargs)
        y[-1, -1:].view(torch.uint8)[0] ^= 1
        return y

    offer(op, beyond)
    assert run_case(case, "wrong", "cpu").failure.difference.startswith("copy 2 of 3: ")
