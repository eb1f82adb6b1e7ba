"""An RL loop in one process: the trainer's weights go to the engine after each step, as one update.

    python examples/weight_sender.py [--steps 5] [--model-path FOLDER]

Without `--model-path` a tiny Qwen3 of random weights is made. The reward is the share of token ids below
`SMALL`: REINFORCE in plain torch makes those likelier.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

from ebbtide import Engine
from ebbtide.srt.weight_sync.weight_sender import WeightSender

NUM_ROLLOUTS = 32
NUM_TOKENS = 16
PROMPT = [1, 2, 3, 4]
SMALL = 64


def roll_out(engine: Engine, step: int) -> list[dict[str, Any]]:
    """Sampled outputs of the weights that serve."""
    seeds = range(step * NUM_ROLLOUTS, (step + 1) * NUM_ROLLOUTS)
    params = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    outputs: list[dict[str, Any]] = engine.generate(
        input_ids=[PROMPT] * NUM_ROLLOUTS,
        sampling_params=[{**params, "sampling_seed": seed} for seed in seeds],
    )
    return outputs


def learn(model: Any, optimizer: torch.optim.Optimizer, outputs: list[dict[str, Any]]) -> float:
    """One gradient step; returns the mean reward of the outputs."""
    outputs_RT = torch.tensor([output["output_ids"] for output in outputs])
    reward_RT = (outputs_RT < SMALL).float()
    ids_RT = torch.cat([torch.tensor([PROMPT] * len(outputs)), outputs_RT], dim=1)
    logits_RTV = model(input_ids=ids_RT).logits[:, len(PROMPT) - 1 : -1]
    logprob_RT = logits_RTV.log_softmax(-1).gather(-1, outputs_RT[..., None])[..., 0]
    loss = -((reward_RT - reward_RT.mean()) * logprob_RT).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(reward_RT.mean())


def make_tiny_model(path: Path) -> Path:
    """A checkpoint of random weights, small enough to train in a moment."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def run(model_path: Path, num_steps: int) -> None:
    """The loop: the weights that the engine starts with are version 0."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    arguments: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 4096, "weight_version": "0"}
    with Engine(model_path=str(model_path), **arguments) as engine:
        sender = WeightSender(engine, bucket_bytes=64 << 20)
        for step in range(num_steps):
            outputs = roll_out(engine, step)
            versions = {output["meta_info"]["weight_version"] for output in outputs}
            reward = learn(model, optimizer, outputs)
            sent = sender.send(model.named_parameters(), version=step + 1)
            print(f"step {step}: mean reward {reward:.3f} of rollouts by weights {versions}")
            print(f"  sent {sent.num_tensors} tensors, {sent.num_bytes} bytes, as version {sent.version}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with TemporaryDirectory() as folder:
        run(args.model_path or make_tiny_model(Path(folder) / "model"), args.steps)


if __name__ == "__main__":
    main()
