"""Mixture-of-experts layers, bit for bit.

Expected values: `oracles.experts`, an independent loop over tokens and slots built on the oracles for quantization,
products and activations. Weights are random codes and scales, so nothing depends on a quantizer.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from bits import assert_same_bits
from oracles import activations, experts, products
from oracles.experts import Activation, Layer
from test_matmul import DTYPES, random_operand, rounded

import mxref
from mxref.comparison import difference
from mxref.moe import ACTIVATIONS

T, H, I, E, K = 6, 64, 48, 4, 2  # noqa: E741


def weights(format: str, rows: int, columns: int, rng, *, spread: int = 3, scales=None, experts: int = E) -> list:
    """One Operand an expert, block scales around 2**-3."""
    out = []
    for e in range(experts):
        w = random_operand(format, rows, columns, rng, spread=spread)
        if format == "nvfp4":
            w = replace(
                w,
                scales=rng.integers(0x20, 0x48, w.scales.shape).astype(np.uint8),
                tensor_scale=None if scales is None else scales[e],
            )
        else:
            w = replace(w, scales=(w.scales - 6).astype(np.uint8))
        out.append(w)
    return out


def stacked(operands: list, format: str) -> mxref.BlockTensor:
    """[E, N, K] from one Operand an expert."""
    given = operands[0].tensor_scale
    scale = None
    if given is not None:
        scale = torch.from_numpy(
            np.stack(
                [
                    np.broadcast_to(np.asarray(o.tensor_scale, np.float32).reshape(-1, 1), (np.size(o.tensor_scale), 1))
                    for o in operands
                ]
            )
        )
    codes, scales = (torch.from_numpy(np.stack([getattr(o, name) for o in operands])) for name in ("codes", "scales"))
    recipe = "nvidia" if format == "nvfp4" else "ocp"
    return mxref.BlockTensor.from_codes(codes, scales, scale, mxref.BLOCK_FORMATS[format], mxref.RECIPES[recipe])


def tokens(rng, dtype: str = "bfloat16", count: int = T, width: int = H) -> torch.Tensor:
    return torch.from_numpy(np.float32(rng.standard_normal((count, width)))).to(DTYPES[dtype])


def routing(rng, count: int = T, k: int = K, experts: int = E) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([rng.permutation(experts)[:k] for _ in range(count)], dtype=np.int64).reshape(count, k)
    return ids, np.float32(rng.uniform(0.1, 1.0, (count, k)))


def run(layer: Layer, x: torch.Tensor, ids, router, weight_format: str, **more) -> torch.Tensor:
    """The library's answer for an oracle layer."""
    arguments = {"activation": layer.activation, "semantics": layer.semantics}
    if layer.act is not None:
        arguments["act_format"] = layer.act.format
        recipes = {"floor": "ocp", "even": "ocp_even", "ceil": "ocp_ceil", "rceil": "ocp_rceil"}
        recipe = mxref.RECIPES[recipes.get(layer.act.rule, layer.act.rule)]
        if layer.act.seed is not None:
            recipe, arguments["seed"] = replace(recipe, name="stochastic", rounding="stochastic"), layer.act.seed
        arguments["act_recipe"] = recipe
        if layer.act.scales is not None:
            arguments["act_tensor_scales"] = tuple(torch.as_tensor(np.float32(s)) for s in layer.act.scales)
    for name in ("bias13", "bias2"):
        if getattr(layer, name) is not None:
            arguments[name] = torch.from_numpy(getattr(layer, name))
    if layer.interleaved:
        arguments["gate_up"] = "interleaved"
    if layer.weight_on_input:
        arguments["apply_router_weight_on_input"] = True
    for name in ("intermediate_dtype", "round_per_slot"):
        if getattr(layer, name) is not None:
            arguments[name] = DTYPES[getattr(layer, name)]
    arguments |= more
    return mxref.moe_experts(
        x,
        stacked(layer.w13, weight_format),
        stacked(layer.w2, weight_format),
        torch.from_numpy(ids),
        torch.from_numpy(router),
        **arguments,
    )


def check(layer: Layer, x: torch.Tensor, ids, router, weight_format: str) -> None:
    terms = layer.slot_terms(x.float().numpy(), ids, router)
    assert_same_bits(run(layer, x, ids, router, weight_format, combine=False), rounded(terms), "slot terms")
    total = experts.combine(terms)
    assert_same_bits(run(layer, x, ids, router, weight_format), rounded(total, x.dtype), "output")
    for dtype in DTYPES.values():
        assert_same_bits(
            run(layer, x, ids, router, weight_format, out_dtype=dtype), rounded(total, dtype), f"output {dtype}"
        )


