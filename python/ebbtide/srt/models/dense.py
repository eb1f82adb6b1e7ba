"""The decoder that Llama, Qwen2 and Qwen3 share. Their files say how they differ.

Shapes: T tokens, N heads, H head_dim, D hidden, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.srt.distributed.division import Division
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import AttentionBackend, HeadNorms
from ebbtide.srt.layers.embedding import VocabEmbedding
from ebbtide.srt.layers.fused import linear_add_, norm_gate_up, norm_linear
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.norm import RMSNorm
from ebbtide.srt.layers.rotary import Rope, RopeConfig, RotaryEmbedding, rope_config
from ebbtide.srt.models.base import INPUTS, OUTPUTS, CausalLM, Split, WeightMap, divided, projection, stacked

MakeMLP = Callable[[int], nn.Module]


@dataclass(frozen=True)
class DenseConfig:
    """Sizes and switches of a dense decoder."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def dense_config(hf_config: Any, **switches: bool) -> DenseConfig:
    """Sizes from a Hugging Face config. Raises ConfigurationError for what this decoder does not do."""
    if hf_config.hidden_act != "silu":
        raise ConfigurationError(f"hidden_act {hf_config.hidden_act!r} is not supported; supported is 'silu'")
    layer_types = set(getattr(hf_config, "layer_types", None) or ())
    if getattr(hf_config, "use_sliding_window", False) or layer_types - {"full_attention"}:
        raise ConfigurationError("sliding-window attention is not supported; set use_sliding_window to false")
    num_heads = hf_config.num_attention_heads
    head_dim = getattr(hf_config, "head_dim", None)
    num_kv_heads = getattr(hf_config, "num_key_value_heads", None)
    return DenseConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if num_kv_heads is not None else num_heads,
        head_dim=head_dim if head_dim is not None else hf_config.hidden_size // num_heads,
        norm_eps=hf_config.rms_norm_eps,
        rope=rope_config(hf_config),
        tied=bool(hf_config.tie_word_embeddings),
        **switches,
    )


