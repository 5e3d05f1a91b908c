"""Swapping experts and linears of transformers models, and what an evaluation reports."""

import csv
import io
import json
import logging
import math
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from bits import assert_same_bits
from tiny_models import MOE_KINDS, TEXT, tiny_model, tiny_tokenizer

import mxref
from mxref.models import MXLinear, evaluate, quantize_weights, quantized
from mxref.models.corpus import read_text
from mxref.models.swap import experts_forward, find_experts, find_linears

evaluation = sys.modules["mxref.models.evaluate"]  # the module, whose name its function shares
FORMATS = list(mxref.BLOCK_FORMATS)
IDS = torch.tensor([[7, 3, 99, 40, 5, 5, 200, 1], [9, 8, 7, 6, 5, 4, 3, 2]])


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def matrices(experts):
    """The layer's own gate [E, I, H], up [E, I, H], down [E, H, I], bias13 (as stored) and bias2."""
    first, down = experts.gate_up_proj.detach(), experts.down_proj.detach()
    if experts.is_transposed:
        first, down = first.transpose(1, 2), down.transpose(1, 2)
    if experts.is_concatenated:
        half = first.shape[1] // 2
        gate, up = first[:, :half], first[:, half:]
    else:
        gate, up = first[:, 0::2], first[:, 1::2]
    biases = (experts.gate_up_proj_bias.detach(), experts.down_proj_bias.detach()) if experts.has_bias else (None, None)
    return gate, up, down, *biases


def stored_order(gate, up, is_concatenated):
    return torch.cat([gate, up], 1) if is_concatenated else torch.stack([gate, up], 2).flatten(1, 2)


def independent_w13(experts, name):
    """w13 in the order the checkpoint stores it: each projection of each expert quantized as one stack."""
    gate, up, *_ = matrices(experts)
    scale = "per_expert" if mxref.BLOCK_FORMATS[name].tensor_scale else None
    g, u = (mxref.quantize(w.contiguous(), name, tensor_scale=scale) for w in (gate, up))
    tensor_scale = None
    if scale:
        rows = [q.tensor_scale.reshape(-1, 1, 1).expand(-1, gate.shape[1], 1) for q in (g, u)]
        tensor_scale = stored_order(*rows, experts.is_concatenated)
    return mxref.BlockTensor.from_codes(
        stored_order(g.codes, u.codes, experts.is_concatenated),
        stored_order(g.scales, u.scales, experts.is_concatenated),
        tensor_scale,
        g.format,
        g.recipe,
    )


def record_calls(model):
    """Inputs and outputs of every experts layer during one forward pass."""
    calls, hooks = [], []
    for experts in find_experts(model).values():
        hooks.append(experts.register_forward_hook(lambda module, args, out: calls.append((module, args, out))))
    logits(model)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("semantics", ["blockwise", "dequantized"])
