"""Ops in compiled graphs: one opaque node a call, eager's bits and gradients, and kernels chosen when the graph runs."""

import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
import torch

import mxref
from mxref import functions, registry
from mxref.comparison import difference
from mxref.compiled import OUTLINES

OWN = replace(mxref.RECIPES["ocp"], name="own", rounding="stochastic", transform=mxref.Hadamard(4))
FORMATS = ("mxfp4", "nvfp4", "mxfp8_e4m3")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    torch.manual_seed(0)


class Graphs:
    """A backend that keeps the graphs it is given."""

    def __init__(self, then="aot_eager"):
        self.graphs, self.then = [], torch._dynamo.lookup_backend(then)

    def __call__(self, module, inputs):
        self.graphs.append(module.graph)
        return self.then(module, inputs)

    def nodes(self) -> list:
        return [n.target for graph in self.graphs for n in graph.nodes if n.op in ("call_function", "call_method")]


class Checked(torch.fx.Interpreter):
    """Runs a graph node by node: what a call returns must have the shapes and dtypes that were promised."""

    def run_node(self, node):
        result = super().run_node(node)
        if node.target is torch.ops.mxref.call:
            promised = node.meta["example_value"]
            described = [[(tuple(t.shape), t.is_contiguous(), t.dtype, t.device) for t in ts] for ts in (result, promised)]
            assert described[0] == described[1]
        return result


def assert_same(actual, expected) -> None:
    """The same bits, and of block-scaled tensors the same records."""
    if isinstance(expected, tuple):
        assert len(actual) == len(expected)
        for pair in zip(actual, expected):
            assert_same(*pair)
        return
    assert difference(actual, expected) is None
    if isinstance(expected, mxref.BlockTensor):
        for name in ("length", "format", "recipe", "axis", "shape"):
            assert getattr(actual, name) == getattr(expected, name)


def assert_compiles(function, *args, backend="aot_eager"):
    """`function` compiles, silently, to one graph that promises and gives what eager gives; returns the backend."""
    expected, backend = function(*args), Graphs(backend)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert_same(compiled(*args), expected)
    assert len(backend.graphs) == 1
    torch._dynamo.reset()
    torch.compile(function, fullgraph=True, backend=lambda module, inputs: Checked(module).run)(*args)
    return backend


def values(*shape, dtype=torch.float32):
    x = torch.randn(shape) * torch.tensor([1e-3, 1.0, 40.0])[torch.randint(3, shape)]
    x.view(-1)[:3] = torch.tensor([0.0, -0.0, torch.inf])
    return x.to(dtype)


# ---- every op -------------------------------------------------------------------------------------------------------


BLOCK_CASES = [*((format, torch.float32) for format in FORMATS), ("mxfp4", torch.bfloat16), ("nvfp4", torch.float16)]


@pytest.mark.parametrize("format, dtype", BLOCK_CASES, ids=str)
def test_block_ops(format, dtype):
    w = mxref.quantize(torch.randn(8, 80), format)

    def each(x, w, bias):
        q = mxref.quantize(x, format)
        products = mxref.matmul(q, w, bias=bias, out_dtype=dtype), mxref.matmul(x, w, semantics="dequantized")
        return mxref.qdq(x, format), q, mxref.dequantize(w, dtype), *products

    assert_compiles(each, values(4, 80, dtype=dtype), w, torch.ones(8))


