"""Dispatch: what a call costs on the host beyond the function that answers it.

`bare` calls the function itself; `dispatched` calls the op, with no selection for the reference, and within
`mxref.use` for a kernel that does nothing. The cost of dispatch is the difference of their medians.
"""

import pytest
import torch

import mxref
from mxref import registry

X = torch.ones(1)


def nothing(x):
    return x


KERNEL = registry.Kernel("relu2", "idle", nothing, "bitexact", ("cpu",), (torch.float32,))


@pytest.mark.parametrize("who", ["reference", "kernel"])
@pytest.mark.parametrize("how", ["bare", "dispatched"])
def test_dispatch(benchmark, request, monkeypatch, who, how):
    monkeypatch.setattr(registry, "_offers", lambda: {("relu2", "idle"): None})
    monkeypatch.setattr(registry, "kernel", lambda op, backend: KERNEL)
    op = mxref.functions.relu2
    facts = {"op": "relu2", "format": "-", "dtype": "float32", "contender": f"{who}, {how}", "device": "cpu", "size": [1]}
    benchmark.extra_info.update(facts | ({"floor": f"{who}, bare"} if how == "dispatched" else {}))
    function = op if how == "dispatched" else nothing if who == "kernel" else op.__wrapped__
    rounds, iterations = (1, 1) if request.config.getoption("quick") else (100, 200)
    with mxref.use(*(["idle"] if who == "kernel" else [])):
        assert (function(X) is X) == (who == "kernel")
        benchmark.pedantic(function, args=(X,), rounds=rounds, iterations=iterations, warmup_rounds=5)