def layer_of(rng, format: str = "mxfp4", act=None, *, activation: str = "silu", inner: int = I, **more) -> Layer:
    gated = activation != "relu2"
    w13 = weights(format, (1 + gated) * inner, H, rng)
    return Layer(w13, weights(format, H, inner, rng), activation=activation, act=act, **more)


PLAIN = {
    "weight_only": None,
    "mxfp4": Activation("mxfp4", "floor"),
    "mxfp8_e4m3": Activation("mxfp8_e4m3", "rceil"),
    "mxfp6_e3m2": Activation("mxfp6_e3m2", "even"),
    "nvfp4": Activation("nvfp4", "nvidia"),
}


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("act", list(PLAIN))
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "mxfp8_e5m2"])
def test_formats_of_weights_and_activations(format, act, dtype, rng):
    check(layer_of(rng, format, PLAIN[act], dtype=dtype), tokens(rng, dtype), *routing(rng), format)


@pytest.mark.parametrize("interleaved", [False, True], ids=["concatenated", "interleaved"])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize("activation", ["silu", "silu_rounded_twice", "swiglu_oai", "gelu_tanh", "relu2"])
def test_activations_biases_and_row_layouts(activation, biased, interleaved, rng):
    if activation == "relu2" and interleaved:
        pytest.skip("no gate, no layout")
    layer = layer_of(rng, "mxfp4", PLAIN["mxfp8_e4m3"], activation=activation, interleaved=interleaved)
    if biased:
        rows = layer.w13[0].codes.shape[0]
        layer = replace(
            layer, bias13=np.float32(rng.standard_normal((E, rows)) * 4), bias2=np.float32(rng.standard_normal((E, H)))
        )
    check(layer, tokens(rng), *routing(rng), "mxfp4")


def test_row_layouts_are_the_same_layer_written_twice(rng):
    layer = layer_of(rng, "mxfp4", PLAIN["mxfp4"])
    order = np.arange(2 * I).reshape(2, I).T.ravel()
    woven = replace(
        layer, interleaved=True, w13=[replace(w, codes=w.codes[order], scales=w.scales[order]) for w in layer.w13]
    )
    x, (ids, router) = tokens(rng), routing(rng)
    assert_same_bits(run(woven, x, ids, router, "mxfp4"), run(layer, x, ids, router, "mxfp4"))


@pytest.mark.parametrize("interleaved", [False, True], ids=["concatenated", "interleaved"])
@pytest.mark.parametrize("act", ["weight_only", "nvfp4", "mxfp8_e4m3"])
def test_gate_and_up_have_their_own_tensor_scales(act, interleaved, rng):
    pair = np.float32(rng.uniform(0.1, 2.0, (E, 2)))
    rows = [np.tile(p, I)[:, None] if interleaved else np.repeat(p, I)[:, None] for p in pair]
    layer = Layer(
        weights("nvfp4", 2 * I, H, rng, scales=rows),
        weights("nvfp4", H, I, rng, scales=np.float32(rng.uniform(0.1, 2.0, E))),
        act=PLAIN[act],
        interleaved=interleaved,
    )
    x, (ids, router) = tokens(rng), routing(rng)
    check(layer, x, ids, router, "nvfp4")
    gate_only = replace(layer, w13=[replace(w, tensor_scale=p[0]) for w, p in zip(layer.w13, pair)])
    wrong = experts.combine(gate_only.slot_terms(x.float().numpy(), ids, router))
    assert (rounded(wrong, x.dtype) != run(layer, x, ids, router, "nvfp4")).any(), "gate's scale for both must be seen"


@pytest.mark.parametrize("order", ["nvidia", "exact", "vllm_torch", "vllm_triton"])
@pytest.mark.parametrize("form", ["dynamic", "scalar", "per_expert", "mixed"])
def test_nvfp4_activation_scales(order, form, rng):
    if form == "dynamic" and order.startswith("vllm"):
        pytest.skip("a forward multiplier is given, not computed, in these orders' home")
    size = {"dynamic": None, "scalar": ((), ()), "per_expert": ((E,), (E,)), "mixed": ((), (E,))}[form]
    scales = None
    if size is not None:
        scales = tuple(np.float32(rng.uniform(0.5, 2.0, s) * 2.0**-9) for s in size)
        if order.startswith("vllm"):
            scales = tuple(np.float32(1) / s for s in scales)
    act = Activation("nvfp4", order, scales)
    layer = Layer(
        weights("nvfp4", 2 * I, H, rng, scales=np.float32(rng.uniform(0.1, 2.0, E))),
        weights("nvfp4", H, I, rng, scales=np.float32(rng.uniform(0.1, 2.0, E))),
        act=act,
    )
    check(layer, tokens(rng), *routing(rng), "nvfp4")


