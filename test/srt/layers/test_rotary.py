"""Rotary frequencies and rotation against transformers."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.checkpoints import LLAMA3_ROPE
from transformers import Glm4MoeConfig, LlamaConfig

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.rotary import RotaryEmbedding, inverse_frequencies, rope_config, rotate

CPU = torch.device("cpu")
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0}
LLAMA31_ROPE = LLAMA3_ROPE | {"rope_theta": 500000.0, "original_max_position_embeddings": 8192}


YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
DEEPSEEK_YARN = YARN | {"beta_fast": 24.0, "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7}


@pytest.mark.parametrize(
    "settings",
    [
        LLAMA3_ROPE,
        LLAMA31_ROPE,
        LINEAR_ROPE,
        YARN,
        YARN | {"truncate": False},
        YARN | {"attention_factor": 1.25},
        DEEPSEEK_YARN,
    ],
    ids=str,
)
def test_scaled_frequencies_equal_transformers(settings: dict[str, Any]) -> None:
    theirs = import_module("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS
    config = LlamaConfig(head_dim=128, max_position_embeddings=131072, rope_parameters=dict(settings))
    expected, scale = theirs[settings["rope_type"]](config, CPU)

    ours = rope_config(config)

    assert ours.scale == pytest.approx(scale)
    torch.testing.assert_close(inverse_frequencies(ours, 128, CPU), expected, rtol=1e-6, atol=0.0)
    first, _ = RotaryEmbedding(ours, 128, CPU)(torch.tensor([0]), torch.float32)
    assert torch.equal(first, torch.full_like(first, scale))


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    ("config", "name", "rotated"),
    [
        (LlamaConfig(**SIZES), "Llama", 16),
        (Glm4MoeConfig(**SIZES, partial_rotary_factor=0.25), "Glm4Moe", 4),
    ],
    ids=["all", "a part of each head"],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_rotation_equals_transformers(
    config: Any, name: str, rotated: int, dtype: torch.dtype, tolerance: float
) -> None:
    modeling = import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 7, 100_000])
    q, k = torch.randn(4, 4, 16).to(dtype), torch.randn(4, 2, 16).to(dtype)
    cos, sin = getattr(modeling, f"{name}RotaryEmbedding")(config)(q, positions[None])
    heads = (q.transpose(0, 1)[None], k.transpose(0, 1)[None])
    expected_q, expected_k = modeling.apply_rotary_pos_emb(*heads, cos, sin)

    ours = RotaryEmbedding(rope_config(config), 16, CPU)(positions, dtype)

    for x, expected in ((q, expected_q), (k, expected_k)):
        before = x.clone()
        found = rotate(x, *ours)
        torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=0, atol=tolerance)
        assert torch.equal(found[..., rotated:], x[..., rotated:])
        assert torch.equal(x, before)


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
        {"rope_theta": 5000.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
        {"rope_parameters": LINEAR_ROPE},
    ],
    ids=str,
)
def test_old_and_new_fields_mean_the_same(fields: dict[str, Any]) -> None:
    config = rope_config(SimpleNamespace(**fields))

    assert (config.kind, config.theta, config.factor) == ("linear", 5000.0, 3.0)


def test_without_any_setting_it_is_the_default_rope() -> None:
    config = rope_config(SimpleNamespace(rope_scaling=None))

    assert (config.kind, config.theta) == ("default", 10000.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "longrope"}, "rope type 'longrope' is not supported"),
        ({"rope_type": "linear"}, "'linear' needs the setting 'factor'"),
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' needs the setting 'original_max_position_embeddings'"),
        ({"rope_type": "llama3", "factor": 2.0}, "'llama3' needs the setting 'low_freq_factor'"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor: expected a number in \(0, 1\], got 1.5"),
    ],
    ids=str,
)
def test_other_variants_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        rope_config(SimpleNamespace(rope_parameters=settings))
