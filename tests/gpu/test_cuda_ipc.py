"""KV between two processes of one GPU by CUDA IPC, with the driver itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checks.gpu_stages.handoff import measure
from outrider.engine.kv_cache.tensor_planes import CopyStream, DeviceBytes
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.cuda_ipc import DeviceArenaReader, open_shared_gpu

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SENDER = """
import sys
import numpy as np
import torch
from outrider.engine.kv_cache.tensor_planes import CopyStream, DeviceRows
from outrider.kv_transfer.config import KvTransferConfig
from outrider.kv_transfer.cuda_ipc import DeviceArena, open_shared_gpu

config = KvTransferConfig(arena_directory=sys.argv[1], device_arena_bytes=32 << 20)
copies = CopyStream(torch.device("cuda"))
arena = DeviceArena(open_shared_gpu(copies, config), config)
payload = torch.arange(1 << 19, dtype=torch.int64, device="cuda").view(1, 1, -1)
torch.cuda.synchronize()
offset = arena.take("owner")
arena.write(offset, DeviceRows(payload, np.zeros(1, dtype=np.int64), copies))
copies.wait()
print(arena.arena_id.hex(), arena.num_bytes, offset, flush=True)
sys.stdin.read()
"""


def test_the_kv_of_a_prompt_arrives_whole_by_cuda_ipc():
    (result,) = measure("cuda", "cuda", connectors=("cuda_ipc",), at_once=(2,), num_rounds=2, num_tokens=512)
    assert (result.get("used"), result.get("same")) == ("cuda_ipc", True), result


def test_the_checksum_is_the_cpus():
    payload = torch.randint(0, 256, ((4 << 20) + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    words = torch.nn.functional.pad(payload, (0, 5)).view(torch.int64)
    expected = int((words * torch.arange(1, 2 * len(words), 2)).sum()) % 2**64
    on_gpu = payload.cuda()
    torch.cuda.synchronize()
    assert DeviceBytes(on_gpu, CopyStream(torch.device("cuda"))).checksum() == expected


@pytest.mark.parametrize("is_killed", [False, True])
def test_memory_that_is_mapped_outlives_its_owner(tmp_path, is_killed):
    """A prefill node that is killed during a push must not break the decode node's CUDA context."""
    copies = CopyStream(torch.device("cuda"))
    gpu = open_shared_gpu(copies, KvTransferConfig())
    assert gpu is not None
    command = [sys.executable, "-c", SENDER, str(tmp_path)]
    sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        arena_id, num_bytes, offset = sender.stdout.readline().split()
        mapping = DeviceArenaReader(gpu, str(tmp_path)).attach(bytes.fromhex(arena_id), int(num_bytes))
        assert mapping is not None
        if is_killed:
            sender.kill()
            sender.wait(30)
        taken = mapping.copy(int(offset), 4 << 20)
        copies.wait()
        expected = torch.arange(1 << 20, dtype=torch.int64).view(torch.uint8)[: 4 << 20]
        assert torch.equal(taken.tensor.cpu(), expected)
    finally:
        sender.kill()
        sender.wait(30)
        sender.stdin.close()
        sender.stdout.close()
