"""A folder from which vLLM's Triton kernels for experts can be imported where vLLM itself cannot.

    pip download --no-deps vllm==0.34.0
    python -m benchmarks.vllm_site vllm-0.34.0-*.whl FOLDER [--torchao torchao-*.whl]
    PYTHONPATH=FOLDER python -m benchmarks.moe_gpu

vLLM's wheel wants one exact torch and dozens of packages. `KEPT` are its own files, taken from the wheel as they are: the
kernels, what launches them, their tuned sizes. `STOOD_IN` are written here in place of what those import: the platform is
asked of torch, the experts' alignment is a few torch ops (never timed), and what is only named in a signature is an empty
class. No stand-in runs within a timed call but `resolve_moe_use_td`, which answers as vLLM does on this GPU.
torchao is taken whole, without its compiled extensions.
"""

import argparse
import sys
import zipfile
from pathlib import Path

MOE = "vllm/model_executor/layers/fused_moe"
QUANTIZATION = "vllm/model_executor/layers/quantization"
KEPT = (
    f"{MOE}/fused_moe.py",
    f"{MOE}/activation.py",
    f"{MOE}/moe_align_block_size.py",
    f"{MOE}/experts/nvfp4_emulation_moe.py",
    f"{QUANTIZATION}/utils/nvfp4_emulation_utils.py",
    "vllm/envs.py",
    "vllm/scalar_type.py",
    "vllm/triton_utils/allocation.py",
    "vllm/utils/math_utils.py",
)
EMPTY = '"""Stand-in."""\n'
NAMES = '''"""Stand-in: any name is an empty class, for signatures."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})
'''
LOGGER = '''"""Stand-in: a logger that says nothing once."""

import logging


class Logger(logging.LoggerAdapter):
    def _silent(self, *args, **kwargs):
        pass

    debug_once = info_once = warning_once = error_once = _silent


def init_logger(name):
    return Logger(logging.getLogger(name), {})
'''
PLATFORMS = '''"""Stand-in: the platform, asked of torch."""

import torch


class Platform:
    dispatch_key = "CUDA"

    def is_cuda(self):
        return torch.cuda.is_available()

    is_cuda_alike = is_cuda

    def is_rocm(self):
        return False

    is_xpu = is_cpu = is_tpu = is_out_of_tree = is_rocm

    def get_device_name(self, device_id=0):
        return torch.cuda.get_device_name(device_id) if torch.cuda.is_available() else "cpu"

    def _capability(self):
        major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
        return 10 * major + minor

    def is_device_capability(self, capability, device_id=0):
        return self._capability() == capability

    def has_device_capability(self, capability, device_id=0):
        return self._capability() >= capability

    def is_device_capability_family(self, capability, device_id=0):
        return self._capability() // 10 == capability // 10

    def fp8_dtype(self):
        return torch.float8_e4m3fn


current_platform = Platform()
'''
TRITON = '''"""Stand-in: Triton as it is installed."""

import triton
import triton.language as tl

HAS_TRITON = True
'''
PLATFORM_UTILS = '''"""Stand-in: the device's name as files have it."""

from vllm.platforms import current_platform


def get_device_name_as_file_name(device_id=0):
    return "_".join(current_platform.get_device_name(device_id).replace("/", " ").split())
'''
TORCH_UTILS = '''"""Stand-in: no op is registered."""


def direct_register_custom_op(*args, **kwargs):
    pass
'''
CUSTOM_OPS = '''"""Stand-in for the one compiled op whose result the kernels need."""

import torch


def moe_align_block_size(
    topk_ids, num_experts, block_size, sorted_ids, expert_ids, num_tokens_post_pad, expert_map=None, scatter_idx=None
):
    """Slots by expert, each expert's padded to whole blocks with a slot that there is not."""
    if expert_map is not None or scatter_idx is not None:
        raise NotImplementedError("expert_map and scatter_idx are not stood in")
    slots = topk_ids.flatten().long()
    order = slots.argsort(stable=True)
    counts = slots.bincount(minlength=num_experts)
    blocks = (counts + block_size - 1) // block_size
    shift = (blocks.cumsum(0) - blocks) * block_size - (counts.cumsum(0) - counts)
    sorted_ids.fill_(len(slots))
    sorted_ids[torch.arange(len(slots), device=slots.device) + shift[slots[order]]] = order.to(sorted_ids.dtype)
    owners = torch.arange(num_experts, device=slots.device).repeat_interleave(blocks)
    expert_ids.zero_()
    expert_ids[: len(owners)] = owners.to(expert_ids.dtype)
    num_tokens_post_pad.fill_(len(owners) * block_size)
'''
MOE_UTILS = (
    NAMES
    + '''

def resolve_moe_use_td():
    """Tensor descriptors are chosen on another vendor's GPUs alone, where nobody asks for them."""
    return False


def warn_if_moe_use_td_ineffective(*args, **kwargs):
    pass
'''
)
MOE_INIT = '''"""Stand-in: no configuration is forced."""


def get_config():
    return None
'''
STOOD_IN = {
    "vllm/__init__.py": EMPTY,
    "vllm/_custom_ops.py": CUSTOM_OPS,
    "vllm/logger.py": LOGGER,
    "vllm/platforms/__init__.py": PLATFORMS,
    "vllm/triton_utils/__init__.py": TRITON,
    "vllm/utils/__init__.py": EMPTY,
    "vllm/utils/platform_utils.py": PLATFORM_UTILS,
    "vllm/utils/torch_utils.py": TORCH_UTILS,
    "vllm/model_executor/__init__.py": EMPTY,
    "vllm/model_executor/layers/__init__.py": EMPTY,
    f"{MOE}/__init__.py": MOE_INIT,
    f"{MOE}/config.py": NAMES,
    f"{MOE}/modular_kernel.py": NAMES,
    f"{MOE}/utils.py": MOE_UTILS,
    f"{MOE}/experts/__init__.py": EMPTY,
    f"{MOE}/experts/triton_moe.py": NAMES,
    f"{QUANTIZATION}/__init__.py": EMPTY,
    f"{QUANTIZATION}/utils/__init__.py": EMPTY,
    f"{QUANTIZATION}/utils/quant_utils.py": NAMES,
}


def take(wheel: Path, folder: Path, wanted) -> list[str]:
    """Files of a wheel, with its METADATA, from which its version is read."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if wanted(name) or name.endswith(".dist-info/METADATA")]
        for name in names:
            archive.extract(name, folder)
    return names


def make(wheel: Path, folder: Path) -> None:
    """vLLM's files and the stand-ins; ValueError where the wheel lacks one."""
    taken = take(wheel, folder, lambda name: name in KEPT or name.startswith(f"{MOE}/configs/") and "=NVIDIA_" in name)
    if missing := set(KEPT) - set(taken):
        raise ValueError(f"{wheel.name} has no {', '.join(sorted(missing))}")
    for name, text in STOOD_IN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, help="vLLM's wheel")
    parser.add_argument("folder", type=Path, help="where to write")
    parser.add_argument("--torchao", type=Path, help="torchao's wheel, to take too")
    arguments = parser.parse_args()
    make(arguments.wheel, arguments.folder)
    if arguments.torchao:
        take(arguments.torchao, arguments.folder, lambda name: name.startswith("torchao/") and name.endswith(".py"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
