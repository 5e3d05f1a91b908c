"""Settings of the process that a kernel changes: verify says so, puts them back and goes on."""

import ctypes
import os
import platform
import random
import sys
import warnings

import numpy
import pytest
import torch
from planted import planted

import mxref
from mxref import registry
from mxref.conformance import runner, verify
from mxref.conformance.runner import find_case, run_case
from mxref.conformance.settings import SETTINGS, SettingsChanged, settings_kept

DOWNWARD = {"x86_64": 0x400, "aarch64": 0x800000, "arm64": 0x800000}  # FE_DOWNWARD of <fenv.h>
CHANGES = {
    "flush_denormal": lambda: torch.set_flush_denormal(True),
    "rounding_mode": lambda: ctypes.CDLL(None).fesetround(DOWNWARD[platform.machine()]),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
    "num_threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "grad_enabled": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "deterministic_algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "float32_matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: torch.set_autocast_enabled("cpu", True),
    "mkldnn": lambda: torch._C._set_mkldnn_enabled(not torch._C._get_mkldnn_enabled()),
    "rng_state": lambda: torch.manual_seed(7),
    "random.getstate": random.random,
    "numpy.random.get_state": numpy.random.random,
    "numpy.seterr": lambda: numpy.seterr(over="raise"),
    "environment": lambda: os.environ.update(MXREF_RUDE="a secret"),
    "working_directory": lambda: os.chdir("/"),
}


def settings():
    return {name: read() for name, (read, _) in SETTINGS.items()}


@pytest.fixture(autouse=True)
def unchanged():
    """The next test begins as this did; one that leaves a change fails."""
    with settings_kept():
        phase = os.environ["PYTEST_CURRENT_TEST"]
        yield
        os.environ["PYTEST_CURRENT_TEST"] = phase  # which pytest itself changes


@pytest.fixture
def offer(monkeypatch):
    """Offers one kernel for `relu2`, of the backend "rude"."""

    def offer(function, **fields):
        kernel = registry.Kernel("relu2", "rude", function, "bitexact", ("cpu",), (torch.float32,), **fields)
        monkeypatch.setattr(registry, "_offers", lambda: {("relu2", "rude"): None})
        monkeypatch.setattr(registry, "kernel", lambda op, backend: kernel if op == "relu2" else None)
        monkeypatch.setattr(runner, "kernels", lambda backend: (kernel,))

    return offer


def relu2(x):
    with mxref.use():
        return mxref.functions.relu2(x)


def test_every_setting_has_a_change():
    assert CHANGES.keys() == SETTINGS.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_a_kernel_that_changes_a_setting_has_failed_and_the_next_case_runs(name, offer):
    def rude(x):
        y = relu2(x)
        if x.numel() == 0:
            CHANGES[name]()
        return y

    before = settings()
    offer(rude)
    report = verify("rude", ops=["relu2"])
    (failed,) = [outcome for outcome in report.outcomes if outcome.failure]
    assert failed.id == "empty" and report.passed == 8 and settings() == before
    said = failed.failure
    _, _, changed = said.difference.partition("it changed settings of the process, which a kernel has to leave: ")
    assert changed.startswith(name) and not any(other in changed for other in SETTINGS if other != name)
    assert "secret" not in said.difference and said.block == "" and "--op relu2 --case empty" in said.repeat


def test_the_environment_says_which_variables_and_no_values():
    with pytest.raises(SettingsChanged, match="leave: environment: HOME, MXREF_RUDE$"), settings_kept():
        os.environ.update(MXREF_RUDE="x", HOME="elsewhere")
    assert "MXREF_RUDE" not in os.environ and os.environ["HOME"] != "elsewhere"
    with settings_kept():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")  # as its compiler does


def test_what_was_raised_stands_below_what_was_changed(offer):
    def rude(x):
        torch.set_flush_denormal(True)
        return relu2(x)  # which refuses to work without subnormal numbers

    offer(rude)
    found = run_case(find_case("relu2", "empty"), "rude", "cpu").failure
    assert "flush_denormal from False to True" in found.difference
    assert found.block.endswith("call torch.set_flush_denormal(False)")


def test_asking_changes_nothing_either(offer):
    offer(relu2, accepts=lambda x: CHANGES["default_dtype"]())
    found = run_case(find_case("relu2", "empty"), "rude", "cpu").failure
    assert found.difference.startswith("asking whether it takes the call changed settings") and "rude" in found.repeat


def test_an_interruption_puts_back_and_is_raised():
    before = settings()
    with pytest.raises(KeyboardInterrupt), settings_kept():
        CHANGES["flush_denormal"]()
        raise KeyboardInterrupt
    assert settings() == before


def test_importing_kernels_changes_nothing(tmp_path, monkeypatch):
    source = "import torch\nfrom mxref.registry import Kernel\ntorch.set_flush_denormal(True)\n"
    source += "KERNEL = Kernel('relu2', 'rude', lambda x: x, 'bitexact', ('cpu',), (torch.float32,))\n"
    planted(tmp_path, "rude", source, ["relu2"])
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._offers.cache_clear()
    try:
        with pytest.raises(SettingsChanged, match="^importing the kernels of rude changed .* flush_denormal from False to"):
            verify("rude")
        assert not registry.flushes_subnormals()
    finally:
        sys.modules.pop("rude", None)
        monkeypatch.undo()
        for cached in (registry._offers, registry.kernel):
            cached.cache_clear()


def test_an_error_is_said_once(offer):
    def failing(x):
        raise ValueError("cause") from KeyError("deeper")

    offer(failing)
    found = run_case(find_case("relu2", "empty"), "rude", "cpu").failure
    assert found.difference == "it raised ValueError: cause"
    assert str(found).count("ValueError: cause") == 1 and found.block.count("KeyError: 'deeper'") == 1
    assert found.block.splitlines()[-1].strip().startswith(("raise ValueError", "^"))


def test_a_kernel_in_numpy_warns_of_no_nan(offer):
    def in_numpy(x):
        numpy.float32("inf") - numpy.array([numpy.inf], dtype=numpy.float32)
        return relu2(x)

    offer(in_numpy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_case(find_case("relu2", "empty"), "rude", "cpu").failure is None
    with pytest.warns(RuntimeWarning, match="invalid value"):
        in_numpy(torch.ones(1))
