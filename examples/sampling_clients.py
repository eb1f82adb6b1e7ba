"""Sampling clients, each pinned to the adapter that it was made for, while training goes on.

    python examples/sampling_clients.py [--steps 4]

What a service for training adapters promises (Tinker calls the call `save_weights_for_sampler`):
- A save gives the adapter a path that never means anything else.
- A save whose answer was lost is made again: the same bytes under the same path change nothing, other bytes
  are refused.
- A sampling client goes on with the adapter of its path, whatever is saved later, and however many paths
  there are: those that nobody asks for wait in host memory.

Needs peft and transformers; a CPU is enough.
"""

from __future__ import annotations

import argparse
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import ebbtide
from ebbtide.srt.errors import RequestRejected

MODEL = Path(ebbtide.__file__).parent / "models" / "tiny"
TEXTS = ("The tide comes in.", "The tide goes out.", "The moon pulls the sea.", "Ebb follows flow.")


@dataclass(frozen=True)
class SamplingClient:
    """Samples from what one path means."""

    engine: ebbtide.Engine
    path: str

    def sample(self, prompt: str, max_new_tokens: int = 12) -> str:
        params = {"max_new_tokens": max_new_tokens, "temperature": 0.0}
        answer = self.engine.generate(prompt, params, lora_path=self.path)
        assert answer["meta_info"]["lora_name"] == self.path
        text: str = answer["text"]
        return text


class TrainingClient:
    """Trains one adapter. The base model is the engine's."""

    def __init__(self, engine: ebbtide.Engine) -> None:
        torch.manual_seed(0)
        self._engine = engine
        self._run = uuid.uuid4().hex[:8]
        self._tokenizer = AutoTokenizer.from_pretrained(MODEL)
        config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear")
        self._model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), config)
        parameters = [one for one in self._model.parameters() if one.requires_grad]
        self._optimizer = torch.optim.AdamW(parameters, lr=2e-3)

    def forward_backward(self, text: str) -> float:
        """One step on a text; returns the loss before it."""
        ids = self._tokenizer(text, return_tensors="pt").input_ids
        loss = self._model(input_ids=ids, labels=ids).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.item()

    def save_weights_for_sampler(self, name: str) -> str:
        """The path of the adapter as it is now. The same call again is the same save."""
        path = f"tinker://{self._run}/sampler_weights/{name}"
        tensors = {
            key: value.contiguous() for key, value in peft.get_peft_model_state_dict(self._model).items()
        }
        config: dict[str, Any] = self._model.peft_config["default"].to_dict()
        fields = {key: list(value) if isinstance(value, set) else value for key, value in config.items()}
        # One version for ever: that is what makes the path immutable.
        self._engine.load_lora_adapter_from_tensors(path, tensors, fields, lora_version="1")
        return path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=4)
    num_steps = parser.parse_args().steps
    arguments: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 1}
    with ebbtide.Engine(model_path=str(MODEL), device="cpu", **arguments) as engine:
        trainer = TrainingClient(engine)
        clients: dict[str, SamplingClient] = {}
        said: dict[str, str] = {}
        for step in range(num_steps):
            loss = trainer.forward_backward(TEXTS[step % len(TEXTS)])
            path = trainer.save_weights_for_sampler(f"{step:04}")
            assert trainer.save_weights_for_sampler(f"{step:04}") == path, "a retry is the same save"
            clients[path] = SamplingClient(engine, path)
            said[path] = clients[path].sample("The tide")
            print(f"step {step}: loss {loss:.3f}, {path} says {said[path]!r}")
        trainer.forward_backward(TEXTS[0])
        try:
            trainer.save_weights_for_sampler("0000")
        except RequestRejected as refusal:
            print(f"other weights under an old path: {refusal.status}")
        unchanged = all(client.sample("The tide") == said[path] for path, client in clients.items())
        print(f"every client still samples from its own weights: {unchanged}")


if __name__ == "__main__":
    main()
