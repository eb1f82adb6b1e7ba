"""What holds for every test: no network, one thread per process. Helpers: `from fixtures.x import y`."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "srt"))

# Before anything imports torch or transformers, and inherited by the engines' processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models lose more to thread hand-offs than they gain
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported, which transformers does: without a GPU its kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
