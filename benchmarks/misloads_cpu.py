"""What mxref makes of checkpoints that transformers loads wrongly or not at all, beside it: python misloads_cpu.py ROOT.

ROOT holds whole checkpoints `TOOL-SCHEME-MODEL`, their originals `base-MODEL` and a tokenizer, `base-tokenizer`. The models
are tiny and of random weights: what counts is how near each comes to its original's predictions on the text that comes
with mxref. Writes results/misloads-cpu.json.
"""

import sys
from importlib import metadata
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from mxref.conformance.report import environment
from mxref.models import evaluate
from mxref.models.report import json_text

CHECKPOINTS = (
    "llmcompressor-nvfp4-qwen3moe",
    "llmcompressor-nvfp4a16-qwen3moe",
    "llmcompressor-nvfp4-mixtral",
    "llmcompressor-nvfp4-gptoss",
    "llmcompressor-mxfp4-qwen3moe",
    "llmcompressor-mxfp8-qwen3moe",
    "modelopt-nvfp4-qwen3moe",
)
TOKENS = 4096
SEED = 0  # of what transformers initializes anew


def by_transformers(path: Path) -> tuple[torch.nn.Module | None, str]:
    """The model as transformers loads it, and what it says while doing so."""
    torch.manual_seed(SEED)
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    except Exception as failure:  # what it raises is the finding
        return None, f"raises {type(failure).__name__}: {' '.join(str(failure).split())[:160]}"
    anew = len(loaded["missing_keys"])
    return model, f"{anew} weights initialized anew" if anew else "loads without complaint"


def measure(model: Path | torch.nn.Module, root: Path, base: Path) -> dict:
    """How far the model is from its original; of a model as an object the row before its weights are quantized again."""
    is_path = isinstance(model, Path)
    report = evaluate(
        model,
        root / "base-tokenizer",
        formats=None if is_path else ["mxfp8_e4m3"],
        activations=["same" if is_path else "none"],
        against=base,
        tokens=TOKENS,
    )
    original, row = report.rows[0], report.rows[1]
    return {
        "bits_per_byte": row.bits_per_byte,
        "original_bits_per_byte": original.bits_per_byte,
        "divergence": row.divergence,
        "agreement": row.agreement,
    }


def main(root: Path) -> None:
    rows = []
    for name in CHECKPOINTS:
        path, base = root / name, root / f"base-{name.split('-')[-1]}"
        model, says = by_transformers(path)
        theirs = {} if model is None else measure(model, root, base)
        rows.append({"checkpoint": name, "mxref": measure(path, root, base), "transformers": {"loading": says, **theirs}})
        print(json_text(rows[-1]), end="")
    record = {
        **environment("cpu", None),
        "about": "bits per byte of the text that comes with mxref, and against the original model: divergence, the mean of "
        "sum p log2(p / q), and agreement, the share of equal likeliest tokens",
        "tokens": TOKENS,
        "seed": SEED,
        "versions": {package: metadata.version(package) for package in ("torch", "transformers", "compressed-tensors")},
        "rows": rows,
    }
    (Path(__file__).parent / "results" / "misloads-cpu.json").write_text(json_text(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
