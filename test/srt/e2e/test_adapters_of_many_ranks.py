"""Two replicas of two ranks each have the same versions of an adapter, or none of them has."""

from pathlib import Path

import pytest
import safetensors.torch
from fixtures.adapters import Adapter, make_adapter
from fixtures.checkpoints import make_checkpoint

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected

PROMPT = list(b"Ebb and flow: the tide goes out.")
GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}


def said(engine: Engine, adapter: str | None) -> list[list[int]]:
    """What each replica answers."""
    answers = [
        engine.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=adapter, routed_dp_rank=rank)
        for rank in range(2)
    ]
    return [answer["output_ids"] for answer in answers]


def test_all_ranks_of_all_replicas_load_a_version_or_none(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "Qwen3ForCausalLM")
    adapters: list[Adapter] = [make_adapter(model, tmp_path / str(seed), seed=seed) for seed in range(3)]
    expected = [adapter.reference.greedy(PROMPT, 6) for adapter in adapters]
    arguments = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 1}
    with Engine(model_path=str(model), dp_size=2, tp_size=2, max_total_tokens=512, **arguments) as engine:
        engine.load_lora_adapter("policy", str(adapters[0].folder))
        assert said(engine, "policy") == [expected[0]] * 2
        engine.load_lora_adapter_from_tensors("policy", adapters[1].tensors, adapters[1].fields)
        assert said(engine, "policy") == [expected[1]] * 2

        entries = [safetensors.torch.save(adapters[2].tensors)] * 3 + [b"nothing that can be read"]
        with pytest.raises(RequestRejected) as refused:
            engine.load_lora_adapter_from_tensors(
                "policy", entries, adapters[2].fields, load_format="safetensors"
            )
        assert "replica 1: rank 1" in refused.value.message
        assert said(engine, "policy") == [expected[1]] * 2

        engine.load_lora_adapter("other", str(adapters[2].folder))
        for name, index in (("other", 2), ("policy", 1), ("other", 2)):
            assert said(engine, name) == [expected[index]] * 2
        assert said(engine, "policy@1") == [expected[0]] * 2