@pytest.mark.parametrize("element", ["e2m1", "e3m2", mxref.ELEMENT_FORMATS["e4m3"]], ids=str)
def test_element_ops(element):
    bits = mxref.BLOCK_FORMATS["mxfp4"].element.bits if element == "e2m1" else 8

    def both(x):
        codes = mxref.encode(x, element, rounding="stochastic", seed=(1 << 64) - 1)
        packed = mxref.pack(codes, bits)
        return (
            mxref.decode(mxref.unpack(packed, bits, x.shape[-1]), element),
            packed,
            mxref.block_dot(codes, codes, "e2m1", "e2m1"),
        )

    def apart(x):
        codes = mxref.encode(x, element=element, overflow="saturate")
        return codes, mxref.decode(codes, element)

    x = torch.randn(3, 33)
    assert_compiles(both if element == "e2m1" else apart, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions(dtype):
    gate, up = values(5, 7, dtype=dtype), torch.randn(5, 7).to(dtype)

    def all_of_them(gate, up):
        unary = [getattr(functions, name)(gate) for name in ("exp", "sigmoid", "silu", "gelu_tanh", "relu2")]
        return *unary, functions.swiglu(gate, up), functions.swiglu_oai(gate, up, alpha=1.5, limit=6.0)

    backend = assert_compiles(all_of_them, gate, up)
    assert backend.nodes().count(torch.ops.mxref.call) == 7


@pytest.mark.parametrize("layout", ["linear", "tile_128x4", "ggml_mxfp4", "interleaved"])
def test_layouts(layout):
    codes = torch.randint(0, 16, (2, 130, 96), dtype=torch.uint8)[..., :64]

    def there_and_back(codes):
        stored = mxref.to_layout(codes, layout)
        return stored, mxref.from_layout(stored, layout, codes.shape)

    for case in (codes, codes[0], codes[0, 0]):
        if case.ndim > 1 or layout in ("linear", "ggml_mxfp4"):
            assert_compiles(there_and_back, case)


def test_experts():
    w13, w2 = (mxref.quantize(torch.randn(4, n, 64), "nvfp4", tensor_scale="per_expert") for n in (128, 64))

    def layer(x, logits):
        ids, weights = mxref.route(logits, 2, correction_bias=torch.zeros(4), scaling_factor=2.5)
        terms = mxref.moe_experts(x, w13, w2, ids, weights, act_format="nvfp4", combine=False)
        whole = mxref.moe_experts(x, w13, w2, ids, weights, out_dtype=torch.float16)
        return ids, weights, terms, whole, mxref.combine([terms, torch.zeros_like(terms)], out_dtype=torch.bfloat16)

    assert_compiles(layer, torch.randn(3, 64).bfloat16(), torch.randn(3, 4))


@pytest.mark.parametrize("activation, format, scale", [("silu", "nvfp4", "per_row"), ("relu2", "mxfp4", None)])
def test_activate_quantize(activation, format, scale):
    def middle(x):
        return mxref.activate_quantize(x, format, activation=activation, tensor_scale=scale)

    assert_compiles(middle, torch.randn(3, 2, 64))


def test_all_ops_are_covered():
    assert set(registry.OPS) - set(OUTLINES) == {"explain"}


SHAPES_OF_TENSOR_SCALES = [(), (1,), (4,), (4, 6), (4, 2), (4, 6, 1), (1, 6, 1)]


@pytest.mark.parametrize("scale", [None, "none", "per_tensor", "per_row", "per_expert", *SHAPES_OF_TENSOR_SCALES], ids=str)
def test_tensor_scales(scale):
    given = torch.full(scale, 0.25) if isinstance(scale, tuple) else scale
    assert_compiles(lambda x, s: mxref.quantize(x, "nvfp4", tensor_scale=s), torch.randn(4, 6, 40), given)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp6_e3m2"])
def test_axes(format, axis):
    def each(x):
        q, across = (mxref.quantize(x, format, axis=axis, tensor_scale=scale) for x in (x, x.transpose(0, 1)))
        return q, mxref.dequantize(q), across, mxref.qdq(x.transpose(0, 1), format, axis=axis)

    scale = "per_row" if format == "nvfp4" else None
    assert_compiles(each, torch.randn(20, 36, 24))


def test_recipes_are_arguments():
    """Named rows, rows with blocks of many rows, and records that the caller made, one after the other."""
    backend = Graphs()
    compiled = torch.compile(mxref.quantize, fullgraph=True, backend=backend)
    x, oai = torch.randn(32, 64), replace(mxref.RECIPES["nvidia"], name="oai", scale_max=256.0)
    calls = [("mxfp4", "ocp_even", None), ("mxfp4", OWN, 7), ("nvfp4", "nvidia_16x16", None), ("nvfp4", oai, None)]
    calls += [("nvfp4", replace(oai, block_rows=rows, scale_max=448.0 / rows), None) for rows in (2, 8)]
    calls.append((replace(mxref.BLOCK_FORMATS["mxfp4"], name="mxfp4_64", block_size=64), None, None))
    for format, recipe, seed in calls:
        actual, expected = (f(x, format, recipe=recipe, seed=seed) for f in (compiled, mxref.quantize))
        assert difference(actual, expected) is None
        assert (actual.recipe, actual.format) == (expected.recipe, expected.format)
    count = len(backend.graphs)
    compiled(x, "mxfp4", recipe=replace(OWN), seed=7)
    assert len(backend.graphs) == count, "an equal record is the same call"


def test_a_recipe_made_in_the_graph():
    assert_compiles(
        lambda x: mxref.qdq(x, "mxfp4", recipe=replace(mxref.RECIPES["ocp"], name="own", scale_rule="rceil")), values(4, 64)
    )


# ---- graphs ---------------------------------------------------------------------------------------------------------


def test_a_call_is_one_node():
    backend = assert_compiles(lambda x: mxref.qdq(x, "nvfp4", recipe="exact"), torch.randn(4, 32))
    assert [str(target) for target in backend.nodes()] == ["mxref.call", "<built-in function getitem>"]


def test_inductor():
    w = mxref.quantize(torch.randn(8, 64), "nvfp4")
    assert_compiles(lambda x: mxref.matmul(mxref.qdq(x * 2, "mxfp4") + 1, w).relu(), values(4, 64), backend="inductor")


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_second_batch_size(dynamic):
    w, backend = mxref.quantize(torch.randn(8, 64), "nvfp4"), Graphs()

    def step(x):
        codes = mxref.encode(x, "e2m1")
        unpacked = mxref.unpack(mxref.pack(codes, 4), 4, x.shape[-1])
        tiles = mxref.from_layout(mxref.to_layout(codes, "tile_128x4"), "tile_128x4", codes.shape)
        return mxref.qdq(x, "nvfp4"), unpacked, tiles, mxref.matmul(mxref.quantize(x, "mxfp4"), w)

    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    for rows in (4, 7, 130, 4):
        x = torch.randn(rows, 64)
        assert difference(compiled(x), step(x)) is None
    assert len(backend.graphs) <= 2


def test_seeds_do_not_recompile():
    backend, x = Graphs(), torch.randn(4, 64)
    compiled = torch.compile(lambda x, seed: mxref.qdq(x, "mxfp4", recipe=OWN, seed=seed), fullgraph=True, backend=backend)
    for seed in range(6):
        assert difference(compiled(x, seed), mxref.qdq(x, "mxfp4", recipe=OWN, seed=seed)) is None
    assert len(backend.graphs) == 2


class Layer(torch.nn.Module):
    """A linear layer with a quantized weight, for export."""

    def __init__(self):
        super().__init__()
        self.weight = mxref.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), "nvfp4")

    def forward(self, x):
        codes = mxref.unpack(mxref.encode(x.T, "e4m3"), 8, x.shape[0])  # a size of the graph as an argument
        return mxref.matmul(mxref.qdq(x, "mxfp4", recipe=replace(OWN, rounding="nearest_even")), self.weight), codes


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_means_the_same_in_another_process(strict, tmp_path):
    layer, x = Layer(), torch.randn(3, 64)
    exported = torch.export.export(
        layer, (torch.randn(4, 64),), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=strict
    )
    assert difference(exported.module()(x), layer(x)) is None
    torch.export.save(exported, tmp_path / "layer.pt2")
    torch.save((x, layer(x)), tmp_path / "run.pt")
    script = (
        "import sys, torch, mxref\nfrom mxref.comparison import difference\n"
        "x, y = torch.load(sys.argv[1] + '/run.pt')\n"
        "found = difference(torch.export.load(sys.argv[1] + '/layer.pt2').module()(x), y)\n"
        "sys.exit(found)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script, str(tmp_path)], check=True)


# ---- gradients ------------------------------------------------------------------------------------------------------


def gradients(function, *args):
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    y = function(*leaves)
    (y.float() * torch.linspace(-1, 2, y.numel()).reshape(y.shape)).sum().backward()
    return y, *[leaf.grad for leaf in leaves]


def assert_same_gradients(function, *args, backend="aot_eager"):
    expected = gradients(function, *args)
    actual = gradients(torch.compile(function, fullgraph=True, backend=backend), *args)
    assert difference(actual, expected) is None


@pytest.mark.parametrize("gradient", ["straight_through", "clipped"])
@pytest.mark.parametrize("format, dtype", BLOCK_CASES, ids=str)
def test_gradients_of_qdq(format, dtype, gradient):
    assert_same_gradients(lambda x: mxref.qdq(x, format, gradient=gradient), values(4, 80, dtype=dtype))


def test_gradients_of_qdq_through_a_transform():
    assert_same_gradients(lambda x: mxref.qdq(x, "mxfp4", recipe=OWN, seed=3, gradient="clipped"), torch.randn(4, 64) * 9)


@pytest.mark.parametrize("name", ["exp", "sigmoid", "silu", "gelu_tanh", "relu2", "swiglu", "swiglu_oai"])
def test_gradients_of_functions(name):
    assert_same_gradients(getattr(functions, name), *[torch.randn(4, 8) for _ in range(1 + name.startswith("swiglu"))])


def test_gradients_of_products():
    w = mxref.quantize(torch.randn(8, 64), "nvfp4")
    assert_same_gradients(lambda x, bias: mxref.matmul(x, w, bias=bias), torch.randn(4, 64), torch.randn(8))
    assert_same_gradients(lambda x: mxref.matmul(mxref.qdq(x, "mxfp4") * 2, w), torch.randn(4, 64), backend="inductor")


def test_gradients_of_experts():
    w13, w2 = (mxref.quantize(torch.randn(4, n, 64), "mxfp4") for n in (128, 64))

    def layer(x, logits):
        return mxref.moe_experts(x, w13, w2, *mxref.route(logits, 2))

    assert_same_gradients(layer, torch.randn(3, 64), torch.randn(3, 4))


def test_only_x_has_a_gradient_straight_through():
    x, scale = torch.randn(4, 32, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    compiled = torch.compile(
        lambda x, s: mxref.qdq(tensor_scale=s, x=x, format="nvfp4"), fullgraph=True, backend="aot_eager"
    )
    compiled(x, scale).sum().backward()
    assert x.grad.eq(1).all() and scale.grad is None


@pytest.mark.parametrize("gradient", ["straight_through", "clipped"])
def test_torch_func_takes_the_gradient_of_qdq(gradient):
    def loss(x):
        return (mxref.qdq(x, "nvfp4", gradient=gradient) * torch.arange(64)).sum()

    x = torch.randn(4, 64) * 9
    leaf = x.clone().requires_grad_()
    loss(leaf).backward()
    assert difference(torch.func.grad(loss)(x), leaf.grad) is None


def test_no_gradient_passes_quantize():
    assert_same_gradients(lambda x: mxref.dequantize(mxref.quantize(x, "nvfp4")) * x, torch.randn(4, 32))


# ---- dispatch and errors --------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    """Calls of the backend `fake`, whose qdq gives zeros."""
    seen = []

    def qdq(x, format, *, recipe=None, tensor_scale=None, axis=-1, seed=None, gradient="straight_through"):
        seen.append((format, recipe))
        return torch.zeros_like(x)

    fake = registry.Kernel("qdq", "fake", qdq, "bitexact", ("cpu",), (torch.float32,))
    monkeypatch.setattr(registry, "backends", lambda: ("fake",))
    monkeypatch.setattr(registry, "kernel", lambda op, backend: fake if op == "qdq" else None)
    return seen


def test_the_kernel_is_chosen_when_the_graph_runs(calls):
    x, backend = torch.ones(2, 32), Graphs()
    compiled = torch.compile(lambda x: mxref.qdq(x, "mxfp4", recipe=OWN, seed=1) + 1, fullgraph=True, backend=backend)
    assert compiled(x).ne(1).all() and not calls
    with mxref.use("fake"):
        assert compiled(x).eq(1).all() and calls == [("mxfp4", OWN)]
        assert compiled(x.half()).ne(1).all() and len(calls) == 1, "the kernel refuses float16"
        with pytest.raises(AssertionError, match="qdq.fake differs from the reference"), mxref.use("fake", check=True):
            compiled(x)
        with pytest.raises(RuntimeError, match="no selected kernel takes"), mxref.use("fake", strict=True):
            compiled(x.half())
    assert compiled(x).ne(1).all() and len(calls) == 2
    assert len(backend.graphs) == 2, "one a dtype: the selection is no part of a graph"


def test_a_selection_within_the_compiled_function(calls):
    def selecting(x):
        with mxref.use("fake"):
            y = mxref.qdq(x, "mxfp4")
        return y + mxref.qdq(x, "mxfp4")

    x = torch.ones(2, 32)
    assert torch.compile(selecting, backend="aot_eager")(x).eq(1).all() and len(calls) == 1


def test_the_kernel_answers_where_gradients_are_recorded(calls):
    x = torch.ones(2, 32, requires_grad=True)
    compiled = torch.compile(lambda x: mxref.qdq(x, "mxfp4"), fullgraph=True, backend="aot_eager")
    with mxref.use("fake"):
        y = compiled(x)
    y.sum().backward()
    assert len(calls) == 1 and y.eq(0).all() and x.grad.eq(1).all()


WRONG = {
    "format='mxfp9': expected one of mxfp4": lambda x: mxref.qdq(x, "mxfp9"),
    "format='fp9': expected one of mxfp4": lambda x: mxref.quantize(x, "fp9"),
    "recipe='ocp_odd': expected one of ocp": lambda x: mxref.quantize(x, "mxfp4", recipe="ocp_odd"),
    "gradient='up'": lambda x: mxref.qdq(x, "mxfp4", gradient="up"),
    "axis=2": lambda x: mxref.quantize(x, "mxfp4", axis=2),
    "tensor_scale holds -1.0": lambda x: mxref.quantize(x, "nvfp4", tensor_scale=torch.tensor(-1.0)),
    "tensor_scale has shape": lambda x: mxref.quantize(x, "nvfp4", tensor_scale=torch.ones(5)),
    "x holds NaN": lambda x: mxref.qdq(x * torch.nan, "mxfp4", recipe=replace(OWN, nan="raise"), seed=0),
    "x has dtype torch.float64": lambda x: mxref.encode(x.double(), "e2m1"),
    "b has type Tensor: expected BlockTensor": lambda x: mxref.matmul(x, x),
}


@pytest.mark.parametrize(
    "message, backend", [*((message, "aot_eager") for message in WRONG), (next(iter(WRONG)), "inductor")]
)
def test_errors_are_eagers(message, backend):
    x = torch.randn(2, 32)
    with pytest.raises((ValueError, TypeError)) as eager:
        WRONG[message](x)
    with pytest.raises(eager.type) as compiled:
        torch.compile(WRONG[message], fullgraph=True, backend=backend)(x)
    assert str(compiled.value).startswith(str(eager.value)) and message in str(eager.value)


def test_what_a_graph_cannot_hold():
    class OtherRecipe(mxref.Recipe):
        pass

    recipe, x = OtherRecipe("other", "floor"), torch.randn(2, 32)
    compiled = torch.compile(mxref.qdq, backend="aot_eager")
    assert difference(compiled(x, "mxfp4", recipe=recipe), mxref.qdq(x, "mxfp4")) is None
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(mxref.qdq, backend="aot_eager", fullgraph=True)(x, "mxfp4", recipe=recipe)


@pytest.mark.parametrize("gradient", ["straight_through", "clipped"])
def test_the_custom_ops_keep_torchs_rules(gradient):
    x = torch.randn(4, 32, requires_grad=True)
    arguments = ("tuple", ("tensor",), "mxfp4", ("int",), gradient)
    call = [-1], repr(("qdq", ("constants", "axis", "gradient"), arguments))
    torch.library.opcheck(torch.ops.mxref.call.default, ([x], *call))
    torch.library.opcheck(torch.ops.mxref.call_backward.default, ([x.detach()], *call, [torch.ones(4, 32)], [0]))


def test_outputs_never_alias_inputs():
    """`to_layout` returns its argument, `quantize` its tensor scale; a graph may not."""
    x, scale = torch.randn(4, 32), torch.tensor(0.5)
    compiled = torch.compile(lambda x: mxref.to_layout(x, "linear"), fullgraph=True, backend="aot_eager")
    assert compiled(x).data_ptr() != x.data_ptr()
    compiled = torch.compile(lambda x, s: mxref.quantize(x, "nvfp4", tensor_scale=s), fullgraph=True, backend="aot_eager")
    assert compiled(x, scale).tensor_scale.data_ptr() != scale.data_ptr()


def test_explain_breaks_the_graph():
    x = torch.ones(32)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        told = torch.compile(lambda x: mxref.explain(x * 1, "mxfp4"), backend="aot_eager")(x)
    assert str(told) == str(mxref.explain(x, "mxfp4"))


@pytest.mark.parametrize(
    "format, recipe", [("mxfp8_e4m3", "torchao_even"), ("nvfp4", "modelopt_nvfp4"), ("nvfp4", "compressed_tensors_nvfp4")]
)
def test_a_producers_recipe_travels_with_its_faults(format, recipe):
    """Between two nodes of a graph the recipe is written out and read again, its faults with it."""
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    x[0, 3], x[1] = torch.nan, 0.0

    def function(x):
        q = mxref.quantize(x, format, recipe=recipe)
        return q, mxref.dequantize(q, torch.bfloat16)

    assert_same(torch.compile(function, backend=Graphs(), fullgraph=True)(x), function(x))


def test_vmap_is_a_loop():
    """Each call means what it would alone, a tensor scale and the axis of the stack included."""
    x, w = torch.randn(3, 5, 32), mxref.quantize(torch.randn(8, 32), "nvfp4")
    for step in (
        lambda v: mxref.qdq(v, "nvfp4"),
        lambda v: mxref.matmul(mxref.quantize(v, "nvfp4"), w),
        lambda v: functions.swiglu(v, v * 2),
        torch.func.grad(lambda v: (mxref.qdq(v, "mxfp4") * v).sum()),
    ):
        assert difference(torch.vmap(step)(x), torch.stack([step(v) for v in x])) is None
        mapped = torch.vmap(step, in_dims=1, out_dims=1)(x)
        assert difference(mapped, torch.stack([step(v) for v in x.unbind(1)], 1)) is None
    watched = x.clone().requires_grad_()
    torch.vmap(lambda v: mxref.qdq(v, "mxfp4"))(watched).sum().backward()
    assert torch.equal(watched.grad, torch.ones_like(x))
    assert torch.equal(torch.func.jacrev(lambda v: mxref.qdq(v, "mxfp4"))(x[0, 0]), torch.eye(32))


@pytest.mark.parametrize("gradient", ["straight_through", "clipped"])
def test_derivatives_forward_are_those_backward(gradient):
    """The Jacobian is diagonal: 1, or 0 where the element saturated; so is a Hessian over it."""
    x = 3 * torch.randn(32)
    function = lambda v: mxref.qdq(v, "mxfp4", gradient=gradient)  # noqa: E731
    passes = x.abs() <= 6.0 * torch.tensor(2.0) ** (x.abs().max().log2().floor() - 2)
    wanted = torch.diag(passes.float() if gradient == "clipped" else torch.ones(32))
    assert gradient == "straight_through" or 0 < passes.sum() < 32
    assert torch.equal(torch.func.jacfwd(function)(x), wanted) and torch.equal(torch.func.jacrev(function)(x), wanted)
    assert torch.equal(torch.func.hessian(lambda v: function(v).square().sum())(x), 2 * wanted)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(32))
        assert torch.equal(torch.autograd.forward_ad.unpack_dual(function(dual)).tangent, wanted.sum(0))
        with torch.no_grad(), mxref.use("inductor"):  # a kernel would lose it
            assert torch.equal(torch.autograd.forward_ad.unpack_dual(function(dual)).tangent, wanted.sum(0))


def test_a_derivative_of_vmap_says_what_to_do_instead():
    x, mapped = torch.randn(2, 32), torch.vmap(lambda v: mxref.qdq(v, "mxfp4"))
    for derivative in (torch.func.grad(lambda v: mapped(v).sum()), torch.func.jacfwd(mapped)):
        with pytest.raises(TypeError, match=r"qdq under torch.vmap within torch.func.grad.* torch.vmap\(torch.func.grad"):
            derivative(x)
    assert torch.equal(torch.vmap(torch.func.grad(lambda v: mxref.qdq(v, "mxfp4").sum()))(x), torch.ones_like(x))


def test_what_vmap_cannot_stack_says_so():
    with pytest.raises(TypeError, match="explain under torch.vmap: call it in a loop"):
        torch.vmap(lambda v: (mxref.explain(v, "mxfp4"), v)[1])(torch.randn(2, 32))
    with pytest.raises(ValueError, match="over an axis of size 0"):
        torch.vmap(lambda v: mxref.qdq(v, "mxfp4"))(torch.randn(0, 32))
