"""The decoder that Llama, Qwen2, Qwen3 and others share. The files of those models say how they differ.

Shapes: T tokens, N heads, H head_dim, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.srt.distributed import Division
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import LayerAttention
from ebbtide.srt.layers.gated_delta_net import DeltaConfig, GatedDeltaNet
from ebbtide.srt.layers.heads import AttentionKind, HeadNorms, Rope, Sinks
from ebbtide.srt.layers.linear import Linear, VocabEmbedding
from ebbtide.srt.layers.norm import Activation, Addend, NormedResidual, Residual, RMSNorm
from ebbtide.srt.layers.rotary import RopeConfig, RotaryEmbedding, rope_config
from ebbtide.srt.layers.step import Kernels, Step
from ebbtide.srt.mem_cache import CacheSpec, Paged
from ebbtide.srt.models.base import (
    INPUTS,
    OUTPUTS,
    CausalLM,
    Split,
    WeightMap,
    WeightTarget,
    mlp_map,
    projection,
    stacked,
)

# config.json's name → ours.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class DenseConfig:
    """Sizes and switches of a dense decoder.

    Attributes:
        kinds: the attention of each layer.
        ropes: the rotary embedding of each layer.
        tied: whether the output projection is the embedding.
        sinks: whether query heads have sinks, see `LayerAttention`.
        norm_offset: see `RMSNorm`.
        embedding_scale: a factor for all embeddings.
        output_gate: whether the query projection also yields a gate for each number of a head's output.
        delta: the sizes of linear attention; None: no layer has it.
        linear_layers: the layers with linear attention.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    kinds: tuple[AttentionKind, ...]
    ropes: tuple[RopeConfig, ...]
    tied: bool
    activation: Activation = "silu"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    output_gate: bool = False
    delta: DeltaConfig | None = None
    linear_layers: tuple[int, ...] = ()

    @property
    def attention_layers(self) -> list[int]:
        """The layers with keys and values."""
        return [layer for layer in range(self.num_layers) if layer not in self.linear_layers]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def norm(self, dtype: torch.dtype, size: int | None = None) -> RMSNorm:
        """A norm of hidden states, or of vectors of another size."""
        size = self.hidden_size if size is None else size
        return RMSNorm(size, eps=self.norm_eps, dtype=dtype, offset=self.norm_offset)


