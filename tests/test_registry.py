"""Dispatch: kernels come through entry points, are checked when loaded, say why they refuse, and nothing is silent."""

import contextlib
import json
import logging
import re
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
AT_IMPORT = mxref.functions.exp(torch.zeros(1))  # by the reference, whatever is selected: this module has no kernel yet

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

def overwriting_exp(x):
    y = exp(x)
    x += 1
    return y

OVERWRITING = Kernel("exp", "overwriting", overwriting_exp, "bitexact", ("cpu",), F32)
TRAINED = Kernel("exp", "trained", lambda x: torch.nn.Parameter(exp(x)), "bitexact", ("cpu",), F32)
LIMITED = Kernel("qdq", "limited", qdq, "bitexact", ("cpu",), F32, ("mxfp4",))
DECODING = Kernel(
    "dequantize", "decoding", lambda q, dtype=torch.float32: q, "bitexact", ("cpu",), (torch.uint8,), ("mxfp4", "nvfp4")
)
PRODUCTS = Kernel(
    "matmul", "products", mxref.matmul.__wrapped__, "certified", ("cpu",), (torch.uint8, *F32), ("mxfp4", "nvfp4")
)
ENCODING = Kernel("encode", "encoding", mxref.encode.__wrapped__, "bitexact", ("cpu",), F32, ("e2m1",))
VAGUE = Kernel("exp", "vague", exp, "bitexact", ("cpu",), F32, accepts=lambda x: False)
RAISING = Kernel("exp", "raising", exp, "bitexact", ("cpu",), F32, accepts=lambda x: x.nothing)
UNREADY = Kernel("exp", "unready", exp, "bitexact", ("cpu",), F32, requires=lambda: 1 / 0)
BUILTIN = Kernel("exp", "builtin", min, "bitexact", ("cpu",), F32)
NUMBER = Kernel("exp", "number", 3, "bitexact", ("cpu",), F32)
"""


MODULES = {
    "leaving": "import os\nos._exit(7)",
    "exiting": "raise SystemExit(3)",
    "skipped": "raise BaseException('two lines\\n[/b] of it')",
    "asking": MODULE
    + "KERNEL = Kernel('exp', 'asking', exp, 'bitexact', ('cpu',), F32, requires=lambda: 1 / 0)\nprint('hm')",
}


def command(*arguments):
    """`mxref` in this process, where packages are installed."""
    from typer.testing import CliRunner

    from mxref.cli import app

    return CliRunner().invoke(app, arguments)


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
        for name in ("fake_kernels", "other_kernels", *MODULES):
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


def test_check_finds_the_first_differing_bit(install, monkeypatch):
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
    monkeypatch.setenv("MXREF_CHECK", "1")
    with mxref.use("wrong"), pytest.raises(AssertionError, match=r"exp.wrong"):
        mxref.functions.exp(x)


def test_check_sees_what_a_kernel_does_beside_its_result(install):
    install("exp.overwriting = fake_kernels:OVERWRITING", "exp.trained = fake_kernels:TRAINED")
    said = (
        r"^exp.overwriting overwrote a tensor that it was given: 0: 2 of 2 values differ in their bits\n  \[0\]: got 0x3f8"
    )
    with mxref.use("overwriting", check=True), pytest.raises(AssertionError, match=said):
        mxref.functions.exp(torch.zeros(2))
    with mxref.use("trained", check=True), pytest.raises(AssertionError, match="exp.trained .*: requires_grad is True"):
        mxref.functions.exp(torch.zeros(2))


@pytest.mark.parametrize("value, checks", [("", 0), ("0", 0), ("false", 0), ("No", 0), ("off", 0), ("1", 1), ("True", 1)])
def test_the_environment_checks_if_it_says_so(install, monkeypatch, value, checks):
    install("exp.wrong = fake_kernels:WRONG")
    monkeypatch.setenv("MXREF_CHECK", value)
    with mxref.use("wrong"), pytest.raises(AssertionError) if checks else contextlib.nullcontext():
        mxref.functions.exp(torch.ones(2))


def test_an_unknown_value_in_the_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("MXREF_CHECK", "maybe")
    with pytest.raises(ValueError, match="^MXREF_CHECK='maybe' in the environment: expected one of 1, .*off, or nothing$"):
        with mxref.use():
            pass


@pytest.mark.parametrize(
    "backend, said",
    [
        ("raising", "accepts raises AttributeError: 'Tensor' object has no attribute 'nothing'"),
        ("unready", "requires raises ZeroDivisionError: division by zero"),
    ],
)
def test_a_kernel_that_raises_when_asked_is_named(install, backend, said):
    install("exp.raising = fake_kernels:RAISING", "exp.unready = fake_kernels:UNREADY")
    with mxref.use(backend):
        for ask in (mxref.functions.exp, lambda x: mxref.explain_dispatch("exp", x)):
            with pytest.raises(RuntimeError, match=f"^kernel exp.{backend}: {said}$"):
                ask(torch.ones(2))
        with pytest.raises(TypeError, match="^x has dtype|^x .*float32"):  # what is wrong with the arguments comes first
            mxref.functions.exp([1.0])


def test_a_list_that_autograd_watches_is_the_references():
    for parts in ([torch.ones(1), torch.ones(1, requires_grad=True)], (torch.ones(1, requires_grad=True),)):
        assert registry._records_gradients((parts,), {}) and registry._records_gradients((), {"terms": parts})
        with torch.no_grad():
            assert not registry._records_gradients((parts,), {})
    assert not registry._records_gradients(([torch.ones(1)],), {})


def test_an_answer_that_is_no_sentence_names_the_kernel(install):
    install("exp.vague = fake_kernels:VAGUE")
    said = "^kernel exp.vague: accepts returns False: expected None or a sentence that says why not$"
    with mxref.use("vague"):
        for ask in (mxref.functions.exp, lambda x: mxref.explain_dispatch("exp", x)):
            with pytest.raises(RuntimeError, match=said):
                ask(torch.ones(2))


def test_dtype_and_device_are_those_of_the_first_parameter_in_whatever_order_it_is_given(install):
    install("qdq.limited = fake_kernels:LIMITED")
    x = torch.ones(2, 32)
    with mxref.use("limited"):
        for options in ({"format": "mxfp4", "x": x.bfloat16()}, {"x": x.bfloat16(), "format": "mxfp4"}):
            told = mxref.explain_dispatch("qdq", **options)
            assert told.refusals == (("limited", "qdq of torch.bfloat16: the kernel takes torch.float32"),)
        assert "on meta: the kernel runs on cpu" in str(mxref.explain_dispatch("qdq", format="mxfp4", x=x.to("meta")))
        assert mxref.explain_dispatch("qdq", format="mxfp4", x=x).backend == "limited"
        mxref.qdq(format="mxfp4", x=x.bfloat16())
        assert not sys.modules["fake_kernels"].CALLS


def test_a_kernel_gets_no_format_that_it_does_not_declare(install):
    names = {"qdq": "limited", "dequantize": "decoding", "matmul": "products", "encode": "encoding"}
    install(*(f"{op}.{backend} = fake_kernels:{backend.upper()}" for op, backend in names.items()))
    x = torch.ones(2, 32)
    four, eight, other = (mxref.quantize(x, format) for format in ("mxfp4", "mxfp8_e4m3", "nvfp4"))

    def told(op, *args, **kwargs):
        with mxref.use(names[op]):
            found = mxref.explain_dispatch(op, *args, **kwargs)
        return found.refusals[0][1] if found.refusals else None

    assert told("qdq", x, "mxfp4") is told("qdq", format=mxref.BLOCK_FORMATS["mxfp4"], x=x) is None
    for refused in ("nvfp4", mxref.BLOCK_FORMATS["nvfp4"]):
        assert told("qdq", x, refused) == told("qdq", x=x, format=refused) == "qdq of nvfp4: the kernel takes mxfp4"
    assert told("dequantize", four) is None
    assert (
        told("dequantize", eight)
        == told("dequantize", q=eight)
        == ("dequantize of mxfp8_e4m3: the kernel takes mxfp4, nvfp4")
    )
    assert told("matmul", four, other) is told("matmul", x, b=four) is None
    for pair in ((four, eight), (eight, four)):
        assert told("matmul", *pair) == "matmul of mxfp8_e4m3: the kernel takes mxfp4, nvfp4"
    assert told("encode", x, "e2m1") is None and told("encode", x, "e4m3") == "encode of e4m3: the kernel takes e2m1"


def test_a_contract_that_an_op_does_not_have_is_refused_at_load(install, tmp_path):
    """So `check=True` never runs beside a kernel of which it would compare nothing."""
    install("exp.loose = loose_kernels:LOOSE")
    loose = MODULE + "LOOSE = Kernel('exp', 'loose', wrong_exp, 'certified', ('cpu',), F32)\n"
    (tmp_path / "fake" / "loose_kernels.py").write_text(loose)
    said = "exp.loose .* cannot be loaded: ValueError: a kernel for exp declares contract='certified': expected 'bitexact'"
    with mxref.use("loose", check=True), pytest.raises(RuntimeError, match=said):
        mxref.functions.exp(torch.ones(2))
    sys.modules.pop("loose_kernels", None)


def test_selections_may_end_in_any_order(install):
    install("exp.fake = fake_kernels:EXP", "exp.away = fake_kernels:AWAY")
    first, second, counting = mxref.use("fake"), mxref.use("away"), registry.counted()
    first.__enter__()
    second.__enter__()
    counting.__enter__()
    first.__exit__(None, None, None)
    assert registry.selected() == ("away",)
    second.__exit__(None, None, None)
    assert registry.selected() == ("away",)  # which is being counted
    counting.__exit__(None, None, None)
    assert registry.selected() == ()


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
    for given in (3, ["exp"]):
        with pytest.raises(TypeError, match=f"^op={re.escape(repr(given))}: expected an op or its name, one of .*exp"):
            mxref.explain_dispatch(given, torch.ones(2))
    with pytest.raises(TypeError, match=r"^backend=\['fake'\]: expected names, each an argument of its own, of .*fake"):
        with mxref.use(["fake"]):
            pass


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
    install(f"{name} = fake_kernels:EXP", "exp.away = fake_kernels:AWAY")
    op, _, backend = name.partition(".")
    for asked in (lambda: registry.kernel(op, backend), mxref.use(backend).__enter__):
        with pytest.raises(RuntimeError, match=f"^entry point '{name}' of fake 1.0: expected a name <op>.<backend>$"):
            asked()
    others_go_on()


def test_two_packages_may_not_claim_one_kernel(install):
    install("exp.fake = fake_kernels:EXP")
    install("exp.fake = other_kernels:EXP", package="other")
    with pytest.raises(RuntimeError, match="^(fake|other) 1.0 and (fake|other) 1.0 both offer exp.fake: uninstall one"):
        registry.kernel("exp", "fake")
    with pytest.raises(RuntimeError, match="both offer exp.fake"), mxref.use("fake"):
        pass
    assert "fake" not in registry.backends() and ("exp", "fake") in registry.offers()


def others_go_on():
    """The backend `away`, of the same package as one with a fault, is what it would be without it."""
    assert "away" in registry.backends() and [k.op for k in registry.kernels("away")] == ["exp"]
    with mxref.use("away"):
        assert mxref.explain_dispatch("exp", torch.ones(2)).refusals == (("away", "the moon is not full"),)


def test_a_backend_with_an_unknown_op_is_broken_and_the_others_go_on(install):
    install("silo.fake = fake_kernels:EXP", "exp.fake = fake_kernels:EXP", "exp.away = fake_kernels:AWAY")
    said = "^entry point 'silo.fake' of fake 1.0: op='silo': expected one of .*silu"
    for asked in (lambda: registry.kernel("exp", "fake"), lambda: registry.kernels("fake"), mxref.use("fake").__enter__):
        with pytest.raises(RuntimeError, match=said):
            asked()
    others_go_on()
    found = command("verify", "fake")
    assert found.exit_code == 2 and found.stderr.count("\n") == 1 and "op='silo'" in found.stderr


LISTED = {  # the entry point, and what `mxref kernels` says of it
    "exp.fake = fake_kernels:EXP": "runs",
    "silu.gone = no_such_module:KERNEL": "silu.gone .* cannot be loaded: ModuleNotFoundError: .* 'no_such_module'",
    "silu.lacking = fake_kernels:KERNEL": "cannot be loaded: AttributeError: .* no attribute 'KERNEL'",
    "silu.strange = fake_kernels:SIGNATURE": "says that it is silu.fake",
    "silu.fake = fake_kernels:SIGNATURE": r"has the signature \(values\)",
    "silu.leaving = leaving:KERNEL": "leaving: importing it ended the process, with exit code 7",
    "silu.exiting = exiting:KERNEL": "cannot be loaded: SystemExit: 3",
    "silu.skipped = skipped:KERNEL": r"cannot be loaded: BaseException: two lines \[/b\] of it",
    "silu.value = not a value": "cannot be loaded",
    "silo.odd = fake_kernels:EXP": "op='silo': expected one of",
    "silu = fake_kernels:EXP": "expected a name <op>.<backend>",
    "exp.asking = asking:KERNEL": "requires raises ZeroDivisionError: division by zero",
}


def test_the_list_of_kernels_says_what_is_wrong_and_goes_on(install, tmp_path):
    install(*LISTED)
    for name, source in MODULES.items():
        (tmp_path / "fake" / f"{name}.py").write_text(source)
    found = command("kernels", "--json", str(tmp_path / "kernels.json"))
    assert found.exit_code == 0
    listed = json.loads((tmp_path / "kernels.json").read_text())
    here = {f"{row['op']}.{row['backend']}".rstrip("."): row["here"] for row in listed}
    assert here.keys() >= {"qdq.inductor", "qdq.triton"} and len(here) == len(listed)
    for line, said in LISTED.items():
        name = line.split(" = ")[0]
        assert re.search(said, here[name]) and "\n" not in here[name], name
        assert (here[name] == "runs") == (said == "runs") == (not here[name].startswith("broken: "))
    rows = found.stdout.splitlines()
    assert all(sum(f" {name} " in row for row in rows) == 1 for name in MODULES) and "hm" not in found.stdout
    one = command("verify", "leaving")
    assert one.exit_code == 2 and one.stderr == "error: leaving: importing it ended the process, with exit code 7\n"


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"requires": True}, "^requires=True: expected a function"),
        ({"accepts": None}, "^accepts=None: expected a function"),
        ({"devices": "cpu"}, "^devices='cpu': expected a tuple of str"),
        ({"formats": "mxfp4"}, "^formats='mxfp4': expected a tuple of str"),
        ({"formats": ["mxfp4"]}, r"^formats=\['mxfp4'\]: expected a tuple of str"),
        ({"dtypes": ("float32",)}, r"^dtypes=\('float32',\): expected a tuple of dtype"),
    ],
)
def test_what_a_kernel_declares_is_checked(fields, message):
    declared = {"op": "exp", "backend": "fake", "function": torch.exp, "contract": "bitexact", "devices": ("cpu",)}
    with pytest.raises(TypeError, match=message):
        registry.Kernel(**{**declared, "dtypes": (torch.float32,), **fields})


@pytest.mark.parametrize("name, error", [("builtin", "no signature found"), ("number", "3 is not a callable object")])
def test_a_function_without_a_signature_is_no_kernels(install, name, error):
    install(f"exp.{name} = fake_kernels:{name.upper()}")
    with pytest.raises(RuntimeError, match=f"^kernel exp.{name} .*: {error}"):
        registry.kernel("exp", name)


def test_a_broken_backend_asked_for_by_a_command_is_one_line(install):
    install("dequantize.fake = no_such_module:KERNEL", "qdq.fake = no_such_module:KERNEL")
    for arguments in (("verify", "fake"), ("eval", "--backend", "fake", "--formats", "mxfp4", "--tokens", "256")):
        found = command(*arguments)
        assert found.exit_code == 2 and found.stderr.count("\n") == 1, arguments
        assert "ModuleNotFoundError" in found.stderr and found.stdout == ""


def test_the_environment_selects():
    script = "import torch, mxref; mxref.functions.exp(torch.ones(2))"
    environment = {"MXREF_BACKENDS": "nowhere", "PATH": "", "PYTHONPATH": ""}
    result = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert result.returncode == 1 and "backend='nowhere'" in result.stderr


def test_a_kernel_names_its_contract():
    with pytest.raises(ValueError, match="contract='exact': expected one of bitexact, certified, bounded"):
        registry.Kernel("exp", "fake", torch.exp, "exact", ("cpu",), (torch.float32,))
