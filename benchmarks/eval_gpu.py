"""GPU: `mxref eval` by a backend's kernels beside the reference on the CPU, every call of experts held to it, bit by bit.

    python -m benchmarks.eval_gpu --json benchmarks/results/eval-h200.json
    TRITON_INTERPRET=1 python -m benchmarks.eval_gpu --device cpu --formats mxfp4 --tokens 32 --window 16

What a layer of experts was given on the device goes to the reference on the CPU, whose output must have the same bits. The
tables of both evaluations differ where the rest of the model does: its attention, norms and head are torch's on both.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch

import mxref
from mxref.comparison import difference
from mxref.conformance.report import environment
from mxref.conformance.runner import to_device
from mxref.models import evaluate, layers
from mxref.models.report import EvaluationReport, json_text


@dataclasses.dataclass
class Layer:
    """What is known of one layer of experts in one row of an evaluation. `by`: who answered; `wrong`: the first difference
    from the reference, None if there is none."""

    setting: str
    layer: int
    by: str
    calls: int = 0
    tokens: int = 0
    wrong: str | None = None

    @property
    def equal(self) -> bool:
        return self.wrong is None


@contextlib.contextmanager
def held_to_reference(backend: str, setting: list[str]) -> Iterator[list[Layer]]:
    """Within the block, the experts of a model are those of `backend`, and compared with the reference's on the CPU;
    `setting[0]` names the row of the evaluation that is at work. Layers are numbered as they are first called."""
    found: dict[tuple[str, int], Layer] = {}

    def compared(x, w13, *args, **options) -> torch.Tensor:
        with mxref.use(backend):
            out = mxref.moe_experts(x, w13, *args, **options)
            by = mxref.explain_dispatch("moe_experts", x, w13, *args, **options).backend
        number = sum(layer.setting == setting[0] for layer in found.values())
        layer = found.setdefault((setting[0], id(w13)), Layer(setting[0], number, by))
        with mxref.use():
            expected = mxref.moe_experts(*to_device((x, w13, *args), "cpu"), **to_device(options, "cpu"))
        layer.calls, layer.tokens = layer.calls + 1, layer.tokens + len(x)
        layer.wrong = layer.wrong or difference(out.cpu(), expected)
        return out

    shown: list[Layer] = []
    with patch.object(layers, "moe_experts", compared):
        yield shown
    shown.extend(found.values())


def evaluated(backend: str, device: str, others: bool = True, **options) -> tuple[EvaluationReport, list[Layer]]:
    """An evaluation on `device`, and its layers of experts, by `backend`, against the reference; `others`: what else mxref
    computes is by `backend` too. `options`: of `evaluate`."""
    setting = [""]

    def progress(label: str, done: int, total: int) -> None:
        setting[0] = label

    with held_to_reference(backend, setting) as found, mxref.use(*[backend] * others):
        report = evaluate(device=device, on_progress=progress, **options)
    return report, found


def record(report: EvaluationReport, reference: EvaluationReport, found: list[Layer], commit: str | None) -> dict:
    """What is written: rows as `mxref eval` has them, with the reference's numbers on the CPU beside, and layers."""
    rows = []
    for ours, theirs in zip(report.rows, reference.rows, strict=True):
        beside = {f"cpu_{name}": getattr(theirs, name) for name in ("bits_per_byte", "change", "perplexity", "seconds")}
        own = [layer for layer in found if layer.setting == ours.label]
        held = {"equal": all(layer.equal for layer in own), "tokens_compared": sum(layer.tokens for layer in own)}
        rows.append({**dataclasses.asdict(ours), **beside, **(held if own else {})})
    whole = {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
    told = {name: value for name, value in whole.items() if name not in ("rows", "machine", "versions")}
    device = report.machine["device"]
    experts = [{**dataclasses.asdict(layer), "equal": layer.equal} for layer in found]
    return {**environment(device, commit, "transformers"), **told, "rows": rows, "expert_layers": experts}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="the path of a model (default: the one that comes with mxref)")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--formats", help="of the weights, by commas (default: all)")
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, from its start")
    parser.add_argument("--window", type=int, default=128, help="tokens")
    parser.add_argument("--json", type=Path, help="write the record to this file")
    parser.add_argument("--commit", help="the commit to name in the record (default: ask git)")
    given = parser.parse_args()
    formats = given.formats.split(",") if given.formats else None
    options = {"model": given.model, "formats": formats, "tokens": given.tokens, "window": given.window}
    report, found = evaluated(given.backend, given.device, **options)
    for layer in found:
        verdict = "the reference's bits" if layer.equal else f"WRONG: {layer.wrong}"
        print(f"{layer.setting}, layer {layer.layer}, {layer.tokens} tokens, by {layer.by}: {verdict}")
    print(report)
    reference = evaluate(device="cpu", **options)
    print(reference)
    if given.json:
        given.json.write_text(json_text(record(report, reference, found, given.commit)), encoding="utf-8")
    return sum(not layer.equal or layer.by != given.backend for layer in found)


if __name__ == "__main__":
    sys.exit(main())
