"""Two engines on one GPU that has room for one: they take turns, and neither disturbs the other."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.gpu_device import used_bytes_of

from ebbtide import Engine
from ebbtide.srt.entrypoints.engine import Engine as EngineClass
from ebbtide.srt.errors import RequestRejected

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

# Of the device's free memory, for the KV pool of each: two of them do not fit.
POOL_SHARE = 0.6
NUM_LAYERS, NUM_HEADS, HEAD_DIM = 8, 4, 128
BYTES_PER_TOKEN = NUM_LAYERS * 2 * NUM_HEADS * HEAD_DIM * torch.bfloat16.itemsize
SHAPE: dict[str, Any] = {
    "num_hidden_layers": NUM_LAYERS,
    "num_key_value_heads": NUM_HEADS,
    "head_dim": HEAD_DIM,
    "dtype": "bfloat16",
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40))]


def outputs(engine: EngineClass) -> list[list[int]]:
    return [output["output_ids"] for output in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]


def test_one_serves_from_the_memory_that_the_other_gave_back(tmp_path: Path) -> None:
    first, second = (
        make_checkpoint(tmp_path / name, "Qwen3ForCausalLM", seed=seed, **SHAPE)
        for seed, name in enumerate("ab")
    )
    free_bytes, _ = torch.cuda.mem_get_info()
    pool_bytes = int(POOL_SHARE * free_bytes)
    arguments: dict[str, Any] = {
        "device": "cuda",
        "max_total_tokens": pool_bytes // BYTES_PER_TOKEN,
        "enable_weights_cpu_backup": True,
        "skip_tokenizer_init": True,
        "log_level": "warning",
    }
    with Engine(model_path=str(first), **arguments) as one:
        of_one = outputs(one)
        awake_bytes = used_bytes_of(0)
        one.release_memory_occupation()
        assert awake_bytes - used_bytes_of(0) >= 0.99 * pool_bytes
        with Engine(model_path=str(second), **arguments) as other:
            of_other = outputs(other)
            assert of_one != of_other
            turns = [(one, other, of_other), (other, one, of_one)]
            for asleep, awake, expected in turns * 2:
                asleep.release_memory_occupation()
                awake.resume_memory_occupation()
                assert outputs(awake) == expected
                with pytest.raises(RequestRejected, match="Nothing was resumed") as refused:
                    asleep.resume_memory_occupation()
                assert refused.value.status == 409
                assert outputs(awake) == expected
        # The end of one is not the end of the other.
        assert outputs(one) == of_one
