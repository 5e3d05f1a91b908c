"""What benchmarks put around vLLM's kernels: the folder to import them from, the alignment, the activation and the sum."""

import zipfile

import pytest
import torch
from kernel_scripts import DEVICES, says_the_same

from benchmarks import vllm_site

AROUND = """
import torch
import torch.nn.functional as F
from benchmarks.vllm_peers import activated, cosine, summed

hidden = torch.randn(3, 2, 2 * 96, device="{device}").half()
rows = hidden.float().flatten(0, 1)
silu = F.silu(rows[:, :96]) * rows[:, 96:]
gate, up = rows[:, ::2].clamp(max=7), rows[:, 1::2].clamp(-7, 7)
for interleaved, wanted in ((False, silu), (True, gate * torch.sigmoid(1.702 * gate) * (up + 1))):
    found = activated(hidden, interleaved)
    assert found.shape == wanted.shape and found.dtype == hidden.dtype
    assert (found - wanted).abs().max() < 1e-2 * wanted.abs().max(), interleaved
assert (summed(hidden) - hidden.float().sum(1)).abs().max() < 1e-2
assert cosine(hidden, hidden) > 0.999999 and cosine(hidden, hidden / 0) == 0.0
print("the same")
"""


@pytest.fixture
def wheel(tmp_path):
    path = tmp_path / "vllm-1.2.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*vllm_site.KEPT, "vllm-1.2.3.dist-info/METADATA", "vllm/_C.abi3.so"):
            archive.writestr(name, "")
    return path


@pytest.mark.parametrize("device", DEVICES)
def test_the_activation_and_the_sum_are_what_they_stand_for(device):
    says_the_same(AROUND, device)


def test_a_folder_has_what_the_kernels_import_and_nothing_compiled(wheel, tmp_path):
    vllm_site.make(wheel, tmp_path / "site")
    found = {str(path.relative_to(tmp_path / "site")) for path in (tmp_path / "site").rglob("*") if path.is_file()}
    assert found == {*vllm_site.KEPT, *vllm_site.STOOD_IN, "vllm-1.2.3.dist-info/METADATA"}
    for name, text in vllm_site.STOOD_IN.items():
        compile(text, name, "exec")


def test_a_wheel_without_a_kernel_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        archive.writestr(vllm_site.KEPT[0], "")
    with pytest.raises(ValueError, match="vllm.whl has no .*nvfp4_emulation_moe.py"):
        vllm_site.make(tmp_path / "vllm.whl", tmp_path / "site")


@pytest.mark.parametrize(("tokens", "top_k", "experts", "size"), [(1, 2, 8, 16), (7, 3, 5, 4), (40, 2, 4, 16)])
def test_aligned_slots_are_each_expert_s_in_whole_blocks(tokens, top_k, experts, size):
    names = {}
    exec(vllm_site.CUSTOM_OPS, names)
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(0)).topk(top_k).indices.int()
    slots = ids.numel()
    aligned = torch.full((slots + experts * (size - 1),), -1, dtype=torch.int32)
    owners = torch.full((-(-len(aligned) // size),), -1, dtype=torch.int32)
    count = torch.full((1,), -1, dtype=torch.int32)
    names["moe_align_block_size"](ids, experts, size, aligned, owners, count)
    blocks = aligned[: count.item()].view(-1, size)
    assert blocks.numel() == sum(-(-of // size) * size for of in ids.flatten().bincount().tolist())
    for block, owner in zip(blocks, owners, strict=False):
        real = block[block < slots].long()
        assert len(real) and (ids.flatten()[real] == owner).all() and (block[block >= slots] == slots).all()
    assert sorted(blocks[blocks < slots].tolist()) == list(range(slots)) and (aligned[count.item() :] == slots).all()
