"""Dispatch: kernels come through entry points, are checked when loaded, say why they refuse, and nothing is silent."""

import logging
import subprocess
import sys
import threading

import pytest
import torch

import mxref
from mxref import registry

MODULE = """
import torch
import mxref
from mxref.registry import Kernel

CALLS = []

def exp(x):
    CALLS.append(x)
    with mxref.use():
        return mxref.functions.exp(x)

def wrong_exp(x):
    with mxref.use():
        return torch.nextafter(mxref.functions.exp(x), torch.tensor(0.0))

def other_signature(values):
    return values

def qdq(x, format, *, recipe=None, tensor_scale=None, axis=-1, seed=None, gradient="straight_through"):
    CALLS.append(x)
    assert not x.requires_grad or not torch.is_grad_enabled()
    with mxref.use():
        return mxref.qdq(x.detach(), format, recipe=recipe, tensor_scale=tensor_scale, axis=axis, seed=seed)

F32 = (torch.float32,)
EXP = Kernel("exp", "fake", exp, "bitexact", ("cpu",), F32, accepts=lambda x: "x is empty" if x.numel() == 0 else None)
WRONG = Kernel("exp", "wrong", wrong_exp, "bitexact", ("cpu",), F32)
RENAMED = Kernel("silu", "fake", exp, "bitexact", ("cpu",), F32)
SIGNATURE = Kernel("silu", "fake", other_signature, "bitexact", ("cpu",), F32)
AWAY = Kernel("exp", "away", exp, "bitexact", ("cpu",), F32, requires=lambda: "the moon is not full")
QDQ = Kernel("qdq", "fake", qdq, "bitexact", ("cpu",), F32)
NOT_A_KERNEL = exp
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a package with the given entry points, for one test."""

    def installed(*lines: str, package: str = "fake") -> None:
        folder = tmp_path / package
        info = folder / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[mxref.kernels]", *lines]) + "\n")
        (folder / f"{package}_kernels.py").write_text(MODULE)
        monkeypatch.syspath_prepend(str(folder))
        forget()

    def forget() -> None:
        for name in ("fake_kernels", "other_kernels"):
            sys.modules.pop(name, None)
        for cached in (registry._offers, registry.kernel, registry._missing, registry._log_once):
            cached.cache_clear()

    forget()
    yield installed
    monkeypatch.undo()
    forget()


def test_the_reference_answers_unless_asked(install):
    install("exp.fake = fake_kernels:EXP")
    x = torch.randn(5)
    mxref.functions.exp(x)
    assert "fake_kernels" not in sys.modules, "nothing may be imported before it is asked for"
    with mxref.use("fake"):
        mxref.functions.exp(x)
    assert len(sys.modules["fake_kernels"].CALLS) == 1
    mxref.functions.exp(x)
    assert len(sys.modules["fake_kernels"].CALLS) == 1


def test_the_first_backend_that_takes_the_call_answers(install):
    install("exp.fake = fake_kernels:EXP", "exp.away = fake_kernels:AWAY")
    with mxref.use("away", "fake"):
        told = mxref.explain_dispatch("exp", torch.ones(2))
        assert told.backend == "fake" and told.refusals == (("away", "the moon is not full"),)
        assert "fake_kernels" in sys.modules and not sys.modules["fake_kernels"].CALLS, "explaining runs nothing"
        for refused, why in ((torch.ones(2).half(), "torch.float16"), (torch.ones(0), "x is empty")):
            told = mxref.explain_dispatch(mxref.functions.exp, refused)
            assert told.backend == "reference" and why in str(told)
        assert mxref.explain_dispatch("qdq", torch.ones(2), "mxfp4").refusals[1] == ("fake", "it has no kernel for qdq")
    assert str(mxref.explain_dispatch("exp", torch.ones(2))) == "exp: reference"


def test_a_refusal_is_logged_once_and_raised_under_strict(install, caplog):
    install("exp.fake = fake_kernels:EXP")
    with caplog.at_level(logging.WARNING, "mxref"), mxref.use("fake"):
        for _ in range(3):
            assert mxref.functions.exp(torch.ones(2).half()).dtype == torch.float16
    assert len(caplog.records) == 1 and "float16" in caplog.text and "the reference answers" in caplog.text
    with mxref.use("fake", strict=True), pytest.raises(RuntimeError, match="exp.*fake: .*float16"):
        mxref.functions.exp(torch.ones(2).half())


