"""TRL's GRPOTrainer in server mode trains with `ebbtide serve`, on a CPU, without a vLLM wheel.

TRL sends weights only from a device called "cuda"; only this name is patched here. AsyncGRPOTrainer needs
FlashAttention to train, so only its client of the server is tested.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")
import requests
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncClient
from trl.experimental.async_grpo.weight_transfer import WeightTransferClient
from trl.generation.vllm_client import VLLMClient
from vllm.utils import get_open_port

from ebbtide.srt.hf_folder import folder_of

MODEL = str(folder_of("tiny"))


@pytest.fixture(autouse=True)
def a_cpu_called_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    join = VLLMClient.init_communicator
    monkeypatch.setattr(VLLMClient, "init_communicator", lambda self, device: join(self, device="cuda"))


def prefers_low_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [-sum(ids) / len(ids) for ids in completion_ids]


def trainer_for(url: str, folder: Path) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        vllm_group_port=get_open_port(),
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    prompts = Dataset.from_list([{"prompt": text} for text in ("One", "Two", "Three", "Four")])
    return GRPOTrainer(model=MODEL, reward_funcs=prefers_low_ids, args=config, train_dataset=prompts)


def server_logprobs(url: str, ids: list[int]) -> list[float]:
    body = {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0}
    body["sampling_params"] = {"max_new_tokens": 1}
    answer = requests.post(f"{url}/generate", json=body, timeout=60).json()
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def model_logprobs(model: Any, ids: list[int]) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return [float(row[token]) for row, token in zip(logits, ids[1:], strict=True)]


def test_grpo_trains_and_the_server_samples_from_its_weights(url: str, tmp_path: Path) -> None:
    ids = [1, 300, 301, 302, 303, 304]
    first = server_logprobs(url, ids)
    trainer = trainer_for(url, tmp_path)
    trainer.train()
    steps = [row for row in trainer.state.log_history if "sampling/sampling_logp_difference/max" in row]
    assert len(steps) == 3
    # At each step, the server's logprobs of its samples are those of the trainer's weights.
    assert max(row["sampling/sampling_logp_difference/max"] for row in steps) < 1e-3
    trainer.vllm_generation.sync_weights()
    last = server_logprobs(url, ids)
    assert last == pytest.approx(model_logprobs(trainer.model, ids), abs=1e-3)
    assert max(abs(a - b) for a, b in zip(first, last, strict=True)) > 0.01


def test_async_grpo_sends_weights_at_a_pause(url: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(str(folder_of("tiny-storm")), dtype=torch.float32)
    weights = dict(model.named_parameters())
    metadata = {
        "names": list(weights),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
    }
    client = WeightTransferClient(AsyncClient(url), metadata)
    client.init_weight_transfer()
    client.pause()
    client.send_weights((name, weight.data) for name, weight in weights.items())
    client.resume()
    client.destroy()
    ids = [1, 300, 301, 302, 303, 304]
    assert server_logprobs(url, ids) == pytest.approx(model_logprobs(model, ids), abs=1e-3)
