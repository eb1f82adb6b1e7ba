"""The tiny models of a soak."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def make_model(folder: Path, seed: int) -> Path:
    """A checkpoint of random weights, whose logits lie far enough apart that rounding decides nothing."""
    folder.mkdir()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(architectures=["Qwen3ForCausalLM"], **SHAPE))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.config.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    return folder


def make_models(folder: Path, seed: int) -> None:
    """What is served (`model`), other weights of its shape (`other`), and some that do not fit (`wrong`)."""
    make_model(folder / "model", seed)
    make_model(folder / "other", seed + 1)
    wrong = load_file(make_model(folder / "wrong", seed + 2) / "model.safetensors")
    wrong["model.norm.weight"] = torch.ones(3)
    save_file(wrong, folder / "wrong" / "model.safetensors", {"format": "pt"})
