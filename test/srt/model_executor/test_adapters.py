"""Adapters in slots: what a model computes with them, against PEFT, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.adapters import EXPERT_PARAMETERS, Adapter, make_adapter
from fixtures.checkpoints import make_checkpoint
from fixtures.model_runs import Run, RunnerDriver
from fixtures.references import Reference

from ebbtide.srt.adapter_config import adapter_config
from ebbtide.srt.model_executor.adapters import AdapterSlots
from ebbtide.srt.model_executor.batch_plan import LogprobSpec

PROMPT = list(b"Ebb and flow: the tide goes out, and the tide comes in again.")
NUM_TOKENS = 6
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-stabilized": ("LlamaForCausalLM", {"use_rslora": True, "lora_alpha": 5}),
    "llama-some": ("LlamaForCausalLM", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama-regex": ("LlamaForCausalLM", {"target_modules": r".*\.1\..*(k_proj|up_proj)"}),
    "llama-patterns": (
        "LlamaForCausalLM",
        {"rank_pattern": {"q_proj": 7, "1.mlp.down_proj": 12}, "alpha_pattern": {"v_proj": 3}},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3-moe-down": (
        "Qwen3MoeForCausalLM",
        {"target_modules": ["o_proj"], "target_parameters": EXPERT_PARAMETERS[1:]},
    ),
    "mixtral": ("MixtralForCausalLM", {}),
}


def slots(driver: RunnerDriver) -> AdapterSlots:
    adapters = driver.runner.adapters
    assert adapters is not None
    return adapters


def load(driver: RunnerDriver, slot: int, adapter: Adapter) -> None:
    config = adapter_config(adapter.fields)
    slots(driver).check(config, adapter.described)
    slots(driver).write(slot, config, adapter.tensors.items())


def check(run: Run, reference: Reference) -> None:
    """Assert that ids are the reference's, and logprobs within 1e-5."""
    assert run.output_ids == reference.greedy(run.spec.prompt_ids, len(run.output_ids))
    rows = reference.logprobs(run.token_ids)[len(run.spec.prompt_ids) - 1 : -1]
    expected = rows.gather(1, torch.tensor([run.output_ids]).t()).flatten()
    found = torch.tensor([position.token for position in run.logprobs])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_adapters_and_none_computes_what_peft_does(tmp_path: Path, name: str) -> None:
    architecture, options = CASES[name]
    model = make_checkpoint(tmp_path / "model", architecture)
    adapters = [make_adapter(model, tmp_path / str(seed), seed=seed, **options) for seed in (1, 2)]
    driver = RunnerDriver(model, **LORA)
    for slot, adapter in zip((2, 0), adapters, strict=True):
        load(driver, slot, adapter)
    references = {2: adapters[0].reference, 0: adapters[1].reference, -1: Reference(model)}
    runs = [
        driver.start(PROMPT[: 20 + 7 * number], logprobs=LogprobSpec(), adapter=slot)
        for number, slot in enumerate((2, -1, 0, 2))
    ]
    driver.generate(runs, NUM_TOKENS, chunk=16)
    for run in runs:
        check(run, references[run.adapter])
    outputs = {tuple(reference.greedy(PROMPT, NUM_TOKENS)) for reference in references.values()}
    assert len(outputs) > 1, "these adapters change nothing"