@pytest.mark.parametrize("act_format", [None, "mxfp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("kind", MOE_KINDS)
def test_experts_are_moe_experts_of_independently_prepared_weights_bit_for_bit(kind, name, act_format, semantics):
    model = tiny_model(kind)
    with quantized(model, name, act_format=act_format, semantics=semantics):
        calls = record_calls(model)
    assert len(calls) == model.config.num_hidden_layers
    for experts, (x, ids, weights), out in calls:
        _, _, down, bias13, bias2 = matrices(experts)
        expected = mxref.moe_experts(
            x,
            independent_w13(experts, name),
            mxref.quantize(down.contiguous(), name, tensor_scale="per_expert" if name == "nvfp4" else None),
            ids,
            weights.float(),
            activation="swiglu_oai" if kind == "gptoss" else "silu",
            act_format=act_format,
            bias13=bias13,
            bias2=bias2,
            gate_up="concatenated" if experts.is_concatenated else "interleaved",
            semantics=semantics,
        )
        assert_same_bits(out, expected)


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8_e4m3", "nvfp4"])
def test_weights_only_experts_stay_within_a_proven_bound_of_a_float64_loop(name):
    model = tiny_model("qwen3moe")
    with quantized(model, quantize_weights(model, name)):
        calls = record_calls(model)
    unit, gamma = 2.0**-8, 128 * 2.0**-23  # bf16 rounding (an upper bound); an fp32 sum of up to 128 terms
    for experts, (x, ids, weights), out in calls:
        w13 = mxref.dequantize(independent_w13(experts, name)).double()
        scale = "per_expert" if name == "nvfp4" else None
        w2 = mxref.dequantize(mxref.quantize(experts.down_proj.detach(), name, tensor_scale=scale)).double()
        expected, bound = torch.zeros(out.shape).double(), torch.zeros(out.shape).double()
        for token in range(len(x)):
            for slot in range(ids.shape[1]):
                e, weight, row = int(ids[token, slot]), float(weights[token, slot]), x[token].double()
                h, h_size = w13[e] @ row, w13[e].abs() @ row.abs()
                h_error = gamma * h_size + unit * (h.abs() + gamma * h_size)  # GEMM1, then bf16
                (gate, up), (gate_error, up_error) = h.chunk(2), h_error.chunk(2)
                silu = gate * torch.sigmoid(gate)
                silu_error = 1.1 * gate_error + 2.0**-20 * silu.abs()  # |silu'| < 1.1
                a = silu * up
                a_error = silu_error * (up.abs() + up_error) + silu.abs() * up_error
                a_error = a_error + (unit + 2.0**-23) * (a.abs() + a_error)
                y, y_size = w2[e] @ a, w2[e].abs() @ (a.abs() + a_error)
                y_error = w2[e].abs() @ a_error + gamma * y_size
                expected[token] += weight * y
                bound[token] += weight * (y_error + 2.0**-23 * (y.abs() + y_error)) + 2.0**-22 * (y.abs() + y_error)
        bound += unit * (expected.abs() + bound)
        assert ((out.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("layers", ["experts", "all"])
@pytest.mark.parametrize("kind", MOE_KINDS)
def test_leaving_the_block_restores_logits_bit_for_bit(kind, layers):
    model = tiny_model(kind)
    before, implementation = logits(model), model.get_experts_implementation()
    modules = dict(model.named_modules())
    with quantized(model, quantize_weights(model, "mxfp4", layers=layers), act_format="mxfp4"):
        assert not torch.equal(logits(model), before)
    assert_same_bits(logits(model), before)
    assert model.get_experts_implementation() == implementation
    assert dict(model.named_modules()) == modules
    assert not any("mxref" in attribute for module in model.modules() for attribute in vars(module))


def test_an_exception_in_the_block_restores_too():
    model = tiny_model("llama")
    before = logits(model)
    with pytest.raises(KeyError, match="mine"), quantized(model, "nvfp4", act_format="nvfp4"):
        raise KeyError("mine")
    assert_same_bits(logits(model), before)


def test_a_model_is_quantized_once_at_a_time():
    model = tiny_model("qwen3moe")
    with quantized(model, "mxfp4"):
        inside = logits(model)
        with pytest.raises(RuntimeError, match="already quantized"), quantized(model, "mxint8"):
            pass
        assert_same_bits(logits(model), inside)


def test_gate_and_up_keep_their_own_tensor_scale_per_expert():
    model = tiny_model("gptoss")
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.gate_up_proj[..., 0::2] *= 64
        experts.gate_up_proj[2] *= 16
    w13 = quantize_weights(model, "nvfp4").experts["model.layers.0.mlp.experts"].w13
    gate, up, *_ = matrices(experts)
    rows = gate.shape[1]
    for e in range(len(gate)):
        for part, matrix in ((slice(0, rows), gate[e]), (slice(rows, None), up[e])):
            alone = mxref.quantize(matrix.contiguous(), "nvfp4")
            assert set(w13.tensor_scale[e, part].flatten().tolist()) == {alone.tensor_scale.item()}
            assert_same_bits(mxref.dequantize(w13)[e, part], mxref.dequantize(alone))
    assert len(set(w13.tensor_scale.flatten().tolist())) == 2 * len(gate)


@pytest.mark.parametrize("act_format", [None, *FORMATS])
@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_linears_are_matmul_bit_for_bit(name, act_format):
    model = tiny_model("llama")
    linear = model.model.layers[0].mlp.down_proj  # K = 48: a short tail block
    torch.manual_seed(1)
    x = torch.randn(2, 5, linear.in_features).bfloat16()
    with quantized(model, name, act_format=act_format):
        swapped = model.model.layers[0].mlp.down_proj
        out = swapped(x)
    a = x.flatten(0, 1)
    if act_format is not None:
        a = mxref.quantize(a, act_format, tensor_scale="per_row" if act_format == "nvfp4" else None)
    expected = mxref.matmul(a, mxref.quantize(linear.weight.detach(), name), out_dtype=torch.bfloat16)
    assert_same_bits(out, expected.view(2, 5, -1))


def test_linear_outputs_do_not_depend_on_the_other_rows():
    weight = mxref.quantize(torch.randn(16, 64), "nvfp4")
    linear = MXLinear(weight, torch.randn(16), act_format="nvfp4")
    x = torch.randn(6, 64) * torch.tensor([1.0, 1e-3, 50.0, 1.0, 7.0, 1e4])[:, None]
    assert_same_bits(linear(x), torch.cat([linear(row[None]) for row in x]))


def test_head_embeddings_and_routers_are_left_alone():
    model = tiny_model("qwen2moe")
    names = {name.split(".", 3)[-1] for name in find_linears(model)}
    assert names == {
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        *(f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")),
    }
    weights = quantize_weights(model, "mxfp4", layers="all")
    assert set(weights.linears) == set(find_linears(model)) and set(weights.experts) == set(find_experts(model))


def test_bits_and_snr_are_those_of_the_stored_tensors():
    model = tiny_model("qwen3moe")
    weights = quantize_weights(model, "nvfp4")
    bits = elements = 0
    ratios = []
    for experts in find_experts(model).values():
        gate, up, down, *_ = matrices(experts)
        for matrix in (*gate, *up, *down):
            q = mxref.quantize(matrix.contiguous(), "nvfp4")
            bits += 4 * q.codes.numel() + 8 * q.scales.numel() + 32
            elements += matrix.numel()
            error = (mxref.dequantize(q).double() - matrix.double()).square().sum()
            ratios.append(10 * math.log10(matrix.double().square().sum() / error))
    assert weights.elements == elements
    assert weights.bits_per_weight == bits / elements
    assert weights.snr_db == pytest.approx(statistics.fmean(ratios), rel=1e-12)


@pytest.mark.parametrize("act, expected", [("silu", "silu"), ("swish", "silu"), ("gelu_pytorch_tanh", "gelu_tanh")])
def test_activations_are_recognized_by_what_they_compute(act, expected):
    weights = quantize_weights(tiny_model("mixtral", hidden_act=act), "mxfp4")
    assert {layer.activation for layer in weights.experts.values()} == {expected}


@pytest.mark.parametrize("act", ["gelu", "quick_gelu", "relu", "sigmoid"])
def test_an_activation_without_a_fixed_order_version_is_refused(act):
    with pytest.raises(ValueError, match=r"layers\.0.*activation.*silu, .*swiglu_oai, gelu_tanh"):
        quantize_weights(tiny_model("mixtral", hidden_act=act), "mxfp4")


@pytest.mark.parametrize("changed", [{"alpha": 1.0}, {"limit": 6.0}, {"limit": 1e4}])
def test_swiglu_oai_with_other_constants_is_refused(changed):
    model = tiny_model("gptoss")
    for name, value in changed.items():
        setattr(model.model.layers[1].mlp.experts, name, value)
    with pytest.raises(ValueError, match=r"layers\.1.*alpha 1.702 and limit 7"):
        quantize_weights(model, "mxfp4")


def test_experts_without_a_gate():
    model = tiny_model("ungated")
    with quantized(model, "mxfp6_e2m3", act_format="mxfp8_e4m3"):
        ((experts, (x, ids, weights), out),) = record_calls(model)
    expected = mxref.moe_experts(
        x,
        mxref.quantize(experts.up_proj.detach(), "mxfp6_e2m3"),
        mxref.quantize(experts.down_proj.detach(), "mxfp6_e2m3"),
        ids,
        weights.float(),
        activation="relu2",
        act_format="mxfp8_e4m3",
    )
    assert_same_bits(out, expected)


def test_post_expert_norms_and_expert_parallel_layers_are_refused():
    model = tiny_model("qwen3moe")
    experts = model.model.layers[1].mlp.experts
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match=r"layers\.1.*normalizes"):
        quantize_weights(model, "mxfp4")
    experts.has_post_expert_norm, experts._is_expert_parallel = False, True
    with pytest.raises(ValueError, match=r"layers\.1.*ranks"):
        quantize_weights(model, "mxfp4")


def test_experts_forward_outside_the_block_says_how():
    model = tiny_model("qwen3moe")
    x = torch.zeros(1, 64, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"with mxref\.models\.quantized"):
        experts_forward(model.model.layers[0].mlp.experts, x, torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))


def test_refusals_name_the_argument_and_what_is_accepted():
    llama, moe = tiny_model("llama"), tiny_model("qwen3moe")
    with pytest.raises(ValueError, match="layers='experts'.*LlamaForCausalLM.*layers='all'"):
        quantize_weights(llama, "mxfp4", layers="experts")
    with pytest.raises(ValueError, match="layers='some'.*experts, all"):
        quantize_weights(moe, "mxfp4", layers="some")
    with pytest.raises(ValueError, match="nothing to quantize"):
        quantize_weights(torch.nn.Sequential(torch.nn.ReLU()), "mxfp4")
    with pytest.raises(ValueError, match="format='mxfp5'.*" + ", ".join(FORMATS)):
        quantize_weights(moe, "mxfp5")
    with pytest.raises(ValueError, match="another model"), quantized(moe, quantize_weights(llama, "mxfp4")):
        pass


# Evaluation


def run(kind="qwen3moe", **options):
    options = {"text": TEXT, "window": 16, "tokens": 128, "formats": ["mxfp4", "nvfp4"], **options}
    return evaluate(tiny_model(kind), tiny_tokenizer(), **options)


def test_rows_are_the_baseline_then_weights_only_and_both_for_each_format():
    report = run()
    assert [(row.weights, row.activations, row.recipe, row.act_recipe) for row in report.rows] == [
        ("bf16", "bf16", None, None),
        ("mxfp4", "bf16", "ocp", None),
        ("mxfp4", "mxfp4", "ocp", "ocp"),
        ("nvfp4", "bf16", "nvidia", None),
        ("nvfp4", "nvfp4", "nvidia", "nvidia"),
    ]
    assert report.complete and report.windows == 8 and report.scored_tokens == 8 * 15
    assert report.rows[0].bits_per_weight == 16.0


def test_numbers_are_those_of_a_window_by_window_loop_in_float64():
    model, tokenizer = tiny_model("mixtral"), tiny_tokenizer()
    report = evaluate(model, tokenizer, text=TEXT, window=16, tokens=100, formats=["mxint8"], activations=["same"])
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    starts = range(0, 96, 16)

    def loss(window):
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([window])).logits[0].double().log_softmax(-1)
        return -sum(scores[i, token].item() for i, token in enumerate(window[1:]))

    def losses():
        return [loss(ids[start : start + 16]) for start in starts]

    model.set_experts_implementation("eager")
    base = losses()
    with quantized(model, "mxint8", act_format="mxint8"):
        found = losses()
    scored = [tokenizer.decode(ids[start + 1 : start + 16]) for start in starts]
    size = [len(text.encode()) for text in scored]
    baseline, row = report.rows
    # fp32 log-sum-exp against float64, and bf16 matrix products whose order may differ with the batch
    close = {"rel": 2e-3}
    assert baseline.bits_per_byte == pytest.approx(sum(base) / math.log(2) / sum(size), **close)
    assert row.bits_per_byte == pytest.approx(sum(found) / math.log(2) / sum(size), **close)
    assert row.change == pytest.approx(row.bits_per_byte - baseline.bits_per_byte, abs=1e-12)
    assert baseline.bits_per_token == pytest.approx(sum(base) / math.log(2) / 90, **close)
    assert baseline.perplexity == pytest.approx(math.exp(baseline.bits_per_byte * math.log(2) * sum(size) / 90))
    assert report.scored_bytes == sum(size)


def test_paired_error_is_that_of_the_mean_where_windows_have_equal_size():
    differences = [0.5, -1.25, 3.0, 2.0, 0.0]
    change, error = evaluation.paired_change(torch.tensor(differences), torch.full((5,), 4.0))
    assert change == pytest.approx(statistics.fmean(differences) / 4, rel=1e-15)
    assert error == pytest.approx(statistics.stdev(differences) / math.sqrt(5) / 4, rel=1e-15)


def test_paired_error_does_not_count_what_grows_with_the_window():
    sizes = torch.tensor([10.0, 20.0, 70.0])
    assert evaluation.paired_change(0.25 * sizes, sizes) == (0.25, 0.0)
    assert math.isnan(evaluation.paired_change(torch.ones(1), torch.ones(1))[1])


def test_bytes_and_words_are_counted_once():
    text = "naïve  words\n— and “quotes”, twice: naïve words " * 6
    tokenizer, model = tiny_tokenizer(), tiny_model("llama")
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    corpus = read_text(text, tokenizer, model, 7, 10**6)
    count = len(ids) // 7
    assert corpus.windows.flatten().tolist() == ids[: 7 * count]
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for window in range(count):
        start, end = offsets[7 * window][1], offsets[7 * window + 6][1]
        assert corpus.scored_bytes[window] == len(text[start:end].encode())
        begins = [i for i in range(start, end) if not text[i].isspace() and (i == 0 or text[i - 1].isspace())]
        assert corpus.scored_words[window] == len(begins)


def test_an_evaluation_leaves_the_model_as_it_was():
    model = tiny_model("gptoss").train()
    before, implementation = logits(model.eval()), model.get_experts_implementation()
    model.train()
    evaluate(model, tiny_tokenizer(), text=TEXT, window=16, tokens=64, formats=["nvfp4"], layers="all")
    assert model.training and model.get_experts_implementation() == implementation
    assert_same_bits(logits(model.eval()), before)


def test_evaluating_twice_gives_the_same_rows():
    first, second = run(), run()
    assert [replace(row, seconds=0.0) for row in first.rows] == [replace(row, seconds=0.0) for row in second.rows]


def test_weights_are_quantized_once_a_format(monkeypatch):
    seen = []
    original = evaluation.quantize_weights
    monkeypatch.setattr(
        evaluation,
        "quantize_weights",
        lambda model, block, **kw: seen.append(block.name) or original(model, block, **kw),
    )
    run(activations=["none", "same", "mxfp8_e4m3"])
    assert seen == ["mxfp4", "nvfp4"]


def test_a_dense_model_is_evaluated_through_its_linears():
    report = run("llama", formats=["mxfp8_e4m3"])
    model = tiny_model("llama")
    assert report.layers == "all"
    assert report.quantized_weights == sum(linear.weight.numel() for linear in find_linears(model).values())
    assert report.rows[1].change != 0 and report.rows[2].change != report.rows[1].change


def test_a_recipe_decides_which_formats_are_evaluated_by_default():
    report = run(formats=None, recipe="ocp_even", activations=["none"])
    assert [row.weights for row in report.rows[1:]] == [name for name in FORMATS if name != "nvfp4"]
    assert {row.recipe for row in report.rows[1:]} == {"ocp_even"}
    with pytest.raises(ValueError, match="ocp_even.*nvfp4"):
        run(recipe="ocp_even")


def test_activations_take_their_formats_default_where_the_weights_recipe_does_not_fit_them():
    rows = run(formats=["nvfp4"], recipe="nvidia_16x16", activations=["same", "mxfp8_e4m3"]).rows[1:]
    assert [(row.recipe, row.act_recipe) for row in rows] == [("nvidia_16x16", "nvidia"), ("nvidia_16x16", "ocp")]
    (row,) = run(formats=["mxfp4"], act_recipe="ocp_rceil", activations=["same"]).rows[1:]
    assert (row.recipe, row.act_recipe) == ("ocp", "ocp_rceil")


def test_interrupting_keeps_the_rows_that_finished():
    model = tiny_model("qwen3moe")
    before = logits(model)

    def interrupt(label, done, total):
        if label == "mxfp4 / mxfp4" and done:
            raise KeyboardInterrupt

    report = evaluate(model, tiny_tokenizer(), text=TEXT, window=16, tokens=64, on_progress=interrupt)
    assert [row.label for row in report.rows] == ["bf16 / bf16", "mxfp4 / bf16"]
    assert not report.complete and "INTERRUPTED" in str(report)
    assert_same_bits(logits(model), before)

    def at_once(label, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, tiny_tokenizer(), text=TEXT, window=16, tokens=64, on_progress=at_once)


def test_progress_counts_up_to_every_window_of_every_row():
    seen = {}
    run(on_progress=lambda label, done, total: seen.setdefault(label, []).append((done, total)))
    assert len(seen) == 5
    for steps in seen.values():
        assert steps[0] == (0, 8) and steps[-1] == (8, 8) and steps == sorted(steps)


def test_reports_are_written_as_json_csv_text_and_plot(tmp_path):
    pytest.importorskip("matplotlib")
    report = run()
    data = json.loads(report.to_json())
    assert [row["bits_per_byte"] for row in data["rows"]] == [row.bits_per_byte for row in report.rows]
    assert set(data) >= {"model", "windows", "scored_bytes", "machine", "versions", "date", "conventions"}
    rows = list(csv.DictReader(io.StringIO(report.to_csv())))
    assert [float(row["perplexity"]) for row in rows] == [row.perplexity for row in report.rows]
    assert rows[0]["change"] == "" and rows[1]["recipe"] == "ocp"
    assert all(f"{row.bits_per_byte:.4f}" in str(report) for row in report.rows)
    report.plot(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nosuch"):
        report.plot(tmp_path / "plot.nosuch")


def test_a_report_without_text_says_bits_per_token_and_leaves_out_what_says_nothing():
    report = evaluate(tiny_model("mixtral"), ids="random", formats=["mxint8"], activations=["none"], window=16, tokens=64)
    written = json.loads(report.to_json())
    assert report.unit == "token" and "bits_per_token" in written["conventions"]
    for row, found in zip(report.rows, written["rows"]):
        assert found["bits_per_byte"] is None and found["bits_per_token"] == row.bits
        assert row.bits == pytest.approx(math.log2(row.perplexity))
    only_stored = replace(report, rows=report.rows[:1])
    shown = [[column.header for column in each.table().columns] for each in (report, only_stored)]
    assert "SNR dB" in shown[0] and "SNR dB" not in shown[1]


def test_of_what_torchao_says_when_imported_the_known_is_not_shown(caplog):
    from mxref.cli import _quiet_torchao

    torchao, pytree = logging.getLogger("torchao"), logging.getLogger("torch.utils._pytree")

    def speak():
        caplog.clear()
        torchao.warning("Skipping import of cpp extensions due to incompatible torch version. Please upgrade")
        torchao.warning("Failed to load /packages/torchao/_C_mxfp8.cpython-310-x86_64-linux-gnu.so: Could not load it")
        pytree.warning("%s is an Enum subclass and is now natively supported", "<enum 'KernelPreference'>")
        torchao.warning("something else")
        pytree.warning("something else")
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, "torchao"), caplog.at_level(logging.WARNING, "torch.utils._pytree"):
        with _quiet_torchao():
            assert set(speak()) == {"something else"}
        assert "something else" in speak() and len(set(speak())) > 1


def test_numbers_that_json_lacks_are_written_as_words():
    row = replace(run(formats=["mxfp4"], tokens=16).rows[1], snr_db=math.inf)
    assert math.isnan(row.change_error)  # a single window has no standard error
    text = mxref.models.report.json_text(row)
    assert json.loads(text)["snr_db"] == "Infinity" and json.loads(text)["change_error"] == "NaN"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"formats": ["mxfp5"]}, "format='mxfp5'.*mxfp4, mxfp6_e2m3"),
        ({"formats": []}, r"formats=\[\].*mxfp4"),
        ({"activations": ["w8"]}, "format='w8'.*mxfp4"),
        ({"activations": []}, "activations=.*'none', 'same'"),
        ({"semantics": "exact"}, "semantics='exact'.*'blockwise' or 'dequantized'"),
        ({"recipe": "nosuch"}, "recipe='nosuch'.*ocp"),
        ({"layers": "some"}, "layers='some'.*experts, all"),
        ({"window": 1}, "window=1.*2 to 64"),
        ({"window": 65}, "window=65.*2 to 64"),
        ({"text": "short"}, "5 tokens are too few.*window of 16"),
        ({"tokens": 15}, "15 tokens are too few.*window of 16"),
        ({"text": Path("no-such-file.txt")}, "text='no-such-file.txt'"),
        ({"device": "nosuch"}, "device='nosuch'"),
    ],
)
def test_bad_arguments_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_models_and_tokenizers_that_cannot_be_loaded_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"model='\./nothing-here': no such directory"):
        evaluate("./nothing-here")
    with pytest.raises(ValueError, match=f"model='{tmp_path}'"):
        evaluate(tmp_path)
    with pytest.raises(ValueError, match="tokenizer=None"):
        evaluate(tiny_model("llama"), text=TEXT)
    with pytest.raises(ValueError, match="tokenizer=object: expected a fast tokenizer"):
        evaluate(tiny_model("llama"), object(), text=TEXT, window=16)
    with pytest.raises(ValueError, match="it gives the id 220, the model has 64"):
        evaluate(tiny_model("llama", vocab_size=64), tiny_tokenizer(), text=TEXT, window=16)


def test_importing_the_package_imports_no_transformers_and_no_typer():
    code = "import sys, mxref, mxref.models; print(*{'transformers', 'typer', 'rich', 'matplotlib'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


@pytest.mark.parametrize("blocked", ["transformers", "rich", "matplotlib"])
def test_a_missing_extra_is_named(blocked, monkeypatch, tmp_path):
    report = run(formats=["mxfp4"], tokens=32)
    for name in {blocked, *(name for name in sys.modules if name.split(".")[0] == blocked)}:
        monkeypatch.setitem(sys.modules, name, None)
    act = {"transformers": run, "rich": report.table, "matplotlib": lambda: report.plot(tmp_path / "x.png")}[blocked]
    with pytest.raises(ImportError, match=r"pip install 'mxref\[models\]'"):
        act()
