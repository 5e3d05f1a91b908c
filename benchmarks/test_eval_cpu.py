"""Evaluating the embedded model: a few windows of its held-out text, beside the model as it is stored."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

import mxref
from benchmarks.contenders import REFERENCE, Contender, normal, peer
from benchmarks.experts import unlike_oracle

pytest.importorskip("transformers")

from mxref.models.corpus import read_text
from mxref.models.sources import Source, open_source, open_tokenizer
from mxref.models.swap import QuantizedWeights, experts_implementation, quantize_weights, quantized

STORED = "as stored, bfloat16"
FORMATS = (("mxfp4", None), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4"), ("mxfp8_e4m3", "mxfp8_e4m3"))
WINDOW = 128


def contenders(quick: bool) -> Iterator[Contender]:
    size = (1, 16) if quick else (16, WINDOW)
    row = Contender("eval", "-", "bfloat16", size, floor=STORED)
    yield replace(peer(row, STORED, partial(_stored, size)), floor=None)
    for format, act_format in FORMATS[1:2] if quick else FORMATS:
        formats = f"{format} {act_format}" if act_format != format else format
        recipe = mxref.BLOCK_FORMATS[format].default_recipe
        yield replace(
            row,
            who=REFERENCE,
            format=formats,
            recipe=recipe,
            prepare=partial(_quantized, size, format, act_format),
            wrong=partial(_unlike_oracle, format, act_format),
        )


@functools.cache
def _source() -> Source:
    source = open_source("model", None, "cpu", "blockwise", "stored")
    source.model.eval()
    return source


@functools.cache
def _weights(format: str) -> QuantizedWeights:
    return quantize_weights(_source().model, format)


@functools.cache
def _windows(size: tuple[int, int]) -> torch.Tensor:
    source = _source()
    count, window = size
    return read_text(None, open_tokenizer(source.tokenizer), source.model, window, count * window).windows


def _stored(size: tuple[int, int]):
    model, windows = _source().model, _windows(size)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        with experts_implementation(model, "eager"):
            return model(input_ids=windows, use_cache=False).logits

    return run


def _quantized(size: tuple[int, int], format: str, act_format: str | None):
    model, windows, weights = _source().model, _windows(size), _weights(format)

    @torch.inference_mode()
    def run() -> torch.Tensor:
        with quantized(model, weights, act_format=act_format) as running:
            return running(input_ids=windows, use_cache=False).logits

    return run


def _unlike_oracle(format: str, act_format: str | None, result: torch.Tensor) -> str | None:
    """What differs in the output of the first layer of experts, for a few tokens of its own routing."""
    if not result.isfinite().all():
        return "logits that are not finite"
    layer = next(iter(_weights(format).experts.values()))
    experts, hidden = layer.w13.shape[0], layer.w13.shape[-1]
    args = (normal((2, hidden), "bfloat16"), layer.w13, layer.w2, *mxref.route(normal((2, experts), seed=1), 2))
    return unlike_oracle(*args, act_format, mxref.moe_experts(*args, act_format=act_format))


def test_eval(timed, contender):
    timed(contender)
