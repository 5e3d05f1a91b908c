"""Inputs that once gave wrong bits or were accepted, each with the value that the definition asks for."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import mxref
from mxref import registry
from mxref.comparison import difference

R = mxref.RECIPES
INF = math.inf


def codes(values, format, **arguments):
    return mxref.quantize(torch.tensor(values), format, **arguments).codes.tolist()


def test_a_trace_leaves_nothing_behind():
    x = torch.tensor([7.0, 1.0, -0.2])
    with FakeTensorMode():
        mxref.qdq(torch.empty(2, 64), "mxfp6_e2m3", recipe="ocp_ceil")

    class Model(torch.nn.Module):
        def forward(self, x):
            return mxref.qdq(x, "mxfp6_e2m3")

    torch.export.export(Model(), (x,))
    assert mxref.qdq(x, "mxfp6_e2m3").tolist() == [7.0, 1.0, -0.25]
    assert type(mxref.decode(torch.tensor([1], dtype=torch.uint8), "e2m3")) is torch.Tensor


@pytest.mark.parametrize("recipe", ["vllm_torch", "vllm_triton"])
def test_zero_times_an_infinite_multiplier_is_zero(recipe):
    """gs / s_block beyond float32: the elements that are zero stay zero (a quotient of zero is +0 there)."""
    assert codes([1e-40, 0.0, -0.0, -1e-40], "nvfp4", recipe=recipe) == [7, 0, 0, 15]


def test_infinity_times_a_multiplier_of_zero_saturates():
    saturating = replace(R["nvidia"], name="saturating", inf="saturate")
    assert codes([INF, -INF, 1.0], "nvfp4", recipe=saturating, tensor_scale=torch.tensor(1e36)) == [7, 15, 0]
    for recipe in ("vllm_torch", "vllm_triton"):
        assert codes([INF, -INF, 0.0], "nvfp4", recipe=recipe, tensor_scale=torch.tensor(1e-44)) == [7, 15, 0]


def test_a_quotient_that_underflows_is_not_zero():
    x = [2.0**127, 2.0**-149, -(2.0**-149), 0.0, -0.0]
    away = replace(R["ocp"], name="away", rounding="away_from_zero")
    assert codes(x, "mxfp4", recipe=away) == [6, 1, 9, 0, 8]
    assert codes(x, "mxint8", recipe=away)[1:3] == [1, 255]
    assert codes(x, "mxfp4", recipe=replace(R["ocp"], name="dropping", negative_zero="drop_quotient")) == [6, 0, 8, 0, 0]


def test_formats_must_fit_into_float32s_exponents():
    with pytest.raises(ValueError, match="float32 subnormal"):
        mxref.ElementFormat("d", 5, 2, 140)
    tiny = mxref.ElementFormat("t", 2, 1, 75)
    one = torch.tensor([[1, 1, 1]], dtype=torch.uint8)
    assert mxref.block_dot(one, one, tiny, tiny).item() == 2 * 2.0**-149  # 3 * 2^-150, a tie, to even


@pytest.mark.parametrize("index", [(slice(None), slice(1, 2)), (0, 0), ..., True, 1.0, [0, 1]])
def test_only_the_first_axis_is_indexed(index):
    with pytest.raises(TypeError, match="index"):
        mxref.quantize(torch.randn(4, 64), "mxfp4")[index]


def test_tokens_may_not_share_scales():
    q13, q2 = mxref.quantize(torch.randn(2, 64, 32), "mxfp4"), mxref.quantize(torch.randn(2, 32, 32), "mxfp4")
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    for semantics in ("blockwise", "dequantized"):
        with pytest.raises(ValueError, match="act_recipe 'square' has blocks of 16 rows"):
            square = replace(R["ocp"], name="square", block_rows=16)
            mxref.moe_experts(
                torch.randn(3, 32), q13, q2, ids, weights, act_format="mxfp8_e4m3", act_recipe=square, semantics=semantics
            )


def test_rows_of_a_square_block_are_no_experts():
    with pytest.raises(ValueError, match="per_expert"):
        mxref.quantize(torch.randn(20, 32), "nvfp4", recipe="nvidia_16x16", tensor_scale="per_expert")


def test_a_tensor_scale_is_finite():
    q = mxref.quantize(torch.tensor([1e30, 1.0]), "nvfp4", recipe=replace(R["nvidia"], name="small", scale_max=1e-40))
    assert 0 < q.tensor_scale.item() < INF


@pytest.mark.parametrize(
    "base, changes, message",
    [
        ("exact", {"overflow": "special"}, "encode_order='exact'"),
        ("ocp", {"inf": "saturate", "overflow": "special"}, "inf='saturate' and overflow='special'"),
    ],
)
def test_choices_that_contradict_each_other(base, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(R[base], name="contradiction", **changes)


def test_scores_without_weights():
    with pytest.raises(ValueError, match="no weights"):
        mxref.route(torch.tensor([[-200.0, -200.0]]), 1, scoring="sigmoid")


def test_gradients_of_sigmoid_at_zero_and_of_scales():
    x = torch.tensor([0.0, -0.0, 1.0], requires_grad=True)
    mxref.functions.sigmoid(x).sum().backward()
    assert x.grad[:2].tolist() == [0.25, 0.25]
    scale = torch.tensor(0.5, requires_grad=True)
    assert not mxref.qdq(torch.ones(16), "nvfp4", tensor_scale=scale).requires_grad


def test_conjugate_views():
    x = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert x.is_neg() and mxref.encode(x, "e2m1").tolist() == [12, 6]


def test_a_transform_is_checked_along_its_own_axis():
    recipe = replace(mxref.RECIPES["ocp"], name="rotated", transform=mxref.Hadamard(4))
    q = mxref.quantize(torch.randn(64, 5), "mxfp4", recipe=recipe, axis=0)
    again = mxref.BlockTensor.from_codes(q.codes, q.scales, None, "mxfp4", recipe, 0)
    assert torch.equal(mxref.dequantize(replace(q)), mxref.dequantize(again))
    short = mxref.quantize(torch.randn(6, 8), "mxfp4", axis=0)
    with pytest.raises(ValueError, match="the transform needs a multiple of 4 along axis -2"):
        mxref.BlockTensor(short.packed, 6, short.scales, None, "mxfp4", recipe, 0)


def test_a_scale_for_each_index_of_the_blocked_axis_is_refused():
    with pytest.raises(ValueError, match="tensor_scale has shape"):
        mxref.quantize(torch.randn(96, 2, 16), "nvfp4", tensor_scale=torch.ones(96), axis=0)


def test_a_lazily_negated_tensor_is_read_with_its_sign():
    x = torch.randn(4, 64)
    assert torch.equal(mxref.qdq(torch._neg_view(x), "nvfp4"), mxref.qdq(-x, "nvfp4"))
    assert torch.equal(mxref.quantize(torch._neg_view(x), "mxfp4").packed, mxref.quantize(-x, "mxfp4").packed)


def test_to_takes_a_device_alone():
    q = mxref.quantize(torch.randn(3, 64), "nvfp4")
    for wrong in (torch.float16, None):
        with pytest.raises(TypeError, match="device has type"):
            q.to(wrong)


def test_a_mask_of_several_axes_is_no_index():
    q = mxref.quantize(torch.randn(4, 6, 32), "mxfp4")
    assert q[torch.tensor([True, False, True, True])].shape == (3, 6, 32)
    with pytest.raises(IndexError, match="mask of 2 axes"):
        q[torch.ones(4, 6, dtype=torch.bool)]


def test_the_record_of_a_result_is_compared_too():
    q = mxref.quantize(torch.randn(2, 32), "nvfp4")
    assert difference(q, replace(q)) is None
    assert "recipe is" in difference(replace(q, recipe=mxref.RECIPES["vllm_torch"]), q)
    assert "got a SimpleNamespace" in difference(SimpleNamespace(**vars(q), codes=q.codes), q)


def test_a_kernel_answers_for_a_parameter_where_there_is_no_gradient(monkeypatch):
    called = []

    def quantize(x, format, *, recipe=None, tensor_scale=None, axis=-1, seed=None):
        called.append(x)
        with mxref.use():
            return mxref.quantize(x.detach(), format)

    kernel = registry.Kernel("quantize", "fake", quantize, "bitexact", ("cpu",), (torch.float32,))
    monkeypatch.setattr(registry, "_offers", lambda: {("quantize", "fake"): None})
    monkeypatch.setattr(registry, "kernel", lambda op, backend: kernel if op == "quantize" else None)
    parameter = torch.nn.Parameter(torch.randn(4, 64))
    with mxref.use("fake"):
        mxref.quantize(parameter, "mxfp4")
        assert len(called) == 1 and str(mxref.explain_dispatch("quantize", parameter, "mxfp4")) == "quantize: fake"
        assert "autograd records" in str(mxref.explain_dispatch("silu", parameter))
