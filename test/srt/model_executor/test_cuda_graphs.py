"""On a GPU: models by every attention backend, their decode steps captured and not; the graphs' memory."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import GEMMA2, GEMMA3, make_checkpoint
from fixtures.eight_bits import LATENT_SHAPE, is_quantized, quantized, restored
from fixtures.model_runs import Run, RunnerDriver
from fixtures.references import Reference
from safetensors.torch import load_file, save_file

from ebbtide.srt.model_executor import graph_runner
from ebbtide.srt.model_executor.batch_plan import LogprobSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

PROMPTS = [list(b"The tide turns twice a day, and the marsh knows it."), list(b"Ebb"), list(range(90, 140))]
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3-groups-of-3": ("Qwen3ForCausalLM", {"num_attention_heads": 6, "hidden_size": 96}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    # Older versions of transformers clamp at 7, whatever the config says.
    "gpt-oss": ("GptOssForCausalLM", {"swiglu_limit": 7.0}),
    "qwen3.5": ("Qwen3_5ForCausalLM", {}),
    "qwen3-next": ("Qwen3NextForCausalLM", {"linear_value_head_dim": 128, "linear_key_head_dim": 128}),
    "nemotron-h": ("NemotronHForCausalLM", {"mamba_head_dim": 64, "ssm_state_size": 128}),
    # Transformers' code.
    "granite": ("GraniteForCausalLM", {}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def run(path: Path, **server_args: Any) -> tuple[RunnerDriver, list[Run]]:
    driver = RunnerDriver(path, device="cuda", max_total_tokens=4096, **server_args)
    runs = [driver.start(prompt, logprobs=LogprobSpec(start=0)) for prompt in PROMPTS]
    driver.generate(runs, 24, chunk=19)
    return driver, runs


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize(
    ("backend", "dtype", "head_dim", "tolerance"),
    [
        ("flashinfer", "bfloat16", 128, 0.1),
        ("triton", "bfloat16", 128, 0.1),
        ("triton", "float32", 80, 1e-3),
    ],
)
def test_what_graphs_generate_is_what_transformers_expects(
    name: str, backend: str, dtype: str, head_dim: int, tolerance: float, tmp_path: Path
) -> None:
    architecture, options = CHECKPOINTS[name]
    path = make_checkpoint(tmp_path, architecture, dtype=dtype, **{**options, "head_dim": head_dim})
    runs, eager = assert_as_transformers(path, backend, tolerance)
    if dtype == "float32":
        assert [one.output_ids for one in runs] == [one.output_ids for one in eager]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("DeepseekV3ForCausalLM", {}),
        ("DeepseekV2ForCausalLM", {"q_lora_rank": None}),
        ("Glm4MoeLiteForCausalLM", {"rope_interleave": False}),
    ],
)
def test_graphs_over_latents_generate_what_transformers_expects(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "head_dim": 64, "moe_intermediate_size": 64}
    path = make_checkpoint(tmp_path, architecture, dtype="bfloat16", **sizes, **options)
    assert_as_transformers(path, "flashinfer", 0.1)


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_fp8"])
@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("DeepseekV3ForCausalLM", {}),
        ("DeepseekV2ForCausalLM", {"q_lora_rank": None}),
        ("Glm4MoeLiteForCausalLM", {"rope_interleave": False}),
    ],
)
def test_graphs_over_latents_multiply_weights_of_8_bits(
    architecture: str, options: dict[str, Any], quantization: str, tmp_path: Path
) -> None:
    """Held against weights that plain torch has rounded. That a GPU rounds activations too moves logprobs, of
    a spread of 2.6, by about as much again as rounded weights do, 0.26 on the mean."""
    sizes = {**LATENT_SHAPE, "kv_lora_rank": 512, **options}
    path = make_checkpoint(tmp_path / "plain", architecture, dtype="bfloat16", **sizes)
    rounded = make_checkpoint(tmp_path / "rounded", architecture, dtype="bfloat16", **sizes)
    file = rounded / "model.safetensors"
    tensors = {
        name: restored(*quantized(tensor, quantization)) if is_quantized(name) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    assert_as_transformers(path, "flashinfer", 0.5, Reference(rounded), quantization=quantization)


def assert_as_transformers(
    path: Path, backend: str, tolerance: float, reference: Reference | None = None, **server_args: Any
) -> tuple[list[Run], list[Run]]:
    """Assert that logprobs are near, with graphs and without; returns what each generated."""
    reference = reference or Reference(path)
    driver, runs = run(path, attention_backend=backend, **server_args)
    _, eager = run(path, attention_backend=backend, disable_cuda_graph=True, **server_args)

    assert driver.runner.graphs is not None
    for captured, plain in zip(runs, eager, strict=True):
        for one in (captured, plain):
            expected = reference.logprobs(one.token_ids)
            ours = torch.tensor([entry.token for entry in one.prompt_logprobs + one.logprobs])
            rows = torch.arange(len(one.token_ids) - 1)
            difference = (ours - expected[rows, torch.tensor(one.token_ids[1:])]).abs()
            assert difference.mean() < tolerance
    return runs, eager


def test_a_shape_that_flashinfer_does_not_take_is_served_with_graphs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", dtype="bfloat16", head_dim=96)

    driver, _ = run(path)

    assert driver.runner.graphs is not None
    assert "attention by TritonAttention instead" in caplog.text


def test_scratch_memory_that_is_too_small_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", dtype="bfloat16", head_dim=128)
    _, expected = run(path, cuda_graph_max_bs=512, max_running_requests=1024)
    monkeypatch.setattr(graph_runner, "SCRATCH_MARGIN_BYTES", 0)
    monkeypatch.setattr(graph_runner.DecodeGraphs, "_warm_up", smaller(graph_runner.DecodeGraphs._warm_up))

    driver, runs = run(path, cuda_graph_max_bs=512, max_running_requests=1024)

    assert "captured again" in caplog.text
    assert driver.runner.graphs is not None
    assert [one.output_ids for one in runs] == [one.output_ids for one in expected]


def smaller(warm_up: Any) -> Any:
    """The same warm-up, and next to none of the scratch that it measured."""

    def run_and_forget(graphs: graph_runner.DecodeGraphs) -> int:
        warm_up(graphs)
        return 1 << 20

    return run_and_forget