@pytest.mark.parametrize("act", ["weight_only", "mxfp4", "nvfp4"])
def test_top_1_with_the_weight_on_the_input(act, rng):
    layer = layer_of(rng, "mxfp4", PLAIN[act], weight_on_input=True)
    ids, router = routing(rng, k=1)
    x = tokens(rng)
    check(layer, x, ids, router, "mxfp4")
    at_the_end = experts.combine(replace(layer, weight_on_input=False).slot_terms(x.float().numpy(), ids, router))
    assert (rounded(at_the_end, x.dtype) != run(layer, x, ids, router, "mxfp4")).any()


def test_weight_on_the_input_is_for_top_1_only(rng):
    layer = layer_of(rng, weight_on_input=True)
    with pytest.raises(ValueError, match="apply_router_weight_on_input|top-1|k"):
        run(layer, tokens(rng), *routing(rng), "mxfp4")


@pytest.mark.parametrize("round_per_slot", [None, "bfloat16", "float16"])
@pytest.mark.parametrize("intermediate", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("act", ["weight_only", "mxfp8_e4m3"])
def test_intermediate_dtype_and_rounding_per_slot(act, intermediate, round_per_slot, rng):
    layer = layer_of(rng, "mxfp4", PLAIN[act], intermediate_dtype=intermediate, round_per_slot=round_per_slot)
    check(layer, tokens(rng), *routing(rng, k=3), "mxfp4")


@pytest.mark.parametrize("activation", ["silu", "silu_rounded_twice"])
def test_rounding_once_or_twice_are_different_layers(activation, rng):
    layer = layer_of(rng, "mxfp8_e4m3", PLAIN["mxfp8_e4m3"], activation=activation)
    x, (ids, router) = tokens(rng), routing(rng)
    other = replace(layer, activation="silu" if activation != "silu" else "silu_rounded_twice")
    assert (
        run(layer, x, ids, router, "mxfp8_e4m3", combine=False) != run(other, x, ids, router, "mxfp8_e4m3", combine=False)
    ).any()


@pytest.mark.parametrize("count, k", [(1, 1), (1, E), (3, E), (5, 1), (0, 2)])
def test_one_token_no_token_every_expert(count, k, rng):
    layer = layer_of(rng, "mxfp4", PLAIN["mxfp4"])
    ids, router = routing(rng, count, k)
    x = tokens(rng, count=count)
    if count:
        check(layer, x, ids, router, "mxfp4")
    else:
        assert run(layer, x, ids, router, "mxfp4").shape == (0, H)


def test_experts_without_tokens_and_experts_chosen_twice(rng):
    layer = layer_of(rng, "mxfp4", PLAIN["nvfp4"])
    ids, router = routing(rng)
    for fixed in (np.zeros_like(ids), np.full_like(ids, E - 1), np.tile([0, E - 1], (T, 1))):
        check(layer, tokens(rng), fixed, router, "mxfp4")


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8_e4m3"])
def test_stochastic_activations(format, rng):
    act = Activation(format, "floor", seed=0xABCDEF0123456789)
    check(layer_of(rng, "mxfp4", act), tokens(rng, count=3), *routing(rng, 3), "mxfp4")


def test_stochastic_nvfp4_activations(rng):
    act = Activation("nvfp4", "nvidia", seed=5)
    check(layer_of(rng, "nvfp4", act), tokens(rng, count=3), *routing(rng, 3), "nvfp4")


@pytest.mark.parametrize("act", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
def test_dequantized_semantics(act, rng):
    for intermediate in (None, "float16", "float32"):
        layer = layer_of(rng, "mxfp4", PLAIN[act], semantics="dequantized", intermediate_dtype=intermediate)
        check(layer, tokens(rng), *routing(rng), "mxfp4")


def test_tails_and_odd_sizes(rng):
    for format, act in (("mxfp4", PLAIN["mxfp4"]), ("nvfp4", PLAIN["nvfp4"])):
        layer = Layer(weights(format, 2 * 19, 41, rng), weights(format, 41, 19, rng), act=act)
        check(layer, tokens(rng, width=41), *routing(rng), format)


# ------------------------------------------------------------------------------------------ independence


@pytest.mark.parametrize("act", ["weight_only", "mxfp4", "nvfp4"])
def test_a_token_does_not_depend_on_its_batch(act, rng):
    layer = layer_of(rng, "nvfp4", PLAIN[act])
    x, (ids, router) = tokens(rng, count=20), routing(rng, 20)
    x[7] *= 1000
    whole = run(layer, x, ids, router, "nvfp4")
    for index in ([0], [7], [3, 4, 5], [19, 0, 7, 7], list(range(20))[::-1]):
        assert_same_bits(run(layer, x[index], ids[index], router[index], "nvfp4"), whole[index], str(index))
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_same_bits(run(layer, x, ids, router, "nvfp4"), whole)
    finally:
        torch.set_num_threads(threads)


def test_a_per_tensor_scale_exists_only_by_name_and_sees_the_batch(rng):
    layer = layer_of(rng, "nvfp4", PLAIN["nvfp4"])
    x, (ids, router) = tokens(rng), routing(rng)
    x[0] *= 997
    by_name = run(layer, x, ids, router, "nvfp4", act_tensor_scales="per_tensor")
    alone = run(layer, x[1:], ids[1:], router[1:], "nvfp4", act_tensor_scales="per_tensor")
    assert (by_name[1:] != alone).any()


@pytest.mark.parametrize("split", [[0, 0, 1, 1], [0, 1, 0, 1], [1, 1, 1, 0], [0, 1, 2, 3]])
@pytest.mark.parametrize("act", ["weight_only", "nvfp4", "per_expert"])
def test_ranks_exchange_slot_terms_and_combine_to_the_same_bits(act, split, rng):
    scales = tuple(np.float32(rng.uniform(0.5, 2.0, E) * 2.0**-9) for _ in range(2))
    per_expert = act == "per_expert"
    layer = layer_of(rng, "nvfp4", Activation("nvfp4", "nvidia", scales) if per_expert else PLAIN[act])
    x, (ids, router) = tokens(rng), routing(rng, k=3)
    whole = run(layer, x, ids, router, "nvfp4")
    terms = []
    for rank in sorted(set(split)):
        mine = [e for e in range(E) if split[e] == rank]
        expert_map = np.full(E, -1, np.int64)
        expert_map[mine] = np.arange(len(mine))
        local = replace(layer, w13=[layer.w13[e] for e in mine], w2=[layer.w2[e] for e in mine])
        if per_expert:
            local = replace(local, act=replace(layer.act, scales=tuple(s[mine] for s in scales)))
        part = run(local, x, ids, router, "nvfp4", combine=False, expert_map=torch.from_numpy(expert_map))
        assert_same_bits(part, rounded(local.slot_terms(x.float().numpy(), ids, router, expert_map)), f"rank {rank}")
        terms.append(part)
    assert_same_bits(mxref.combine(terms, out_dtype=x.dtype), whole)
    assert_same_bits(mxref.combine(terms[::-1], out_dtype=x.dtype), whole)


def test_combine_adds_slots_in_order(rng):
    terms = np.float32(rng.standard_normal((50, 6, 8)) * np.exp(4 * rng.standard_normal((50, 6, 8))))
    expected = experts.combine(terms)
    assert (experts.combine(terms[:, ::-1]) != expected).any()
    for dtype in DTYPES.values():
        assert_same_bits(mxref.combine(torch.from_numpy(terms), out_dtype=dtype), rounded(expected, dtype))
    assert mxref.combine(torch.from_numpy(terms)).dtype == torch.float32


# ------------------------------------------------------------------------------------------ quantization points


def test_quantization_points_are_data():
    assert tuple(mxref.moe.QUANTIZATION_POINTS) == ("input", "intermediate")


@pytest.mark.parametrize("act", ["mxfp4", "nvfp4"])
def test_every_quantization_point_changes_the_result(act, rng):
    """Dropping the middle point, or the first, gives other bits: so equality with the oracle counts them."""
    layer = layer_of(rng, "mxfp4", PLAIN[act])
    x, (ids, router) = tokens(rng), routing(rng)
    got = run(layer, x, ids, router, "mxfp4", combine=False)
    assert_same_bits(got, rounded(layer.slot_terms(x.float().numpy(), ids, router)))
    for points in ((), (0,), (1,)):
        fewer = experts.with_points(layer, *points).slot_terms(x.float().numpy(), ids, router)
        assert (rounded(fewer) != got).float().mean() > 0.5, (
            f"with only points {points} the result should differ almost everywhere"
        )


@pytest.mark.parametrize("per_expert", [False, True])
def test_rows_quantized_are_counted(per_expert, rng, monkeypatch):
    """Each token once (once an expert where the scale is per expert), and each slot's intermediate once."""
    counted = []
    real = mxref.moe.quantize_rows

    def counting(rows, *args, **kwargs):
        counted.append(tuple(rows.shape))
        return real(rows, *args, **kwargs)

    monkeypatch.setattr(mxref.moe, "quantize_rows", counting)
    scales = tuple(np.full(E, 2.0**-9, np.float32) for _ in range(2)) if per_expert else None
    layer = layer_of(rng, "nvfp4", Activation("nvfp4", "nvidia", scales))
    ids, router = routing(rng)
    run(layer, tokens(rng), ids, router, "nvfp4")
    by_width = {width: sum(rows for rows, columns in counted if columns == width) for width in (H, I)}
    assert by_width == {H: T * K if per_expert else T, I: T * K}


# ------------------------------------------------------------------------------------------ routing


def softmax(rows: np.ndarray) -> np.ndarray:
    """exp(x - max) over its sum, sums ascending, in float32."""
    e = activations.exp(rows - rows.max(-1, keepdims=True))
    total = np.zeros(e.shape[:-1], np.float32)
    for i in range(e.shape[-1]):
        total = total + e[..., i]
    return e / total[..., None]


def best(scores: np.ndarray, k: int) -> np.ndarray:
    """Ids by descending score, ties to the lower id."""
    return np.argsort(-scores.astype(np.float64), axis=-1, kind="stable")[..., :k].astype(np.int64)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "softmax_after_topk", "sigmoid"])
