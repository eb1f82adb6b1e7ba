"""Bytes of KV that a request holds for each of its tokens, in a model with sliding windows.

Layers, heads, windows and pages are Gemma-3-1B's in bfloat16, the rest of the model is tiny: a real engine
serves it on the CPU. What is counted is the memory of the pages that the pool has handed out as the request
decodes, with the prefix cache off. `before` is the same with layers that give up nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import write_result

sys.path.append(str(Path(__file__).parents[1] / "test" / "srt"))
LENGTHS = (512, 1024, 2048, 4096)
GEMMA3_1B: dict[str, Any] = {
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "layer_types": ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)],
    "max_position_embeddings": 8192,
}


def bytes_per_token(path: Path, *, gives_up: bool) -> dict[int, float]:
    """What a request of each length holds, divided by its tokens."""
    from fixtures.real_rank import RealRank

    from ebbtide.srt.managers.wire.generation import TokenizedGenerateReqInput
    from ebbtide.srt.sampling_params import SamplingParams

    config = {} if gives_up else {"json_model_override_args": '{"sliding_window": 8192}'}
    rank = RealRank(path, max_total_tokens=2 * LENGTHS[-1], disable_radix_cache=True, page_size=16, **config)
    allocator, page_bytes = rank.scheduler.policy.allocator, rank.runner.kv_pool.layout.page_bytes
    found = {}
    for length in LENGTHS:
        prompt = TokenizedGenerateReqInput(
            rid=str(length),
            input_ids=[index % 200 for index in range(length - 40)],
            sampling_params=SamplingParams(temperature=0.0, ignore_eos=True),
            max_new_tokens=40,
            seed=0,
            stream=False,
        )
        rank._incoming.append(prompt)
        num_tokens, num_bytes = 0, 0
        while rank.scheduler.is_runnable or rank._incoming:
            req = rank.scheduler.policy.find(prompt.rid)
            if req is not None and req.kv is not None and req.kv.num_computed >= length - 40:
                num_tokens, num_bytes = req.kv.num_computed, len(allocator.held) * page_bytes
            rank.scheduler.turn()
        found[length] = num_bytes / num_tokens
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.parse_args()
    from fixtures.checkpoints import make_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        path = make_checkpoint(Path(folder), "Gemma3ForCausalLM", dtype="bfloat16", **GEMMA3_1B)
        before, after = (bytes_per_token(path, gives_up=gives_up) for gives_up in (False, True))
    rows = [
        {"tokens": length, "before": round(before[length]), "after": round(after[length])}
        for length in LENGTHS
    ]
    write_result("window_pages", {"model": "Gemma-3-1B's layers", "rows": rows})


if __name__ == "__main__":
    main()