class Attention(nn.Module):
    """Grouped-query self-attention with one fused q, k, v projection."""

    def __init__(self, config: DenseConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.head_dim = config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size, config.q_size + 2 * config.kv_size, bias=config.qkv_bias, dtype=dtype
        )
        self.o_proj = Linear(config.q_size, config.hidden_size, bias=config.output_bias, dtype=dtype)
        self.q_norm = RMSNorm(self.head_dim, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None

    def add_(self, x_TD: Tensor, norm: RMSNorm, rope: Rope, attention: AttentionBackend) -> None:
        """x += attention of norm(x), in place."""
        qkv, out = self.qkv_proj, self.o_proj
        qkv_TO = norm_linear(x_TD, norm.weight, norm.eps, qkv.weight, qkv.bias)
        out_TNH = attention.forward(
            self.layer, qkv_TO.view(len(x_TD), -1, self.head_dim), rope, self.head_norms()
        )
        linear_add_(out_TNH.flatten(1), out.weight, out.bias, x_TD, out.group)

    def head_norms(self) -> HeadNorms | None:
        """As the parameters are now: the weight store gives them their memory after construction."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class GatedMLP(nn.Module):
    """silu(gate(x)) · up(x), projected back; gate and up are one fused projection."""

    def __init__(self, config: DenseConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)

    def add_(self, x_TD: Tensor, norm: RMSNorm) -> None:
        """x += MLP of norm(x), in place."""
        gate_up, down = self.gate_up_proj, self.down_proj
        inner_TI = norm_gate_up(x_TD, norm.weight, norm.eps, gate_up.weight, gate_up.bias)
        linear_add_(inner_TI, down.weight, down.bias, x_TD, down.group)


class Block(nn.Module):
    """One decoder layer with pre-normalisation.

    Args:
        mlp: takes the normalised hidden states [T, D] and returns what is added to them; None for the
            dense model's own, which fuses the norm and the addition.
    """

    def __init__(self, config: DenseConfig, layer: int, dtype: torch.dtype, mlp: nn.Module | None) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.self_attn = Attention(config, layer, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)
        self.mlp = GatedMLP(config, dtype) if mlp is None else mlp

    def forward(
        self, x_TD: Tensor, rope: Rope, attention: AttentionBackend, rows_M: Tensor | None = None
    ) -> Tensor:
        """Adds to `x_TD` in place: nothing else refers to the residual stream. Returns the rows wanted."""
        self.self_attn.add_(x_TD, self.input_layernorm, rope, attention)
        if rows_M is not None:
            # All rows have left their keys and values.
            x_TD = x_TD[rows_M]
        if isinstance(self.mlp, GatedMLP):
            self.mlp.add_(x_TD, self.post_attention_layernorm)
        else:
            x_TD += self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD


class Decoder(nn.Module):
    """Embedding, layers and final norm; `make_mlp` yields each layer's MLP, see `Block`."""

    def __init__(
        self, config: DenseConfig, dtype: torch.dtype, device: torch.device, make_mlp: MakeMLP | None = None
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.rotary_emb = RotaryEmbedding(config.rope, config.head_dim, device)
        self.layers = nn.ModuleList(
            Block(config, layer, dtype, make_mlp(layer) if make_mlp is not None else None)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps, dtype=dtype)

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        attention: AttentionBackend,
        rows_M: Tensor | None = None,
    ) -> Tensor:
        x_TD = self.embed_tokens(input_ids_T)
        rope = self.rotary_emb(positions_T, x_TD.dtype)
        last = len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            x_TD = layer(x_TD, rope, attention, rows_M if number == last else None)
        hidden_TD: Tensor = self.norm(x_TD)
        return hidden_TD


class DenseCausalLM(CausalLM):
    """A dense decoder with an output projection, its own or the embedding's.

    Args:
        config: sizes and switches.
        dtype: of the parameters and activations.
        device: where buffers live; parameters are on the meta device.
        make_mlp: layer → the MLP of that layer, see `Block`; None for dense ones.
    """

    def __init__(
        self, config: DenseConfig, dtype: torch.dtype, device: torch.device, make_mlp: MakeMLP | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dtype, device, make_mlp)
        self.lm_head = (
            None if config.tied else VocabEmbedding(config.vocab_size, config.hidden_size, dtype=dtype)
        )

    def forward(
        self,
        input_ids_T: Tensor,
        positions_T: Tensor,
        attention: AttentionBackend,
        rows_M: Tensor | None = None,
    ) -> Tensor:
        hidden_MD: Tensor = self.model(input_ids_T, positions_T, attention, rows_M)
        return hidden_MD

    def logits(self, hidden_TD: Tensor) -> Tensor:
        return (self.model.embed_tokens if self.lm_head is None else self.lm_head).logits(hidden_TD)

    def checkpoint_map(self) -> WeightMap:
        return outer_map(self.config) | {
            f"model.layers.{layer}.{name}": replace(
                target, parameter=f"model.layers.{layer}.{target.parameter}"
            )
            for layer in range(self.config.num_layers)
            for name, target in layer_map(self.config).items()
        }

    def ignored(self, name: str) -> bool:
        return name.endswith(".rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")


def outer_map(config: DenseConfig) -> WeightMap:
    """Shard/fuse map of what lies outside the layers."""
    vocab, hidden = config.vocab_size, config.hidden_size
    rows = stacked("model.embed_tokens.weight", {"model.embed_tokens.weight": vocab}, hidden)
    rows |= stacked("model.norm.weight", {"model.norm.weight": hidden})
    if not config.tied:
        rows |= stacked("lm_head.weight", {"lm_head.weight": vocab}, hidden)
    tokens = Split(OUTPUTS, vocab, "vocab_size", Division.SPREAD)
    return divided(rows, {"model.embed_tokens": tokens, "lm_head": tokens})


def layer_map(config: DenseConfig) -> WeightMap:
    """Shard/fuse map of one layer, names relative to it."""
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size
    qkv = {"self_attn.q_proj": q, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    gate_up = {"mlp.gate_proj": inner, "mlp.up_proj": inner}
    norms = {"input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden}
    if config.qk_norm:
        norms |= {"self_attn.q_norm.weight": config.head_dim, "self_attn.k_norm.weight": config.head_dim}
    rows = projection("self_attn.qkv_proj", qkv, hidden, bias=config.qkv_bias)
    rows |= projection("self_attn.o_proj", {"self_attn.o_proj": hidden}, q, bias=config.output_bias)
    rows |= projection("mlp.gate_up_proj", gate_up, hidden, bias=config.mlp_bias)
    rows |= projection("mlp.down_proj", {"mlp.down_proj": hidden}, inner, bias=config.mlp_bias)
    for name, size in norms.items():
        rows |= stacked(name, {name: size})
    return divided(rows, layer_splits(config))


def layer_splits(config: DenseConfig) -> dict[str, Split]:
    """What ranks divide of one layer, by checkpoint module: heads of attention, inner columns of the MLP."""
    heads, inner = (config.num_heads, "num_attention_heads"), (config.intermediate_size, "intermediate_size")
    kv_heads = Split(OUTPUTS, config.num_kv_heads, "num_key_value_heads", Division.SHARED)
    return {
        "self_attn.q_proj": Split(OUTPUTS, *heads),
        "self_attn.k_proj": kv_heads,
        "self_attn.v_proj": kv_heads,
        "self_attn.o_proj": Split(INPUTS, *heads),
        "mlp.gate_proj": Split(OUTPUTS, *inner),
        "mlp.up_proj": Split(OUTPUTS, *inner),
        "mlp.down_proj": Split(INPUTS, *inner),
    }
