"""`mxref.models.load`: real checkpoints compute what their tools compute, and what does not fit is refused by name.

MXREF_CHECKPOINTS names a directory of whole checkpoints to run the first tests on besides the one that is kept here.
"""

import hashlib
import os
import tarfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from bits import assert_same_bits

pytest.importorskip("transformers")

from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from mxref.models import load

DATA = Path(__file__).parent / "data" / "checkpoints"
KEPT = "llmcompressor-nvfp4-qwen3moe"
SHARED = Path(os.environ["MXREF_CHECKPOINTS"]) if os.environ.get("MXREF_CHECKPOINTS") else None
WHOLE = [None] + (sorted(path.parent for path in SHARED.glob("*/model.safetensors")) if SHARED else [])
TOOLS = [path for path in WHOLE if path is None or path.name.startswith(("llmcompressor", "quark", "gptoss"))]

# Of a model of stated weights, the logits' sha256 on a machine whose kernels give every golden logit.
PROBE = "8461c608973ef1ad"


def label(path):
    return f"{KEPT}-kept" if path is None else path.name


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    """The whole checkpoint of llm-compressor that is kept in the repository."""
    folder = tmp_path_factory.mktemp("whole")
    with tarfile.open(DATA / "whole.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder / KEPT


@pytest.fixture
def whole(request, kept):
    """A path, the kept checkpoint for None."""
    return kept if request.param is None else request.param


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.float()


def golden_logits(path):
    """Input ids, and the logits of the tool itself."""
    golden = load_file(next(path.glob("golden_logits*.safetensors")))
    ids = golden.pop("input_ids")
    (expected,) = golden.values()
    return ids, expected


@pytest.fixture(scope="session")
def same_kernels(kept):
    """Skips where torch's bfloat16 kernels sum in another order than those that made the golden logits."""
    config = AutoConfig.from_pretrained(kept)
    del config.quantization_config
    probe = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for index, parameter in enumerate(probe.parameters()):
        i = torch.arange(parameter.numel(), dtype=torch.int64) + 7919 * index
        values = ((i * i * 48271 + i * 69621) % 65521 - 32760).float() / 2**18
        values = values * 2.0 ** -(i * 40503 % 7).float() + (parameter.ndim == 1)
        parameter.data.copy_(values.view(parameter.shape))
    probe.set_experts_implementation("eager")
    found = logits(probe, torch.arange(512).view(8, 64) * 10 % 509)
    if hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] != PROBE:
        pytest.skip("this machine's bfloat16 kernels round otherwise than those that made the golden logits")


# real checkpoints


@pytest.mark.parametrize("whole", TOOLS, ids=label, indirect=True)
def test_logits_are_those_of_the_tool_that_wrote_the_checkpoint(whole, same_kernels):
    ids, expected = golden_logits(whole)
    assert_same_bits(logits(load(whole), ids), expected)


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def by_hand(path):
    """The checkpoint of llm-compressor in NVFP4 by transformers' own Qwen3-MoE: weights decoded and inputs quantized with
    torch, numpy and ml_dtypes alone."""
    stored = load_file(path / "model.safetensors")
    config = AutoConfig.from_pretrained(path)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def weight(stem):
        packed, scales = stored[f"{stem}.weight_packed"], stored[f"{stem}.weight_scale"].float()
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
        values = E2M1[codes & 7] * (1 - 2 * (codes >> 3))
        factor = scales / stored[f"{stem}.weight_global_scale"]
        return (values.unflatten(1, (-1, 16)) * factor[..., None]).flatten(1).bfloat16()

    def fake_quantized(x, scale):
        blocks = x.unflatten(-1, (-1, 16))
        amax = (blocks.abs().amax(-1, keepdim=True) / 6).float()  # in bfloat16, as the input
        block_scale = (scale * amax).clamp(max=448).to(torch.float8_e4m3fn).float()
        factor = torch.where(block_scale == 0, 0.125, block_scale) / scale
        quotient = (blocks.float() / factor).clamp(-6, 6).numpy()
        rounded = torch.from_numpy(quotient.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))
        return (rounded * factor).bfloat16().flatten(-2)

    class Expert:
        def __init__(self, stem):
            parts = ("gate_proj", "up_proj", "down_proj")
            self.weights = [weight(f"{stem}.{part}") for part in parts]
            self.scales = [stored[f"{stem}.{part}.input_global_scale"] for part in parts]

        def __call__(self, x):
            gate, up = (linear(fake_quantized(x, s), w) for w, s in zip(self.weights[:2], self.scales[:2]))
            hidden = torch.nn.functional.silu(gate) * up
            return linear(fake_quantized(hidden, self.scales[2]), self.weights[2])

    class Experts(torch.nn.Module):
        def __init__(self, name, count):
            super().__init__()
            self.each = [Expert(f"{name}.{index}") for index in range(count)]

        def forward(self, x, ids, weights):
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.each):
                token, slot = (ids == index).nonzero(as_tuple=True)
                if len(token):
                    out[token] += expert(x[token]) * weights[token, slot, None]
            return out

    plain = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    left = model.load_state_dict(plain, strict=False)
    assert not left.unexpected_keys and all(".experts." in name for name in left.missing_keys)
    for index, layer in enumerate(model.model.layers):
        layer.mlp.experts = Experts(f"model.layers.{index}.mlp.experts", config.num_experts)
    return model


def test_logits_are_those_of_a_forward_pass_written_by_hand(kept):
    ids, _ = golden_logits(kept)
    assert_same_bits(logits(load(kept), ids), logits(by_hand(kept), ids))
