"""A model that ranks divide computes what it computes on one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixtures.adapters import merged_adapter
from fixtures.checkpoints import GEMMA2, GEMMA3, make_checkpoint
from fixtures.model_runs import RunnerDriver
from fixtures.rank_processes import Output, Ranks, generate, outputs_of

from ebbtide.srt.device import CpuDevice
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.hf_folder import adapter_config
from ebbtide.srt.model_executor.batch_plan import BatchPlan, PassOutOfMemory, PendingStep
from ebbtide.srt.model_executor.pass_room import PassRoom

NUM_TOKENS = 12
NOTHING_HELD = {"num_weight_bytes": 0, "num_pages": 0}
PROMPTS = [list(b"The tide turns twice a day, and the marsh knows."), list(b"Ebb"), [7]]
BIASES = {"attention_bias": True, "mlp_bias": True}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-biases": ("LlamaForCausalLM", {**BIASES}),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "qwen2-uneven-vocabulary": ("Qwen2ForCausalLM", {"vocab_size": 259}),
    "qwen3-tied-uneven-vocabulary": ("Qwen3ForCausalLM", {"tied": True, "vocab_size": 261}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {}),
    "glm4-moe": ("Glm4MoeForCausalLM", {"attention_bias": True}),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {"q_lora_rank": None}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {}),
    "qwen3.5": ("Qwen3_5ForCausalLM", {"attention_bias": True}),
    "qwen3-next": ("Qwen3NextForCausalLM", {}),
    "nemotron-h": ("NemotronHForCausalLM", {"moe_latent_size": 32}),
    "gemma2-biases": ("Gemma2ForCausalLM", {"attention_bias": True, **GEMMA2}),
    "gemma3-tied": ("Gemma3ForCausalLM", {"tied": True, **GEMMA3}),
}
SIX_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


def assert_equal(outputs: list[Output], alone: Output) -> None:
    """Ranks sample without talking: what they compute is the same to the last bit."""
    assert all(output == outputs[0] for output in outputs)
    assert outputs[0].ids == alone.ids
    for ours, expected in zip(outputs[0].logprobs, alone.logprobs, strict=True):
        assert ours == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_two_ranks_generate_what_one_does(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    architecture, options = CHECKPOINTS[name]
    path = make_checkpoint(tmp_path, architecture, **options, seed=5)
    alone = generate(None, path, PROMPTS, NUM_TOKENS)

    outputs = two_ranks.run(generate, path, PROMPTS, NUM_TOKENS)

    # As a whole replica they hold it once, but for norms, routers and a KV head that both need.
    assert max(output.num_weight_bytes for output in outputs) < 0.6 * alone.num_weight_bytes
    assert_equal([Output(o.ids, o.logprobs, alone.num_weight_bytes, o.num_pages) for o in outputs], alone)


def test_the_kv_pool_has_the_pages_of_the_rank_with_least_room(two_ranks: Ranks, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen3ForCausalLM", seed=5)

    outputs = two_ranks.run(generate_with_room, path)

    assert [output.num_pages for output in outputs] == [6, 6]
    assert outputs[0].ids == outputs[1].ids


def generate_with_room(group: Any, path: Path) -> Output:
    """Every rank would hold a different number of tokens."""
    return generate(group, path, PROMPTS[1:], 4, max_total_tokens=(group.rank + 6) * 16)


def test_ranks_without_room_in_turn_launch_passes_again_and_generate_the_same(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "Qwen3ForCausalLM", seed=5)

    outputs = two_ranks.run(generate_in_little_memory, path)

    assert_equal(outputs, replace(generate(None, path, PROMPTS, NUM_TOKENS), **NOTHING_HELD))


class ScarceDevice(CpuDevice):
    """Has no room for one pass of three."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.num_passes = rank

    def make_room(self, num_bytes: int) -> bool:
        return self.num_passes % 3 > 0


def generate_in_little_memory(group: Any, path: Path) -> Output:
    driver = RunnerDriver(path, group=group)
    runner, launch, reasons = driver.runner, driver.runner.launch, list[str]()
    device = ScarceDevice(group.rank)
    runner.room = PassRoom(device, group, 1, 1)

    def launch_again(plan: BatchPlan) -> PendingStep:
        device.num_passes += 1
        runner.forget_room()
        try:
            return launch(plan)
        except PassOutOfMemory as error:
            reasons.append(str(error)[:6])
            return launch_again(plan)

    runner.launch = launch_again  # type: ignore[method-assign]
    output = outputs_of(driver, PROMPTS, NUM_TOKENS)
    assert reasons[:4] == ["rank 1", "rank 0"] * 2
    return replace(output, **NOTHING_HELD)


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("LlamaForCausalLM", SIX_HEADS, "expected a divisor of num_attention_heads=6, got 4"),
        (
            "LlamaForCausalLM",
            {**SIX_HEADS, "num_attention_heads": 12},
            "expected a divisor or a multiple of num_key_value_heads=3, got 4",
        ),
        ("Phi3ForCausalLM", {}, "expected a divisor of ranks that hold self_attn.qkv_proj of Phi-3=1, got 4"),
        ("Qwen3ForCausalLM", {"intermediate_size": 98}, "expected a divisor of intermediate_size=98, got 4"),
        (
            "Qwen3MoeForCausalLM",
            {"moe_intermediate_size": 42},
            "expected a divisor of intermediate_size of the experts=42, got 4",
        ),
    ],
    ids=str,
)
def test_models_that_ranks_cannot_divide_are_refused(
    architecture: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, architecture, **options, seed=5)

    with pytest.raises(ConfigurationError, match=f"tp_size: {message}"):
        generate(ParallelGroup(4), path, [[1]], 1)


@pytest.mark.parametrize("name", ["llama-one-kv-head", "qwen3-moe", "deepseek-v3", "nemotron-h"])
def test_two_ranks_compute_with_adapters_what_one_does(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    architecture, options = CHECKPOINTS[name]
    path = make_checkpoint(tmp_path, architecture, **options, seed=5)
    alone = generate_with_adapters(None, path)
    outputs = two_ranks.run(generate_with_adapters, path)
    assert alone.ids[0] != alone.ids[1], "the adapter changes nothing"
    assert_equal([Output(o.ids, o.logprobs, alone.num_weight_bytes, o.num_pages) for o in outputs], alone)


def generate_with_adapters(group: Any, path: Path) -> Output:
    """One prompt with an adapter, and the same without."""
    driver = RunnerDriver(path, group=group, enable_lora=True, max_lora_rank=8, max_loras_per_batch=2)
    slots, adapter = driver.runner.adapters, merged_adapter(path)
    assert slots is not None
    tensors = {name: each for name, each in adapter.tensors.items() if ".kv_b_proj." not in name}
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    slots.write(1, slots.fit(adapter_config(adapter.fields), described), tensors.items())
    return outputs_of(driver, [PROMPTS[0]] * 2, NUM_TOKENS, adapters=[1, -1])
