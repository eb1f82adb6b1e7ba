"""Which configs the models take, what they refuse instead of computing something else, single experts.

What they compute: model_executor/test_model_runner.py.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from fixtures.checkpoints import (
    ARCHITECTURES,
    BORROWED,
    TINY_SHAPE,
    edit_config,
    make_checkpoint,
    make_config,
)
from fixtures.model_runs import RunnerDriver
from fixtures.references import Reference
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig

from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.model_executor.batch_plan import LogprobSpec
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.registry import MODELS, build_model

PROMPT = list(b"Each wave finds its own way up the beach.")


def build(architecture: str, **options: Any) -> CausalLM:
    config = make_config(architecture, **options)
    return build_model(architecture, config, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        *(
            (architecture, options)
            for architecture in ARCHITECTURES + BORROWED
            for options in ({}, {"tied": True})
        ),
        ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
        ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    ],
    ids=str,
)
def test_the_map_names_the_tensors_of_a_checkpoint_and_fills_every_parameter_once(
    architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = load_file(make_checkpoint(tmp_path, architecture, **options) / "model.safetensors")
    config = AutoConfig.from_pretrained(tmp_path)
    model = build_model(architecture, config, torch.bfloat16, torch.device("cpu"))

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
        assert parameter.is_meta
        is_wide = architecture.startswith(("Glm4Moe", "Deepseek", "Nemotron")) and ".gate." in name
        is_wide |= name.endswith(("decay_log", "rate_bias", "step_bias", "skip"))
        assert parameter.dtype == (torch.float32 if is_wide else torch.bfloat16)
    num_fused = len(targets) - len(dict(model.named_parameters()))
    # Phi-3's checkpoints hold them fused, and transformers' code knows none.
    assert num_fused > 0 or architecture in ("Phi3ForCausalLM", *BORROWED)
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_ignored_names() -> None:
    untied, tied = build("LlamaForCausalLM"), build("LlamaForCausalLM", tie_word_embeddings=True)

    assert tied.ignored("lm_head.weight")
    assert not untied.ignored("lm_head.weight")
    assert untied.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not tied.ignored("model.norm.weight")
    # What drafts tokens lies behind the layers.
    for architecture in ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "DeepseekV3ForCausalLM"):
        model = build(architecture)
        assert model.ignored("model.layers.2.eh_proj.weight")
        assert not model.ignored("model.layers.1.mlp.gate.weight")
    # Qwen3.5's lie apart, and its text model may stand beside a vision tower.
    qwen = build("Qwen3_5MoeForCausalLM")
    assert qwen.ignored("mtp.layers.0.mlp.gate.weight")
    assert build("NemotronHForCausalLM").ignored("mtp.layers.0.mixer.q_proj.weight")
    assert not qwen.ignored("model.visual.patch_embed.proj.weight")


DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
LINEAR_ATTENTION = {"layer_types": ["full_attention", "linear_attention"]}


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        ("Qwen3ForCausalLM", LINEAR_ATTENTION, "'linear_attention' is not"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_attention needs a sliding_window ≥ 1"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping is not supported"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("Qwen2ForCausalLM", {"rope_parameters": DYNAMIC}, "'dynamic' is not .* default, linear, llama3"),
        ("Qwen3MoeForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, "experts take silu"),
        ("MixtralForCausalLM", {"num_experts_per_tok": 5}, "num_experts_per_tok 5 .* the 4 experts"),
        ("Qwen3MoeForCausalLM", {"num_experts": 0}, "num_experts_per_tok 3 .* the 0 experts"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, "groups of two experts or more, of 8 in all, got 3 groups"),
        ("Glm4MoeForCausalLM", {"n_group": 8, "topk_group": 4}, "of two experts or more, of 8 .* 8 gr"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense", "tree"]}, "mlp_layer_types 'tree' is not"),
        ("Glm4MoeLiteForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' .* 'sigmoid'"),
        ("Glm4MoeLiteForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not"),
        ("DeepseekV2ForCausalLM", {"num_experts_per_tok": None}, "num_experts_per_tok 0 .* the 8 experts"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method .* 'greedy' or 'group_limited"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob True is not .* expected False"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' .* 'sigmoid'"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported; expected 1"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias is not supported with latent"),
        (
            "NemotronHForCausalLM",
            {"layers_block_type": ["mlp", "moe"]},
            "expected one full_attention or more",
        ),
        ("NemotronHForCausalLM", {"mamba_num_heads": 5}, "expected a multiple of the 2 groups, got 5"),
        ("NemotronHForCausalLM", {"time_step_limit": [0.0, 0.5]}, r"time_step_limit: expected \[0.0, Inf"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused(architecture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(architecture, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("attention_bias", True),
        ("mlp_hidden_act", "silu"),
        ("sliding_window", 8),
        ("use_conv_bias", False),
    ],
)
def test_what_other_nemotrons_would_have_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    edit_config(make_checkpoint(tmp_path, "NemotronHForCausalLM"), **{name: value})
    with pytest.raises(ConfigurationError, match=f"{name} {value!r} is not supported; expected its default"):
        RunnerDriver(tmp_path)


def test_a_config_of_another_type_than_its_architecture_is_refused_by_the_field_it_lacks(
    tmp_path: Path,
) -> None:
    edit_config(make_checkpoint(tmp_path, "LlamaForCausalLM"), architectures=["Qwen3NextForCausalLM"])
    with pytest.raises(
        ConfigurationError, match=r"Qwen3Next.*: expected \w+ in .* model_type 'llama' has not"
    ):
        RunnerDriver(tmp_path)


def test_a_field_that_no_code_of_ours_reads_is_refused_unless_it_has_its_default(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "DeepseekV2ForCausalLM", mlp_bias=False, attention_dropout=0.1)
    RunnerDriver(path)
    edit_config(path, mlp_bias=True)

    with pytest.raises(ConfigurationError, match="DeepseekV2ForCausalLM: mlp_bias True is not supported"):
        RunnerDriver(path)


def test_mimo_is_qwen2_with_layers_that_are_set_aside(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "Qwen2ForCausalLM")
    expected = Reference(path).greedy(PROMPT, 8)
    weights = load_file(path / "model.safetensors")
    save_file(weights | {"model.mtp_layers.0.input_proj.weight": torch.ones(4)}, path / "model.safetensors")
    edit_config(path, architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1)

    driver = RunnerDriver(path)
    run = driver.start(PROMPT)
    driver.generate([run], 8)

    assert run.output_ids == expected


@pytest.mark.parametrize(
    ("architecture", "model_type", "options", "message"),
    [
        ("NoSuchForCausalLM", "olmo2", {}, "'NoSuchForCausalLM' is not supported; supported are Llama"),
        ("StableLmForCausalLM", "stablelm", {}, "StableLmAttention does not hand on what it is called with"),
        ("MptForCausalLM", "mpt", {}, "it takes no position_ids"),
        ("BertLMHeadModel", "bert", {}, "BertSelfAttention attends to tokens that come later"),
        ("BambaForCausalLM", "bamba", {}, "layer 0 has no attention"),
        ("MiniMaxForCausalLM", "minimax", {}, "layer type 'linear_attention' is not supported"),
        ("Llama4ForCausalLM", "llama4_text", {}, "layer type 'chunked_attention' is not supported"),
        ("OlmoeForCausalLM", "olmoe", {}, "checkpoints are converted when transformers loads them"),
        ("Gemma3nForCausalLM", "gemma3n_text", {}, "num_kv_shared_layers 15 is not supported"),
        ("DogeForCausalLM", "doge", {}, "DogeAttention has a mask of its own"),
        ("Olmo2ForCausalLM", "olmo2", {"rope_parameters": DYNAMIC}, "rope type 'dynamic' is not supported"),
    ],
)
def test_what_transformers_does_otherwise_is_refused(
    architecture: str, model_type: str, options: dict[str, Any], message: str
) -> None:
    config = CONFIG_MAPPING[model_type](**{**TINY_SHAPE, **options})

    with pytest.raises(ConfigurationError, match=message):
        build_model(architecture, config, torch.bfloat16, torch.device("cpu"))


def test_models_of_transformers_code_are_updated_released_and_loaded(tmp_path: Path) -> None:
    paths = [make_checkpoint(tmp_path / str(seed), "GraniteForCausalLM", seed=seed) for seed in range(2)]
    references, driver = [Reference(path) for path in paths], RunnerDriver(paths[0])
    store = driver.runner.weight_store

    def outputs() -> list[int]:
        run = driver.start(PROMPT)
        driver.generate([run], 8)
        return run.output_ids

    expected = [reference.greedy(PROMPT, 8) for reference in references]
    assert expected[0] != expected[1]
    assert outputs() == expected[0]
    for name, tensor in load_file(paths[1] / "model.safetensors").items():
        assert store.check(name, tuple(tensor.shape), tensor.dtype) is None
        store.write(name, tensor, None)
    assert outputs() == expected[1]
    store.arena.release()
    store.arena.resume()
    load_weights(store, paths[0], "auto")
    assert outputs() == expected[0]


def test_updates_may_call_tensors_of_nemotrons_as_transformers_does(tmp_path: Path) -> None:
    """All experts of a layer are one tensor there, and names begin otherwise than in checkpoints."""
    paths = [make_checkpoint(tmp_path / str(seed), "NemotronHForCausalLM", seed=seed) for seed in range(2)]
    driver, other = RunnerDriver(paths[0]), Reference(paths[1])
    store, tensors = driver.runner.weight_store, other.model.state_dict()
    assert frozenset[str]().union(*map(store.covered, tensors)) == store.names
    assert store.covered("model.layers.2.mixer.k_proj.weight") == {"backbone.layers.2.mixer.k_proj.weight"}
    for name, tensor in tensors.items():
        assert store.check(name, tuple(tensor.shape), tensor.dtype) is None
        store.write(name, tensor, None)
    run = driver.start(PROMPT)
    driver.generate([run], 8)
    assert run.output_ids == other.greedy(PROMPT, 8)


def test_what_is_applied_to_our_layers_is_refused_for_those_of_transformers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "GraniteForCausalLM")
    refused: dict[str, dict[str, Any]] = {
        "tp_size": {"group": ParallelGroup(2, 0)},
        "quantization": {"quantization": "fp8"},
        "enable_lora": {"enable_lora": True},
    }
    for name, options in refused.items():
        with pytest.raises(ConfigurationError, match=f"{name}: not supported for GraniteForCausalLM"):
            RunnerDriver(path, **options)


def test_windows_are_in_the_layers_that_the_config_names() -> None:
    def windows(architecture: str, **options: Any) -> list[int | None]:
        model = build(architecture, sliding_window=8, **options)
        return [layer.kind.window for layer in model.attention_layers]

    some = {"num_hidden_layers": 3, "max_window_layers": 1}
    assert windows("Qwen2ForCausalLM", use_sliding_window=True, **some) == [None, 8, 8]
    assert windows("Qwen2ForCausalLM", use_sliding_window=False, **some) == [None, None, None]
    assert windows("Gemma2ForCausalLM", num_hidden_layers=3) == [8, None, 8]
    assert windows("Gemma3ForCausalLM", num_hidden_layers=7) == [8] * 5 + [None, 8]


GPT_OSS = "GptOssForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("Qwen3MoeForCausalLM", "mlp.experts.2.up_proj.weight"),
        ("MixtralForCausalLM", "block_sparse_moe.experts.2.w3.weight"),
        (GPT_OSS, "self_attn.sinks"),
        (GPT_OSS, "mlp.router.bias"),
        (GPT_OSS, "mlp.experts.gate_up_proj"),
        (GPT_OSS, "mlp.experts.down_proj_bias"),
    ],
)
def test_tensors_of_experts_are_updated_by_their_names(architecture: str, name: str, tmp_path: Path) -> None:
    path, name = make_checkpoint(tmp_path, architecture), f"model.layers.1.{name}"
    reference, driver = Reference(path), RunnerDriver(path)
    store = driver.runner.weight_store
    before = {other: store.read(other, 10**9)() for other in store.names}
    new = torch.randn(before[name].shape, generator=torch.Generator().manual_seed(7))

    assert store.check(name, tuple(new.shape), new.dtype) is None
    assert store.write(name, new, None) == new.nbytes

    assert torch.equal(store.read(name, 10**9)(), new)
    assert all(torch.equal(store.read(other, 10**9)(), before[other]) for other in before if other != name)
    unchanged = chosen_logprobs(reference)
    if architecture == GPT_OSS:
        reference.model.get_parameter(name).data.copy_(new)
    else:
        reference.model.model.layers[1].mlp.experts.gate_up_proj.data[2, len(new) :] = new
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))
    driver.generate([run], 1)
    ours = torch.tensor([entry.token for entry in run.prompt_logprobs])
    assert (unchanged - ours).abs().max() > 1e-2
    assert chosen_logprobs(reference) == pytest.approx(ours, abs=1e-4)


def test_tensors_of_experts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    store = RunnerDriver(make_checkpoint(tmp_path, "Qwen3MoeForCausalLM")).runner.weight_store
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    shape = store.shape(name)
    transposed = store.check(name, tuple(reversed(shape)), torch.float32)
    unknown = store.check(name.replace("experts.2", "experts.9"), shape, torch.float32)
    assert transposed is not None
    assert f"expected shape {list(shape)}" in transposed.reason
    assert unknown is not None
    assert "no parameter of this name" in unknown.reason


def chosen_logprobs(reference: Reference) -> Tensor:
    """Of the prompt's tokens after the first."""
    return reference.logprobs(PROMPT)[:-1].gather(1, torch.tensor(PROMPT[1:])[:, None]).squeeze(1)


NEMOTRON_H_8B = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
NEMOTRON_3_NANO: dict[str, Any] = {
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "hidden_size": 2688,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}


@pytest.mark.parametrize(
    ("architecture", "options", "billions"),
    [
        ("DeepseekV3ForCausalLM", {}, 671.0),
        ("Glm4MoeLiteForCausalLM", {}, 29.9),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": NEMOTRON_H_8B}, 8.1),
        ("NemotronHForCausalLM", NEMOTRON_3_NANO, 31.6),
    ],
    ids=str,
)
def test_models_have_the_parameters_that_their_publishers_name(
    architecture: str, options: dict[str, Any], billions: float
) -> None:
    """Transformers' defaults are the sizes of DeepSeek-V3 and of GLM-4.7-Flash."""
    config = getattr(transformers, architecture).config_class(**options)
    model = build_model(architecture, config, torch.bfloat16, torch.device("cpu"))
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(
        billions * 1e9, rel=2e-3
    )


def test_the_page_of_models_has_a_row_for_each_architecture() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    first_cells = re.findall(r"^\| (`[^|]*`) \|", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(first_cells))) == sorted(MODELS)


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
