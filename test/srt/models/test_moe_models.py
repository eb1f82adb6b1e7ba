"""Qwen3-MoE and Mixtral: what they compute, the checkpoints they take, and updates of single experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.model_runs import RunnerDriver
from fixtures.moe_checkpoints import ARCHITECTURES, make_checkpoint, make_config
from fixtures.references import Reference
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.model_executor.batch_plan import LogprobSpec
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.registry import build_model

CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3-moe-plain-weights": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
    "qwen3-moe-dense-layers": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3-moe-every-second": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "qwen3-moe-tied": ("Qwen3MoeForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-moe-windows": ("Qwen3MoeForCausalLM", {"use_sliding_window": True, "sliding_window": 9}),
    "mixtral": ("MixtralForCausalLM", {}),
    "mixtral-windows": ("MixtralForCausalLM", {"sliding_window": 9}),
}
PROMPT = list(b"Each wave finds its own way up the beach.")
# Checkpoint names of one expert's up projection.
UP = {
    "Qwen3MoeForCausalLM": "model.layers.1.mlp.experts.2.up_proj.weight",
    "MixtralForCausalLM": "model.layers.1.block_sparse_moe.experts.2.w3.weight",
}


def build(architecture: str, **options: Any) -> CausalLM:
    config = make_config(architecture, **options)
    return build_model(architecture, config, torch.float32, torch.device("cpu"))


@pytest.fixture(params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_output_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, options = CHECKPOINTS[name]
    reference = Reference(make_checkpoint(tmp_path, architecture, **options))
    driver = RunnerDriver(tmp_path)
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))

    driver.generate([run], 24, chunk=17)

    assert run.output_ids == reference.greedy(PROMPT, 24)
    expected = reference.logprobs(run.token_ids)
    predicted = [expected[position, token].item() for position, token in enumerate(run.token_ids[1:])]
    ours = [entry.token for entry in run.prompt_logprobs + run.logprobs]
    assert ours == pytest.approx(predicted, abs=1e-4)


def test_requests_in_one_batch_do_not_disturb_each_other(architecture: str, tmp_path: Path) -> None:
    reference = Reference(make_checkpoint(tmp_path, architecture))
    prompts = [PROMPT, list(b"a"), list(b"Low water at nine."), list(range(60, 90))]
    driver = RunnerDriver(tmp_path)
    runs = [driver.start(prompt) for prompt in prompts]

    driver.generate(runs, 12)

    assert [run.output_ids for run in runs] == [reference.greedy(prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_the_map_names_the_tensors_of_a_checkpoint_and_fills_every_parameter(
    name: str, tmp_path: Path
) -> None:
    architecture, options = CHECKPOINTS[name]
    checkpoint = load_file(make_checkpoint(tmp_path, architecture, **options) / "model.safetensors")
    model = build(architecture, **options)

    targets = model.checkpoint_map()

    assert {name: target.shape for name, target in targets.items()} == {
        name: tuple(tensor.shape) for name, tensor in checkpoint.items()
    }
    for name, parameter in model.named_parameters():
        pieces = sorted(
            (target.start, target.length) for target in targets.values() if target.parameter == name
        )
        assert [start for start, _ in pieces] == [sum(n for _, n in pieces[:i]) for i in range(len(pieces))]
        assert sum(length for _, length in pieces) == parameter.shape[0]


def test_every_tensor_of_a_checkpoint_reads_back(architecture: str, tmp_path: Path) -> None:
    checkpoint = load_file(make_checkpoint(tmp_path, architecture) / "model.safetensors")
    store = RunnerDriver(tmp_path).runner.weight_store

    assert store.names == checkpoint.keys()
    for name, tensor in checkpoint.items():
        assert torch.equal(store.read(name, 10**9), tensor)


def test_one_experts_tensor_is_updated_by_its_name(architecture: str, tmp_path: Path) -> None:
    path, name = make_checkpoint(tmp_path, architecture), UP[architecture]
    driver = RunnerDriver(path)
    store = driver.runner.weight_store
    before = {other: store.read(other, 10**9) for other in store.names}
    new = torch.randn(before[name].shape, generator=torch.Generator().manual_seed(7))

    assert store.check(name, tuple(new.shape), torch.bfloat16) is None
    written = store.write(name, new, None)

    assert written == new.nbytes
    assert torch.equal(store.read(name, 10**9), new)
    assert all(torch.equal(store.read(other, 10**9), before[other]) for other in before if other != name)
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))
    driver.generate([run], 1)
    ours = torch.tensor([entry.token for entry in run.prompt_logprobs])
    assert chosen_logprobs(updated(Reference(path), 2, new)) == pytest.approx(ours, abs=1e-4)
    assert (chosen_logprobs(Reference(path)) - ours).abs().max() > 1e-2


def updated(reference: Reference, expert: int, up: Tensor) -> Reference:
    """The reference with another up projection of an expert in layer 1."""
    experts = reference.model.model.layers[1].mlp.experts
    experts.gate_up_proj.data[expert, len(up) :] = up
    return reference


def chosen_logprobs(reference: Reference) -> Tensor:
    """Of the prompt's tokens after the first."""
    return reference.logprobs(PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)


def test_what_fits_no_expert_is_refused(architecture: str, tmp_path: Path) -> None:
    store = RunnerDriver(make_checkpoint(tmp_path, architecture)).runner.weight_store
    name = UP[architecture]
    inner, hidden = store.shape(name)

    transposed = store.check(name, (hidden, inner), torch.float32)
    unknown = store.check(name.replace("experts.2", "experts.6"), (inner, hidden), torch.float32)

    assert transposed is not None
    assert f"expected shape [{inner}, {hidden}]" in transposed.reason
    assert unknown is not None
    assert "no parameter of this name" in unknown.reason


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("Qwen3MoeForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, "experts take silu"),
        ("Qwen3MoeForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 .* the 4 experts"),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "num_experts_per_tok 3 .* the 0 experts"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused(architecture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(architecture, **options)


def test_the_names_of_older_configurations_are_read(tmp_path: Path) -> None:
    """Hub checkpoints say `num_experts`; transformers 5 writes `num_local_experts`."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 16, '
        '"num_experts_per_tok": 4, "moe_intermediate_size": 32, "num_hidden_layers": 1, "hidden_size": 64}'
    )
    config = AutoConfig.from_pretrained(tmp_path)

    model = build_model("Qwen3MoeForCausalLM", config, torch.bfloat16, torch.device("cpu"))

    assert model.checkpoint_map()["model.layers.0.mlp.gate.weight"].shape == (16, 64)
    assert "model.layers.0.mlp.experts.15.down_proj.weight" in model.checkpoint_map()
