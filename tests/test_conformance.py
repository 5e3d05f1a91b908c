"""The conformance kit: it passes what is right, finds what is wrong, and the Triton kernels pass it in the interpreter."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

import mxref
from mxref import registry
from mxref.conformance import cases, runner, verify
from mxref.conformance.cases import OPS

INTERPRETED = """
import torch
from mxref.conformance import cases
from mxref.conformance.runner import run_case

torch.set_num_threads(1)
everywhere = ("tails-bfloat16", "specials-float32")
once = ("axis_", "transposed", "strided", "one_element", "empty", "tails-", "specials-")
for op in {ops}:
    for case in cases(op):
        if op in ("quantize", "qdq"):
            format, recipe, label = case.id.split("-", 2)
            by_default = recipe in ("ocp", "nvidia") and label.startswith(once)
            if not (by_default or label in everywhere):
                continue
        elif op == "encode" and ("every" in case.id or "random" in case.id):
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
    [("encode", "decode", "dequantize"), ("quantize",), ("qdq",), ("exp", "sigmoid", "silu", "gelu_tanh", "swiglu_oai")],
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
    one, two = verify(ops=["decode"]), verify(ops=["decode"], workers=2)
    assert one.outcomes == two.outcomes


def test_every_case_has_its_own_id_and_every_op_has_cases():
    for op in OPS:
        ids = [case.id for case in cases(op, level=2)]
        assert ids and len(ids) == len(set(ids)), op


def test_a_wrong_kernel_is_found(monkeypatch):
    """A kernel that loses the sign of zero: seen, shown in hex, with the command that repeats it."""

    def relu2(x):
        with mxref.use():
            return mxref.functions.relu2(x) * -1 * -1 - 0.0 if x.numel() != 65536 else -mxref.functions.relu2(-x)

    wrong = registry.Kernel("relu2", "wrong", relu2, "bitexact", ("cpu",), (torch.float32, torch.bfloat16, torch.float16))
    monkeypatch.setattr(registry, "_offers", lambda: {("relu2", "wrong"): None})
    monkeypatch.setattr(registry, "kernel", lambda op, backend: wrong)
    monkeypatch.setattr(runner, "kernels", lambda backend: (wrong,))
    report = verify("wrong", ops=["relu2"])
    failed = {outcome.id: outcome.failure for outcome in report.outcomes if outcome.failure}
    assert {"every_bfloat16", "every_float16"} <= failed.keys() and report.failed == len(failed)
    assert "0x" in failed["every_bfloat16"].difference
    assert failed["every_bfloat16"].repeat == "mxref verify wrong --device cpu --op relu2 --case every_bfloat16"
    assert "FAILED relu2 every_bfloat16" in str(report)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="op='expp': expected one of .*exp"):
        verify(ops=["expp"])
    with pytest.raises(ValueError, match="level=3"):
        verify(level=3)
    with pytest.raises(ValueError, match="workers=0"):
        verify(workers=0)
    with pytest.raises(ValueError, match="backend='nowhere'"):
        verify("nowhere")


def test_the_commands():
    def run(*arguments):
        return subprocess.run([sys.executable, "-m", "mxref", *arguments], capture_output=True, text=True)

    passed = run("verify", "--op", "decode", "--json", "-")
    assert passed.returncode == 0 and json.loads(passed.stdout)["failed"] == 0
    assert run("verify", "--op", "decode", "--case", "e2m1-every_code").stdout == "passed\n"
    for bad in (("--op", "nothing"), ("--case", "x"), ("--op", "decode", "--case", "x"), ("nowhere",)):
        refused = run("verify", *bad)
        assert refused.returncode == 2 and refused.stderr.startswith("error: ") and refused.stderr.count("\n") == 1, bad
    listed = json.loads(run("kernels", "--json", "-").stdout)
    assert {row["backend"] for row in listed} == {"triton"} and {"qdq", "encode"} <= {row["op"] for row in listed}
