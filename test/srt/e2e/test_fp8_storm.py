"""What is served in FP8 is the same to the bit after anything that leaves the weights as they were.

The same batch takes the same kernels, on a GPU as well: its tokens and logprobs come again exactly. In
batches of other sizes they need not. `EBBTIDE_STORM_S` is how long it lasts at least.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import make_checkpoint
from fixtures.eight_bits import MOE_SHAPE, SHAPE, in_eight_bits
from fixtures.gpu_device import DEVICE
from safetensors.torch import load_file
from torch import Tensor

from ebbtide import Engine
from ebbtide.srt.entrypoints.engine import Engine as EngineClass
from ebbtide.srt.errors import RequestRejected

STORM_S = float(os.environ.get("EBBTIDE_STORM_S", "0"))
KV_TOKENS = 8192
PROMPTS = [[(7 * index + place) % 250 for place in range(4 + 5 * index)] for index in range(12)]


class Storm:
    """An engine, and what befalls it while it streams."""

    def __init__(
        self, engine: EngineClass, weights: dict[str, Tensor], others: dict[str, Tensor], quantization: str
    ) -> None:
        self.engine = engine
        self.weights = list(weights.items())
        self.others = list(others.items())
        self.pairs = list(in_eight_bits(weights, quantization).items())

    async def answers(self) -> list[Any]:
        """Tokens and logprobs of prompts that begin together."""
        engine, params = self.engine, {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
        await engine.async_flush_cache(timeout_s=10)
        await engine.async_pause_generation(mode="in_place")
        batch = asyncio.ensure_future(
            engine.async_generate(input_ids=PROMPTS, sampling_params=params, return_logprob=True)
        )
        while sum(load["num_waiting_reqs"] for load in (await engine.async_loads())["loads"]) < len(PROMPTS):
            await asyncio.sleep(0.001)
        await engine.async_continue_generation()
        outputs = await batch
        return [(out["output_ids"], out["meta_info"]["output_token_logprobs"]) for out in outputs]

    async def stream(self) -> None:
        """What nobody looks at."""
        params = {"temperature": 1.0, "max_new_tokens": 60, "ignore_eos": True}
        await self.engine.async_generate(input_ids=PROMPTS[3:9], sampling_params=params)

    async def update(self, named: list[tuple[str, Tensor]], **terms: Any) -> None:
        reply = await self.engine.async_update_weights_from_tensor(named, **terms)
        assert reply["success"], reply

    async def sleep(self) -> None:
        await self.engine.async_release_memory_occupation()
        await self.engine.async_resume_memory_occupation()

    async def release_kv(self) -> None:
        await self.engine.async_release_memory_occupation(tags=["kv_cache"])
        await self.engine.async_resume_memory_occupation(tags=["kv_cache"])

    async def retract(self) -> None:
        await self.engine.async_pause_generation(mode="retract")
        await self.engine.async_continue_generation()

    async def same_weights(self) -> None:
        await self.update(self.weights, pause_mode="in_place", flush_cache=False)

    async def others_and_back(self) -> None:
        await self.update(self.others, pause_mode="retract")
        await self.update(self.weights, pause_mode="retract")

    async def pairs_of_8_bits(self) -> None:
        await self.update(self.pairs, pause_mode="in_place", flush_cache=False)

    async def given_up(self) -> None:
        await self.engine.async_begin_weight_update()
        await self.update(self.others[: len(self.others) // 2])
        await self.engine.async_abort_weight_update()

    async def refused(self) -> None:
        with pytest.raises(RequestRejected):
            await self.update([*self.others[:3], ("model.norm.weight", self.weights[0][1])])

    async def resize(self) -> None:
        for num_tokens in (KV_TOKENS // 2, KV_TOKENS):
            await self.engine.async_resize_memory_occupation(num_tokens=num_tokens)

    async def flush(self) -> None:
        await self.engine.async_flush_cache(timeout_s=10)


OPERATIONS = (
    Storm.sleep, Storm.release_kv, Storm.retract, Storm.same_weights, Storm.others_and_back,
    Storm.pairs_of_8_bits, Storm.given_up, Storm.refused, Storm.resize, Storm.flush,
)  # fmt: skip
PRECISIONS = {
    "kv": {"kv_cache_dtype": "fp8_e4m3"},
    "weights": {"quantization": "fp8"},
    "both": {"kv_cache_dtype": "fp8_e4m3", "quantization": "fp8"},
    "rows": {"kv_cache_dtype": "fp8_e4m3", "quantization": "w8a8_fp8"},
}
# On a CPU experts, too; with scales of rows they have not run on a GPU yet.
ARCHITECTURE, SIZES = (
    ("Qwen3ForCausalLM", {**SHAPE, "head_dim": 128}) if DEVICE.is_cuda else ("Qwen3MoeForCausalLM", MOE_SHAPE)
)


@pytest.mark.skipif(
    not (DEVICE.is_cuda or STORM_S),
    reason="in the gate contract sequences have FP8; EBBTIDE_STORM_S asks for it",
)
@pytest.mark.parametrize("precision", PRECISIONS if DEVICE.is_cuda else ["both", "rows"])
def test_answers_are_the_same_to_the_bit_before_and_after(tmp_path: Path, precision: str) -> None:
    folders = [
        make_checkpoint(tmp_path / name, ARCHITECTURE, seed=seed, **(DEVICE.checkpoint | SIZES))
        for seed, name in enumerate("ab")
    ]
    weights, others = (load_file(folder / "model.safetensors") for folder in folders)

    async def run() -> int:
        rng, num_rounds = random.Random(precision), 0
        arguments = {**DEVICE.server_args, **PRECISIONS[precision], "max_total_tokens": KV_TOKENS}
        async with Engine(
            model_path=str(folders[0]), skip_tokenizer_init=True, enable_weights_cpu_backup=True,
            log_level="warning", **arguments,
        ) as engine:  # fmt: skip
            storm = Storm(engine, weights, others, PRECISIONS[precision].get("quantization", "fp8"))
            expected = await storm.answers()
            deadline_s = time.monotonic() + STORM_S
            operations = [one for one in OPERATIONS if one != Storm.pairs_of_8_bits or precision != "kv"]
            left = list(operations)
            while left or time.monotonic() < deadline_s:
                operation = left.pop() if left else rng.choice(operations)
                stream = asyncio.ensure_future(storm.stream())
                await asyncio.sleep(rng.uniform(0, 0.05))
                await operation(storm)
                await stream
                assert await storm.answers() == expected, f"round {num_rounds}: {operation.__name__}"
                num_rounds += 1
        return num_rounds

    print(precision, asyncio.run(run()), "rounds")