def test_route(scoring, renormalize, dtype, rng):
    logits = torch.from_numpy(np.float32(rng.standard_normal((40, 8)) * 3)).to(DTYPES[dtype])
    logits[0] = 0
    logits[1, 3] = logits[1, 5]
    wide, k = logits.float().numpy(), 3
    if scoring == "softmax_after_topk":
        ids = best(wide, k)
        expected = softmax(np.take_along_axis(wide, ids, -1))
    else:
        scores = softmax(wide) if scoring == "softmax" else activations.sigmoid(wide)
        ids = best(scores, k)
        expected = np.take_along_axis(scores, ids, -1)
    if renormalize and scoring != "softmax_after_topk":  # a softmax over the chosen ones sums to one already
        total = np.zeros(len(ids), np.float32)
        for s in range(k):
            total = total + expected[:, s]
        expected = expected / total[:, None]
    got_ids, got = mxref.route(logits, k, scoring=scoring, renormalize=renormalize)
    assert_same_bits(got_ids, ids)
    assert_same_bits(got, expected.astype(np.float32))


def test_route_with_a_correction_bias_and_a_factor(rng):
    logits = np.float32(rng.standard_normal((30, 6)))
    bias = np.float32(rng.standard_normal(6))
    scores = activations.sigmoid(logits)
    ids = best(scores + bias, 2)
    chosen = np.take_along_axis(scores, ids, -1)
    expected = chosen / ((np.float32(0) + chosen[:, 0]) + chosen[:, 1])[:, None] * np.float32(2.5)
    got_ids, got = mxref.route(
        torch.from_numpy(logits), 2, scoring="sigmoid", correction_bias=torch.from_numpy(bias), scaling_factor=2.5
    )
    assert_same_bits(got_ids, ids)
    assert_same_bits(got, expected)