def test_check_finds_the_first_differing_bit(install):
    install("exp.fake = fake_kernels:EXP", "exp.wrong = fake_kernels:WRONG")
    x = torch.tensor([0.0, 1.0])
    with mxref.use("fake", check=True):
        mxref.functions.exp(x)
    with (
        mxref.use("wrong", check=True),
        pytest.raises(AssertionError, match=r"(?s)exp.wrong.*0x3f7fffff .*expected 0x3f800000"),
    ):
        mxref.functions.exp(x)
    with mxref.use("wrong"):
        assert mxref.functions.exp(x)[0] < 1


def test_gradients_are_the_references(install):
    install("qdq.fake = fake_kernels:QDQ")
    x = torch.linspace(-7, 7, 32, requires_grad=True)
    with mxref.use("fake", strict=True):
        y = mxref.qdq(x, "mxfp4", gradient="clipped")
    assert sys.modules["fake_kernels"].CALLS, "the forward goes to the kernel"
    y.sum().backward()
    expected = x.detach().clone().requires_grad_()
    mxref.qdq(expected, "mxfp4", gradient="clipped").sum().backward()
    assert torch.equal(x.grad, expected.grad) and 0 < x.grad.sum() < 32


def test_threads_do_not_see_each_others_selection(install):
    install("exp.fake = fake_kernels:EXP")
    seen = []
    with mxref.use("fake"):
        thread = threading.Thread(target=lambda: seen.append(mxref.explain_dispatch("exp", torch.ones(2)).backend))
        thread.start()
        thread.join()
    assert seen == ["reference"]


def test_unknown_names(install):
    install("exp.fake = fake_kernels:EXP")
    with pytest.raises(ValueError, match="backend='fast': expected one of .*fake"), mxref.use("fast"):
        pass
    with pytest.raises(ValueError, match="op='expp': expected one of .*exp"):
        mxref.explain_dispatch("expp", torch.ones(2))


@pytest.mark.parametrize(
    "line, error",
    [
        ("silu.fake = fake_kernels:SIGNATURE", "signature .*values.*expected that of mxref's silu"),
        ("silu.fake = fake_kernels:RENAMED", None),
        ("exp.fake = fake_kernels:RENAMED", "says that it is silu.fake"),
        ("exp.fake = fake_kernels:NOT_A_KERNEL", "is a function: expected a mxref.registry.Kernel"),
        ("exp.fake = fake_kernels:MISSING", "cannot be loaded: AttributeError"),
        ("exp.fake = no_such_module:KERNEL", "fake 1.0.* cannot be loaded: ModuleNotFoundError"),
        ("nonsense.fake = fake_kernels:EXP", "op='nonsense'"),
    ],
)
def test_a_broken_kernel_never_turns_into_the_reference(install, line, error):
    install(line)
    op = line.split(".")[0]
    if error is None:
        assert registry.kernel(op, "fake").op == op
        return
    with pytest.raises((RuntimeError, ValueError), match=error):
        registry.kernel(op, "fake")
    if op in registry.OPS:
        with mxref.use("fake"), pytest.raises(RuntimeError, match=error):
            getattr(mxref.functions, op)(torch.ones(2))


@pytest.mark.parametrize("name", ["exp", "exp.", ".fake", "exp.fake.fast", "exp.reference"])
def test_an_entry_point_has_the_name_of_an_op_and_a_backend(install, name):
    install(f"{name} = fake_kernels:EXP")
    with pytest.raises(RuntimeError, match="expected a name <op>.<backend>"):
        registry.backends()


def test_two_packages_may_not_claim_one_kernel(install):
    install("exp.fake = fake_kernels:EXP")
    install("exp.fake = other_kernels:EXP", package="other")
    with pytest.raises(RuntimeError, match="exp.fake"):
        registry.backends()


def test_the_environment_selects():
    script = "import torch, mxref; mxref.functions.exp(torch.ones(2))"
    environment = {"MXREF_BACKENDS": "nowhere", "PATH": "", "PYTHONPATH": ""}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and "backend='nowhere'" in result.stderr


def test_a_kernel_names_its_contract():
    with pytest.raises(ValueError, match="contract='exact': expected one of bitexact, certified, bounded"):
        registry.Kernel("exp", "fake", torch.exp, "exact", ("cpu",), (torch.float32,))
