"""No bit depends on torch's default dtype."""

import pytest
import torch

import mxref


def results() -> dict[tuple, str | torch.Tensor]:
    """Of every block format with every recipe it takes, and of the functions, by what was asked."""
    generator, found = torch.Generator().manual_seed(0), {}
    x = torch.randn(24, 80, generator=generator, dtype=torch.float32)
    x[:4] *= torch.logspace(-20, 20, 4, dtype=torch.float32)[:, None]
    x[2, :40] = 0
    for name, block in mxref.BLOCK_FORMATS.items():
        for recipe in mxref.RECIPES.values():
            if recipe.fits(block):
                per_row = [] if recipe.block_rows > 1 else ["per_row"]  # a block of many rows has one tensor scale
                for scale in (None, "none", *per_row) if block.tensor_scale else (None,):
                    seed = 1 if recipe.rounding == "stochastic" else None
                    q = mxref.quantize(x, name, recipe=recipe, tensor_scale=scale, seed=seed)
                    found[name, recipe.name, scale] = torch.cat([q.packed.flatten(), q.scales.flatten()])
                    found[name, recipe.name, scale, "decoded"] = mxref.dequantize(q).view(torch.int32)
        found[name, "explained"] = str(mxref.explain(x[0, :16], name))
        found[name, "matmul"] = mxref.matmul(*[mxref.quantize(x[i::2, :64], name) for i in (0, 1)]).view(torch.int32)
    for name in ("exp", "sigmoid", "silu", "gelu_tanh", "relu2"):
        found[name] = getattr(mxref.functions, name)(x).view(torch.int32)
    return found


@pytest.fixture(scope="module")
def expected():
    return results()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_no_bit_depends_on_the_default_dtype(dtype, expected):
    torch.set_default_dtype(dtype)
    try:
        found = results()
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        same = torch.equal(found[key], value) if isinstance(value, torch.Tensor) else found[key] == value
        assert same, key
