"""Arenas by the library torch_memory_saver, each way it can hook in, in a process of its own."""

import os
import subprocess
import sys

import pytest

from ebbtide.srt.memory_saver.saver import preload_environment

pytestmark = pytest.mark.gpu

PROCESS = """
from contextlib import closing
import torch
from ebbtide.srt.device import open_device
from ebbtide.srt.memory_saver.saver import open_memory_saver
from ebbtide.srt.errors import OutOfDeviceMemory
from ebbtide.srt.memory_saver.graph_pool import GraphPool
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.saver import hook_mode
from ebbtide.srt.slices import finish

GIB = 1 << 30
device = open_device("cuda")
saver = open_memory_saver("torch_memory_saver", device)
print(hook_mode())

before = device.free_bytes()
weights = saver.arena(MemoryTag.WEIGHTS, GIB + 5)
cache = saver.arena(MemoryTag.KV_CACHE, 2 * GIB)
graphs = saver.arena(MemoryTag.CUDA_GRAPH, 256 << 20)
print("built", before - device.free_bytes() < 64 << 20)

view = weights.view(0, (GIB,), torch.uint8)
pointer = view.data_ptr()
resident = [arena.resume() for arena in (weights, cache, graphs)]
print("resident", abs(before - device.free_bytes() - sum(resident)) < 64 << 20)
view.fill_(3)

free = device.free_bytes()
freed = cache.release()
print("cache alone", freed, device.free_bytes() - free == freed, view.unique().tolist())
print("again", cache.release(), cache.resume(), cache.resume())

with closing(finish(weights.stage())) as shadow:
    shadow.view(0, (GIB,), torch.uint8).fill_(4)
    weights.swap(shadow)
    print("swapped", view.unique().tolist(), shadow.view(0, (GIB,), torch.uint8).unique().tolist())
print("pointer", view.data_ptr() == pointer)

x = torch.randn(512, 512, device="cuda")
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    (x @ x).relu()
torch.cuda.synchronize()
pool = GraphPool(graphs)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool.id, stream=stream):
    result = (x @ x).relu()
for _ in range(3):
    graphs.release()
    graphs.resume()
    x.normal_()
    graph.replay()
    assert torch.equal(result, (x @ x).relu())
print("replayed")

cache.release()
filler = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(device.free_bytes() // GIB - 1)]
for _ in range(2):
    try:
        cache.resume()
    except OutOfDeviceMemory as error:
        print("refused", error.needed_bytes)
del filler
print("retried", cache.resume())  # what torch keeps of the filler makes room

device.trim()
held = device.free_bytes()
for _ in range(50):
    weights.release()
    weights.resume()
print("cycles", held == device.free_bytes())
weights.release()
del result
graph.reset()
pool.close()
del view
for arena in (weights, cache, graphs):
    arena.close()
print("closed", before - device.free_bytes() < 512 << 20)  # the rest is cuBLAS
"""


@pytest.mark.parametrize("mode", ["preload", "torch"])
def test_arenas_in_each_hook_mode(cuda_device, mode):
    pytest.importorskip("torch_memory_saver")
    cuda_device.trim()
    environment = os.environ | (preload_environment() if mode == "preload" else {})
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environment, capture_output=True, text=True, check=False
    )
    gib = 1 << 30
    assert done.stdout.splitlines() == [
        mode,
        "built True",
        "resident True",
        f"cache alone {2 * gib} True [3]",
        f"again 0 {2 * gib} 0",
        "swapped [4] [3]",
        "pointer True",
        "replayed",
        f"refused {2 * gib}",
        f"refused {2 * gib}",
        f"retried {2 * gib}",
        "cycles True",
        "closed True",
    ], done.stderr
    assert done.returncode == 0, done.stderr
