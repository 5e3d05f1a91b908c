"""Cuts the small checkpoints of this directory out of whole ones: python make.py SOURCE [DESTINATION].

Kept: layer 0, two experts, the first `ROWS` rows of every matrix, its scales, and the same rows of the golden values; of the
config's sizes those that are still so.
A swizzled scale has no rows to cut: torchao's quantized weights are kept whole. `WHOLE` are kept as they are besides, in
whole.tar.xz, with their golden logits, ModelOpt's with the original q, k and v too, whose scales its export merges.
"""

import io
import json
import sys
import tarfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file

ROWS, EXPERTS = 8, 2
CONFIGS = ("config.json", "hf_quant_config.json")
PLAIN = "base-qwen3moe"
WHOLE = ("llmcompressor-nvfp4-qwen3moe", "modelopt-nvfp4-qwen3moe")
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight", "mlp.router.bias")
CUT = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")
MERGED = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
WITHOUT_GOLDEN = "quark-nvfp4ish-qwen3moe"  # its tool has no decompressor: the amax of the original weights instead


def kept(name: str) -> bool:
    """Whether a tensor is of layer 0 or of no layer, and of no expert but the first ones."""
    return ".layers.1." not in name and not any(f".experts.{index}." in name for index in range(EXPERTS, 8))


def cut(name: str, tensor: torch.Tensor, swizzled: bool, packed_axis: int) -> torch.Tensor:
    """The first experts of a stack, and the first rows."""
    if name.endswith(ROUTERS):
        return tensor[:EXPERTS].contiguous()
    if swizzled or tensor.ndim == 0 or (tensor.ndim == 1 and ".experts." not in name):
        return tensor
    if ".mlp.experts." in name and tensor.shape[0] == 8 and not name.endswith(("_proj.weight", "_proj.bias")):
        tensor = tensor[:EXPERTS]
        if tensor.ndim > 1:
            tensor = tensor.narrow(-1 if packed_axis == 1 and tensor.ndim > 2 else 1, 0, ROWS)
        return tensor.contiguous()
    return tensor[:ROWS].contiguous()


def make(source: Path, destination: Path, base: Path) -> None:
    destination.mkdir(parents=True, exist_ok=True)
    with safe_open(source / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    if metadata and "tensor_names" in metadata:
        names = [name for name in json.loads(metadata["tensor_names"]) if kept(name)]
        metadata = {name: text for name, text in metadata.items() if kept(name)} | {"tensor_names": json.dumps(names)}
    swizzled = source.name.startswith("torchao")
    packed_axis = 1 if source.name.startswith("modelopt") else -1

    def reduced(file: Path, axis: int, whole: bool) -> dict[str, torch.Tensor]:
        tensors = {name: tensor for name, tensor in load_file(file).items() if kept(name)}
        return {name: cut(name, t, whole or "._weight_" in name, axis) for name, t in tensors.items()}

    tensors = reduced(source / "model.safetensors", packed_axis, False)
    save_file(tensors, destination / "model.safetensors", metadata=metadata)
    golden = source / "golden_dequant.safetensors"
    if golden.exists():  # fused weights are [experts, in, out] there
        save_file(reduced(golden, 1, swizzled), destination / golden.name)
    elif source.name == WITHOUT_GOLDEN:
        originals = load_file(base / "model.safetensors")
        quantized = [name.removesuffix("_scale_2") for name in tensors if name.endswith("weight_scale_2")]
        save_file(
            {name: originals[name].float().abs().amax() for name in quantized}, destination / "golden_amax.safetensors"
        )
    for name in CONFIGS:
        if (source / name).exists():
            config = json.loads((source / name).read_text())
            counts = {"num_hidden_layers": 1, "num_experts": EXPERTS, "num_local_experts": EXPERTS, "vocab_size": ROWS}
            config |= {key: count for key, count in counts.items() if key in config}
            config = {key: value for key, value in config.items() if key not in CUT}
            (destination / name).write_text(json.dumps(config, indent=1) + "\n")


def without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def pack(root: Path, destination: Path) -> None:
    originals = load_file(root / PLAIN / "model.safetensors")
    merged = save({name: tensor for name, tensor in sorted(originals.items()) if name.endswith(MERGED)})
    with tarfile.open(destination, "w:xz", preset=9) as archive:
        for name in WHOLE:
            for file in sorted((root / name).iterdir()):
                if file.name in (*CONFIGS, "model.safetensors") or file.name.startswith("golden_logits"):
                    archive.add(file, f"{name}/{file.name}", filter=without_owner)
        entry = tarfile.TarInfo(f"{WHOLE[1]}/original.safetensors")
        entry.size = len(merged)
        archive.addfile(without_owner(entry), io.BytesIO(merged))


if __name__ == "__main__":
    root = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent
    for source in sorted(root.iterdir()):
        if (source / "model.safetensors").exists() and (not source.name.startswith("base-") or source.name == PLAIN):
            make(source, target / source.name, root / PLAIN)
    pack(root, target / "whole.tar.xz")
