"""Adapters that lie on the engine's GPU: loaded, evicted, brought back, and kept through a sleep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.adapters import Adapter, merged_adapter
from fixtures.checkpoints import make_checkpoint

from ebbtide import Engine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PROMPT = list(b"Ebb and flow: the tide goes out.")
GREEDY = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True}


def test_adapters_come_and_go_while_streams_decode(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    adapters = [merged_adapter(model, seed=seed) for seed in range(4)]
    expected = [adapter.reference.greedy(PROMPT, 8) for adapter in adapters]
    arguments: dict[str, Any] = {"device": "cuda", "attention_backend": "triton", "cuda_graph_max_bs": 8}
    lora = {"enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 1}
    with Engine(model_path=str(model), max_total_tokens=4096, **arguments, **lora) as engine:

        def load(name: str, adapter: Adapter, version: int) -> bool:
            tensors = {key: tensor.cuda() for key, tensor in adapter.tensors.items()}
            reply = engine.load_lora_adapter_from_tensors(name, tensors, adapter.fields, lora_version=version)
            return bool(reply["changed"])

        def said(name: str) -> list[int]:
            answer = engine.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=name)
            ids: list[int] = answer["output_ids"]
            return ids

        for index, adapter in enumerate(adapters):
            assert load(f"a{index}", adapter, 1)
        assert not load("a2", adapters[2], 1), "the same bytes are the same version"
        stream = engine.generate(
            input_ids=PROMPT, sampling_params={**GREEDY, "max_new_tokens": 200}, lora_path="a0", stream=True
        )
        next(stream)
        for version in range(2, 6):
            load("a1", adapters[version % 4], version)
        *_, last = stream
        assert last["output_ids"][:8] == expected[0]
        for index in (0, 2, 3, 0):
            assert said(f"a{index}") == expected[index]
        engine.release_memory_occupation(backup=False)
        engine.resume_memory_occupation()
        engine.update_weights_from_disk(str(model))
        for index in (3, 0, 2):
            assert said(f"a{index}") == expected[index]
