"""What the examples share: a tiny model, and a trainer of it in plain torch.

The reward is the share of token ids below `SMALL`: REINFORCE makes those likelier.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

NUM_ROLLOUTS = 32
NUM_TOKENS = 16
PROMPT = [1, 2, 3, 4]
SMALL = 64
# How rollouts are sampled, in the words of `/generate`.
SAMPLING = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 1.0}
GREEDY = {**SAMPLING, "temperature": 0.0}
# To learn from where there are no rollouts.
SOME_OUTPUTS = [list(range(first, 256, 16)) for first in range(16)]
# Small engines: the model has no tokenizer, and no context to speak of.
SERVER_ARGUMENTS: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 4096}


def make_tiny_model(path: Path) -> Path:
    """A checkpoint of random weights, small enough to train in a moment."""
    print("making a tiny model; what serves it starts in a few seconds", file=sys.stderr)
    # Seconds of imports, which the processes that examples start do without.
    from transformers import Qwen3Config, Qwen3ForCausalLM

    _quiet()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def load_model(path: Path) -> Any:
    """The model of a checkpoint, in transformers, to be trained."""
    from transformers import AutoModelForCausalLM

    _quiet()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _quiet() -> None:
    """Let transformers show no progress: the models are tiny."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def policy_loss(model: Any, outputs: Sequence[Sequence[int]]) -> tuple[torch.Tensor, float]:
    """REINFORCE with a baseline; the loss, and the mean reward."""
    device = model.device
    outputs_RT = torch.tensor(outputs, device=device)
    reward_RT = (outputs_RT < SMALL).float()
    ids_RT = torch.cat([torch.tensor([PROMPT] * len(outputs), device=device), outputs_RT], dim=1)
    logits_RTV = model(input_ids=ids_RT).logits[:, len(PROMPT) - 1 : -1]
    logprob_RT = logits_RTV.log_softmax(-1).gather(-1, outputs_RT[..., None])[..., 0]
    loss = -((reward_RT - reward_RT.mean()) * logprob_RT).mean()
    return loss, float(reward_RT.mean())


class Trainer:
    """REINFORCE on its own copy of the model."""

    def __init__(self, model_path: Path) -> None:
        self.model = load_model(model_path)
        self._optimizer = torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def learn(self, outputs: Sequence[Sequence[int]]) -> float:
        """One gradient step; returns the mean reward of the outputs."""
        loss, reward = policy_loss(self.model, outputs)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        return reward

    def next_weights(self) -> list[tuple[str, torch.Tensor]]:
        """Learn something, and return a copy of what has become of the weights."""
        self.learn(SOME_OUTPUTS)
        return [(name, tensor.clone()) for name, tensor in self.named_tensors()]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights under the names of a checkpoint."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    @torch.no_grad()
    def greedy(self) -> list[int]:
        """What an engine with these weights answers when nothing is left to chance."""
        ids = list(PROMPT)
        for _ in range(NUM_TOKENS):
            input_ids = torch.tensor([ids], device=self.model.device)
            ids.append(int(self.model(input_ids=input_ids).logits[0, -1].argmax()))
        return ids[len(PROMPT) :]


def buckets(
    named_tensors: Iterator[tuple[str, torch.Tensor]], bucket_bytes: int = 1 << 16
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The tensors in lists of about so many bytes."""
    pending: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named_tensors:
        pending.append((name, tensor))
        if sum(each.nbytes for _, each in pending) >= bucket_bytes:
            yield pending
            pending = []
    if pending:
        yield pending


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main(description: str | None, run: Callable[[Path, int], None]) -> None:
    """The command line of an example: `run` gets the folder of a model, and a number of steps."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model-path", type=Path, help="a folder like that of make_tiny_model (default: made)"
    )
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with TemporaryDirectory() as folder:
        run(arguments.model_path or make_tiny_model(Path(folder) / "model"), arguments.steps)
