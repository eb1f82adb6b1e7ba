"""Which configs the models take, and what they refuse instead of computing something else."""

from typing import Any

import pytest
import torch
from fixtures.checkpoints import ARCHITECTURES, TINY_SHAPE

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.registry import build_model


def build(architecture: str, **options: Any) -> CausalLM:
    config_class, _ = ARCHITECTURES[architecture]
    config = config_class(**{**TINY_SHAPE, **options})
    return build_model(architecture, config, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_the_map_covers_every_parameter_exactly_once(architecture: str, tied: bool) -> None:
    config_class, model_class = ARCHITECTURES[architecture]
    config = config_class(**{**TINY_SHAPE, "tie_word_embeddings": tied})
    model = build_model(architecture, config, torch.bfloat16, torch.device("cpu"))
    with torch.device("meta"):
        reference = model_class(config)

    targets = model.checkpoint_map()

    assert {name: target.shape for name, target in targets.items()} == {
        name: tuple(parameter.shape) for name, parameter in reference.named_parameters()
    }
    for name, parameter in model.named_parameters():
        pieces = sorted(
            (target.start, target.length) for target in targets.values() if target.parameter == name
        )
        assert [start for start, _ in pieces] == [sum(n for _, n in pieces[:i]) for i in range(len(pieces))]
        assert sum(length for _, length in pieces) == parameter.shape[0]
    assert len(dict(model.named_parameters())) < len(targets)


def test_parameters_take_no_memory_and_buffers_are_real() -> None:
    model = build("Qwen3ForCausalLM")

    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())


def test_ignored_names() -> None:
    untied, tied = build("LlamaForCausalLM"), build("LlamaForCausalLM", tie_word_embeddings=True)

    assert tied.ignored("lm_head.weight")
    assert not untied.ignored("lm_head.weight")
    assert untied.ignored("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not tied.ignored("model.norm.weight")


@pytest.mark.parametrize(
    ("architecture", "options", "message"),
    [
        (
            "Qwen3ForCausalLM",
            {"layer_types": ["full_attention", "linear_attention"]},
            "'linear_attention' is not",
        ),
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_attention needs a sliding_window ≥ 1"),
        ("Gemma3ForCausalLM", {"attn_logit_softcapping": 9.0}, "attn_logit_softcapping is not supported"),
        ("Gemma3ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        (
            "LlamaForCausalLM",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic' is not supported; supported are default, linear, llama3",
        ),
        (
            "Qwen2ForCausalLM",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            "rope type 'yarn' is not supported",
        ),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused(architecture: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        build(architecture, **options)


def windows(model: CausalLM) -> list[int | None]:
    return [layer.kind.window for layer in model.attention_layers]


def test_windows_are_in_the_layers_that_the_config_names() -> None:
    sliding = {"num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 1}
    assert windows(build("Qwen2ForCausalLM", use_sliding_window=True, **sliding)) == [None, 8, 8]
    assert windows(build("Qwen2ForCausalLM", use_sliding_window=False, **sliding)) == [None, None, None]
    assert windows(build("Gemma2ForCausalLM", num_hidden_layers=3, sliding_window=8)) == [8, None, 8]
    assert windows(build("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=8)) == [8] * 5 + [None, 8]