def dense_config(
    hf_config: Any,
    *,
    types: list[str] | None = None,
    kind: AttentionKind | None = None,
    ropes: dict[str, RopeConfig] | None = None,
    **switches: Any,
) -> DenseConfig:
    """Read the sizes from a Hugging Face config.

    Args:
        types: each layer's type; None: as the config says.
        kind: the attention of all layers, to which windows are added; None: scaled by the size of a head.
        ropes: rotary embedding by layer type; None: one for all, from the config.
        **switches: further fields of `DenseConfig`.

    Raises ConfigurationError: the config asks for what this decoder does not support.
    """
    activation = getattr(hf_config, "hidden_activation", None) or hf_config.hidden_act
    if activation not in ACTIVATIONS:
        raise ConfigurationError(
            f"hidden_act {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    num_layers, num_heads = hf_config.num_hidden_layers, hf_config.num_attention_heads
    num_kv_heads = getattr(hf_config, "num_key_value_heads", None)
    head_dim = getattr(hf_config, "head_dim", None)
    head_dim = head_dim if head_dim is not None else hf_config.hidden_size // num_heads
    types = layer_types(hf_config) if types is None else types
    # If all layers have experts the config may have only their size.
    intermediate_size = getattr(hf_config, "intermediate_size", None) or hf_config.moe_intermediate_size
    if ropes is None:
        ropes = dict.fromkeys((FULL, SLIDING), rope_config(hf_config))
    return DenseConfig(
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if num_kv_heads is not None else num_heads,
        head_dim=head_dim,
        norm_eps=hf_config.rms_norm_eps,
        kinds=attention_kinds(hf_config, types, kind if kind is not None else AttentionKind(head_dim**-0.5)),
        ropes=tuple(ropes[name] for name in types),
        tied=bool(hf_config.tie_word_embeddings),
        activation=ACTIVATIONS[activation],
        **switches,
    )


def attention_biases(hf_config: Any) -> dict[str, Any]:
    """The switches of `DenseConfig` for attention biases: all four projections have biases, or none has."""
    has_bias = bool(getattr(hf_config, "attention_bias", False))
    return {"qkv_bias": has_bias, "output_bias": has_bias}


def layer_types(hf_config: Any) -> list[str]:
    """Each layer's type. Raises ConfigurationError for a type that is not supported."""
    types = getattr(hf_config, "layer_types", None) or [FULL] * hf_config.num_hidden_layers
    if unknown := set(types) - {FULL, SLIDING}:
        raise ConfigurationError(
            f"layer type {min(unknown)!r} is not supported; supported are {FULL} and {SLIDING}"
        )
    return list(types)


def alike(hf_config: Any) -> list[str]:
    """Each layer's type, for configs whose `sliding_window` holds for all layers, or is null."""
    window = getattr(hf_config, "sliding_window", None)
    return [FULL if window is None else SLIDING] * hf_config.num_hidden_layers


def attention_kinds(hf_config: Any, types: list[str], everywhere: AttentionKind) -> tuple[AttentionKind, ...]:
    """Each layer's attention: `everywhere`, with the config's window in sliding layers."""
    window = getattr(hf_config, "sliding_window", None)
    if SLIDING in types and (not isinstance(window, int) or window < 1):
        raise ConfigurationError(f"{SLIDING} needs a sliding_window ≥ 1 in config.json, got {window!r}")
    sliding = everywhere._replace(window=window)
    return tuple(sliding if name == SLIDING else everywhere for name in types)


class Attention(nn.Module):
    """Grouped-query self-attention with one fused projection for queries, keys and values."""

    def __init__(self, config: DenseConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        number = config.attention_layers.index(layer)
        self._attention = LayerAttention(number, config.kinds[layer])
        self.head_dim, self.has_gate = config.head_dim, config.output_gate
        q_size = config.q_size * (2 if config.output_gate else 1)
        self.qkv_proj = Linear(
            config.hidden_size, q_size + 2 * config.kv_size, bias=config.qkv_bias, dtype=dtype
        )
        self.o_proj = Linear(config.q_size, config.hidden_size, bias=config.output_bias, dtype=dtype)
        self.q_norm = config.norm(dtype, self.head_dim) if config.qk_norm else None
        self.k_norm = config.norm(dtype, self.head_dim) if config.qk_norm else None
        self.sinks = Sinks(config.num_heads, dtype) if config.sinks else None

    def forward(self, x: NormedResidual, rope: Rope, step: Step) -> Addend:
        qkv_TO = self.qkv_proj(x, step)
        qkv_TNH = qkv_TO.view(len(qkv_TO), -1, self.head_dim)
        if not self.has_gate:
            heads_TNH = self.layer_attention(qkv_TNH, rope, self.head_norms(), step.attention)
            return self.o_proj.addend(heads_TNH.flatten(1), step)
        # The projection yields each query head followed by its gate.
        num_heads = self.o_proj.weight.shape[1] // self.head_dim
        q_TN2H = torch.unflatten(qkv_TNH[:, : 2 * num_heads], 1, (num_heads, 2))
        qkv_TNH = torch.cat([q_TN2H[:, :, 0], qkv_TNH[:, 2 * num_heads :]], dim=1)
        heads_TNH = self.layer_attention(qkv_TNH, rope, self.head_norms(), step.attention)
        return self.o_proj.addend(heads_TNH.mul(q_TN2H[:, :, 1].sigmoid()).flatten(1), step)

    # Both are made anew each time, since the weight store replaces parameters after construction.

    @property
    def layer_attention(self) -> LayerAttention:
        return self._attention if self.sinks is None else replace(self._attention, sinks=self.sinks.weight)

    def head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)


def mixer(config: DenseConfig, layer: int, dtype: torch.dtype) -> nn.Module:
    """Make the attention of a layer, linear or not."""
    if layer not in config.linear_layers:
        return Attention(config, layer, dtype)
    assert config.delta is not None
    return GatedDeltaNet(config.delta, config.hidden_size, config.linear_layers.index(layer), dtype)


class GatedMLP(nn.Module):
    """activation(gate(x)) · up(x), projected back; gate and up are one fused projection."""

    def __init__(self, config: DenseConfig, dtype: torch.dtype, inner: int | None = None) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.mlp_bias
        inner = config.intermediate_size if inner is None else inner
        self.activation = config.activation
        self.gate_up_proj = Linear(hidden, 2 * inner, bias=bias, dtype=dtype)
        self.down_proj = Linear(inner, hidden, bias=bias, dtype=dtype)

    def forward(self, x: Tensor | NormedResidual, step: Step) -> Addend:
        return self.down_proj.addend(self.gate_up_proj.gated(x, self.activation, step), step)


class Block(nn.Module):
    """One decoder layer with pre-normalisation. `mlp` and `attention`: None: those of the dense model."""

    def __init__(
        self,
        config: DenseConfig,
        dtype: torch.dtype,
        layer: int,
        mlp: nn.Module | None = None,
        attention: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.input_layernorm = config.norm(dtype)
        self.self_attn = mixer(config, layer, dtype) if attention is None else attention
        self.post_attention_layernorm = config.norm(dtype)
        self.mlp = GatedMLP(config, dtype) if mlp is None else mlp

    def forward(self, x: Residual, rope: Rope, step: Step, wanted_M: Tensor | None = None) -> None:
        """Add to the residual stream. `wanted_M`: the rows that are still needed after the attention."""
        x.add(self.self_attn(x.normed(self.input_layernorm), rope, step))
        x.keep(wanted_M)
        x.add(self.mlp(x.normed(self.post_attention_layernorm), step))


# Layer number → the layer, which is called as a `Block` is.
MakeBlock = Callable[[int], nn.Module]


class Decoder(nn.Module):
    """Embedding, layers and final norm."""

    def __init__(
        self, config: DenseConfig, dtype: torch.dtype, device: torch.device, make_block: MakeBlock
    ) -> None:
        super().__init__()
        self.embed_tokens = VocabEmbedding(config.vocab_size, config.hidden_size, dtype=dtype)
        # Rounded to the embeddings' dtype, as transformers does.
        self._scale = float(torch.tensor(config.embedding_scale, dtype=dtype))
        ropes = list(dict.fromkeys(config.ropes))
        self.rotary = nn.ModuleList(RotaryEmbedding(rope, config.head_dim, device) for rope in ropes)
        self._rotary_of = [ropes.index(rope) for rope in config.ropes]
        self.layers = nn.ModuleList(make_block(layer) for layer in range(config.num_layers))
        self.norm = config.norm(dtype)

    def forward(self, step: Step) -> Tensor:
        x_TD = self.embed_tokens.embed(step.input_ids_T)
        if self._scale != 1.0:
            x_TD *= self._scale
        ropes = [rotary(step.positions_T, x_TD.dtype) for rotary in self.rotary]
        x, last = Residual(x_TD), len(self.layers) - 1
        for number, layer in enumerate(self.layers):
            layer(x, ropes[self._rotary_of[number]], step, step.wanted_M if number == last else None)
        return x.normed(self.norm).tensor()


class DenseCausalLM(CausalLM):
    """A dense decoder with an output projection of its own, or tied to the embedding.

    Args:
        config: sizes and switches.
        dtype: of parameters and activations.
        device: of the buffers; parameters are on the meta device.
        make_block: layer number → the layer; None: `Block`s.

    Attributes:
        draft_prefix: the prefix of tensors of draft layers, which are ignored; None: there are none.
    """

    draft_prefix: str | None = None

    def __init__(
        self,
        config: DenseConfig,
        dtype: torch.dtype,
        device: torch.device,
        make_block: MakeBlock | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config, dtype, device, make_block or partial(Block, config, dtype))
        self.lm_head = (
            None if config.tied else VocabEmbedding(config.vocab_size, config.hidden_size, dtype=dtype)
        )

    def forward(self, step: Step) -> Tensor:
        hidden_MD: Tensor = self.model(step)
        return hidden_MD

    @property
    def attention_layers(self) -> list[LayerAttention]:
        layers = self.config.attention_layers
        return [LayerAttention(number, self.config.kinds[layer]) for number, layer in enumerate(layers)]

    @property
    def rotates_all(self) -> bool:
        return all(rope.share == 1.0 for rope in self.config.ropes)

    @property
    def cache_specs(self) -> Sequence[CacheSpec]:
        config, dtype = self.config, self.model.norm.weight.dtype
        return [
            config.delta.state(dtype)
            if layer in config.linear_layers and config.delta is not None
            else Paged(config.num_kv_heads, config.head_dim, config.kinds[layer].window)
            for layer in range(config.num_layers)
        ]

    def logits(self, hidden_TD: Tensor, kernels: Kernels) -> Tensor:
        return self._output_layer.logits(hidden_TD, kernels)

    def use_float32_logits(self) -> None:
        self._output_layer.has_float32_logits = True

    @property
    def _output_layer(self) -> VocabEmbedding:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def checkpoint_map(self) -> WeightMap:
        rows = outer_map(self.config)
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}."
            for name, target in self.layer_map(layer).items():
                rows[prefix + name] = replace(target, parameter=prefix + target.parameter)
        return rows

    def layer_map(self, layer: int) -> WeightMap:
        """Shard/fuse map of one layer, with names relative to it."""
        return dense_layer_map(self.config, layer=layer)

    def stored_as(self, name: str) -> str:
        return "model.embed_tokens.weight" if self.config.tied and name == "lm_head.weight" else name

    def ignored(self, name: str) -> bool:
        if self.draft_prefix is not None and name.startswith(self.draft_prefix):
            return True
        return name.endswith(".rotary_emb.inv_freq") or (self.config.tied and name == "lm_head.weight")


def outer_map(config: DenseConfig) -> WeightMap:
    """Shard/fuse map of everything outside the layers."""
    vocab, hidden = config.vocab_size, config.hidden_size
    tokens = Split(OUTPUTS, vocab, "vocab_size", Division.SPREAD)
    rows = stacked("model.embed_tokens.weight", {"model.embed_tokens.weight": vocab}, hidden, tokens)
    rows |= stacked("model.norm.weight", {"model.norm.weight": hidden})
    if not config.tied:
        rows |= stacked("lm_head.weight", {"lm_head.weight": vocab}, hidden, tokens)
    return rows


def dense_layer_map(
    config: DenseConfig, more_norms: tuple[str, ...] = (), layer: int | None = None
) -> WeightMap:
    """Shard/fuse map of one layer, with names relative to it.

    Args:
        more_norms: further norms of hidden states.
        layer: which one; None if all are alike.
    """
    hidden, parts = config.hidden_size, ["mlp.gate_proj", "mlp.up_proj"]
    rows = delta_map(config) if layer in config.linear_layers else attention_map(config)
    sizes = hidden, config.intermediate_size
    rows |= mlp_map("mlp", parts, "mlp.down_proj", *sizes, bias=config.mlp_bias)
    for name in ("input_layernorm", "post_attention_layernorm", *more_norms):
        rows |= stacked(f"{name}.weight", {f"{name}.weight": hidden})
    if config.sinks:
        by_heads = Split(0, config.num_heads, "num_attention_heads")
        name, shape = "self_attn.sinks", (config.num_heads,)
        rows[name] = WeightTarget(f"{name}.weight", 0, config.num_heads, shape, by_heads)
    return rows


def attention_map(config: DenseConfig) -> WeightMap:
    """Shard/fuse map of a layer's attention, which ranks divide by heads."""
    hidden, q, kv = config.hidden_size, config.q_size, config.kv_size
    q_rows = 2 * q if config.output_gate else q
    qkv = {"self_attn.q_proj": q_rows, "self_attn.k_proj": kv, "self_attn.v_proj": kv}
    heads = Split(OUTPUTS, config.num_heads, "num_attention_heads")
    kv_heads = Split(OUTPUTS, config.num_kv_heads, "num_key_value_heads", Division.SHARED)
    by_heads = heads, kv_heads, kv_heads
    rows = projection("self_attn.qkv_proj", qkv, hidden, bias=config.qkv_bias, split=by_heads)
    o, inputs = {"self_attn.o_proj": hidden}, replace(heads, dim=INPUTS)
    rows |= projection("self_attn.o_proj", o, q, bias=config.output_bias, split=inputs)
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight") if config.qk_norm else ():
        rows |= stacked(name, {name: config.head_dim})
    return rows


def delta_map(config: DenseConfig) -> WeightMap:
    """Shard/fuse map of a layer's linear attention, which ranks divide by key heads and their value heads."""
    delta, hidden, prefix = config.delta, config.hidden_size, "linear_attn."
    assert delta is not None
    k, v, heads = delta.k_size, delta.v_size, delta.num_v_heads
    by_head = Split(OUTPUTS, delta.num_k_heads, "linear_num_key_heads")
    by_kind = replace(by_head, runs=(k, k, v))
    if delta.interleaved:
        in_proj, rates = {"in_proj_qkvz": 2 * k + 2 * v}, {"in_proj_ba": 2 * heads}
    else:
        in_proj, rates = {"in_proj_qkv": 2 * k + v, "in_proj_z": v}, {"in_proj_b": heads, "in_proj_a": heads}
    parts = {prefix + name: size for name, size in in_proj.items()}
    splits = [by_kind if name == "in_proj_qkv" else by_head for name in in_proj]
    rows = projection("self_attn.in_proj", parts, hidden, split=splits)
    parts = {prefix + name: size for name, size in rates.items()}
    rows |= projection("self_attn.rates_proj", parts, hidden, split=by_head)
    out, inputs = {prefix + "out_proj": hidden}, replace(by_head, dim=INPUTS)
    rows |= projection("self_attn.out_proj", out, v, split=inputs)
    conv = (2 * k + v, 1, delta.conv_size)
    others = {
        "conv1d.weight": WeightTarget("self_attn.conv_weight", 0, conv[0], conv, by_kind),
        "A_log": WeightTarget("self_attn.decay_log", 0, heads, (heads,), by_head),
        "dt_bias": WeightTarget("self_attn.rate_bias", 0, heads, (heads,), by_head),
        "norm.weight": WeightTarget("self_attn.norm_weight", 0, delta.v_dim, (delta.v_dim,)),
    }
    return rows | {prefix + name: target for name, target in others.items()}
