"""Tokens per second on a CPU against transformers' `generate`: one request, and 32 of mixed lengths.

A Qwen3 of about 100 million random float32 weights; greedy; both with the default number of threads, one
after the other in the same run, on prompts that neither has seen. transformers gets the prompts as one
left-padded batch and goes on until the longest output is done; a token counts only if its request wanted it
(`transformers_surplus_tokens_per_s` counts the others too). Goals: a ratio of 1 at one request, of 2 at 32.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write_result
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from ebbtide import Engine

VOCAB_SIZE, PAD_ID = 32_000, 0
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": PAD_ID,
    "pad_token_id": PAD_ID,
}


@dataclass(frozen=True)
class Workload:
    """Requests with prompts and outputs of uniformly drawn lengths, bounds included."""

    name: str
    num_requests: int
    prompt_lens: tuple[int, int]
    output_lens: tuple[int, int]
    goal: float

    def draw(self, seed: int) -> tuple[list[list[int]], list[int]]:
        """Prompts and output lengths."""
        rng = np.random.default_rng(seed)
        lens = rng.integers(*self.prompt_lens, self.num_requests, endpoint=True)
        prompts = [rng.integers(PAD_ID + 1, VOCAB_SIZE, length).tolist() for length in lens]
        return prompts, rng.integers(*self.output_lens, self.num_requests, endpoint=True).tolist()


WORKLOADS = (
    Workload("1 request", 1, (128, 128), (128, 128), goal=1.0),
    Workload("32 requests of mixed lengths", 32, (16, 256), (16, 128), goal=2.0),
)


def generate_here(engine: Engine, prompts: list[list[int]], num_tokens: list[int]) -> list[list[int]]:
    params = [{"temperature": 0.0, "max_new_tokens": count, "ignore_eos": True} for count in num_tokens]
    outputs = engine.generate(input_ids=prompts, sampling_params=params)
    return [output["output_ids"] for output in outputs]


def generate_there(
    model: PreTrainedModel, prompts: list[list[int]], num_tokens: list[int]
) -> list[list[int]]:
    width = max(map(len, prompts))
    input_ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    outputs = model.generate(
        input_ids=input_ids,
        attention_mask=mask,
        max_new_tokens=max(num_tokens),
        do_sample=False,
        eos_token_id=None,
    )
    return [output[width : width + count].tolist() for output, count in zip(outputs, num_tokens, strict=True)]


def measure(engine: Engine, model: PreTrainedModel, workload: Workload, seed: int) -> dict[str, float]:
    """One run of both on the same requests."""
    prompts, num_tokens = workload.draw(seed)
    started = time.perf_counter()
    ours = generate_here(engine, prompts, num_tokens)
    switched = time.perf_counter()
    theirs = generate_there(model, prompts, num_tokens)
    ended = time.perf_counter()
    assert [len(output) for output in ours] == [len(output) for output in theirs] == num_tokens
    total, padded = sum(num_tokens), max(num_tokens) * len(num_tokens)
    return {
        "num_tokens": total,
        "ebbtide_s": switched - started,
        "transformers_s": ended - switched,
        "ebbtide_tokens_per_s": total / (switched - started),
        "transformers_tokens_per_s": total / (ended - switched),
        "transformers_surplus_tokens_per_s": padded / (ended - switched),
        "ratio": (ended - switched) / (switched - started),
        # Near-ties of random weights fall either way in float32, and padding changes the rounding.
        "share_of_equal_outputs": float(np.mean([a == b for a, b in zip(ours, theirs, strict=True)])),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(argv)
    results: dict[str, Any] = {"model": SHAPE, "dtype": "float32", "threads": torch.get_num_threads()}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE)).eval()
        model.save_pretrained(Path(folder))
        results["num_parameters"] = sum(parameter.numel() for parameter in model.parameters())
        with Engine(model_path=folder, skip_tokenizer_init=True, max_total_tokens=1 << 15) as engine:
            for workload in WORKLOADS:
                measure(engine, model, workload, seed=0)
                runs = [measure(engine, model, workload, seed=1 + run) for run in range(args.runs)]
                medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                results[workload.name] = {"goal_ratio": workload.goal, "median": medians, "runs": runs}
                print(
                    f"{workload.name}: {medians['ebbtide_tokens_per_s']:.1f} tokens/s, transformers "
                    f"{medians['transformers_tokens_per_s']:.1f}, ratio {medians['ratio']:.2f} "
                    f"(goal {workload.goal:g})",
                    flush=True,
                )
    print(f"written to {write_result('cpu_generate', results)}")


if __name__ == "__main__":
    main()
