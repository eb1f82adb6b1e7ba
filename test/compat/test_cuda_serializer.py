"""CUDA tensors by the package's serializer, between processes, as torch pickles them and after the patch."""

import subprocess
import sys

import pytest
import torch
from fixtures.compat import COMPAT_ENVIRONMENT, output_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SENDER = """
import sys
import torch
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
if sys.argv[1] == "patched":
    monkey_patch_torch_reductions()
held = {"on_gpu": torch.arange(8.0, device="cuda")[2:], "on_cpu": torch.arange(3.0)}
print(MultiprocessingSerializer.serialize(held, output_str=True), flush=True)
sys.stdin.read()
"""
RECEIVER = """
import sys
import torch
from sglang.srt.utils import MultiprocessingSerializer
decoded = MultiprocessingSerializer.deserialize(sys.argv[1])
print(decoded["on_gpu"].tolist(), decoded["on_gpu"].device.type, decoded["on_cpu"].tolist())
"""


@pytest.mark.parametrize("kind", ["plain", "patched"])
def test_another_process_reads_them(kind: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=COMPAT_ENVIRONMENT,
    ) as sender:
        assert sender.stdout is not None
        payload = sender.stdout.readline().strip()
        # Ends the sender on the way out, which waits for it.
        assert sender.stdin is not None
        shown = output_of(RECEIVER, payload)
        sender.stdin.close()
    assert shown == "[2.0, 3.0, 4.0, 5.0, 6.0, 7.0] cuda [0.0, 1.0, 2.0]\n"