def test_products_oracle_is_the_one_matmul_is_tested_with(rng):
    """One expert, one slot, weight 1: the layer is two matmuls around an activation."""
    layer = layer_of(rng, "mxfp4", PLAIN["mxfp4"], dtype="float32")
    x = tokens(rng, "float32", count=1)
    got = run(layer, x, np.zeros((1, 1), np.int64), np.ones((1, 1), np.float32), "mxfp4", combine=False)
    q = layer.act.quantize(x[0].numpy(), 0, 0, 0)
    hidden = layer.activate(products.blockwise(q, layer.w13[0])[0], "float32")
    expected = products.blockwise(layer.act.quantize(hidden, 1, 0, 0), layer.w2[0])
    assert_same_bits(got[0], expected)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activate_quantize_is_its_two_steps(activation, interleaved, dtype, rng):
    layer = Layer([], [], activation=activation, interleaved=interleaved)
    hidden = tokens(rng, dtype, 5, 96)
    rows = np.stack([layer.activate(row, dtype) for row in hidden.float().numpy()])
    layout = "interleaved" if interleaved else "concatenated"
    for format in ("mxfp4", "nvfp4"):
        wanted = mxref.quantize(torch.from_numpy(rows).to(hidden.dtype), format)
        given = mxref.activate_quantize(hidden, format, activation=activation, gate_up=layout)
        assert difference(given, wanted) is None, format
