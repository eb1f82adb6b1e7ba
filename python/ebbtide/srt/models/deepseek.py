"""DeepSeek-V2 and V3, and models of the same parts: R1, Kimi-K2, Moonlight, GLM-4.5 to 4.7.

In latent attention (MLA) all heads share one latent of a token, and only this is cached. A head's key and
value would be products of the latent. Instead its query is multiplied by the matrix for keys, and the
weighted sum of latents by the matrix for values. Source: DeepSeek-V2, https://arxiv.org/abs/2405.04434.

Shapes: T tokens, N heads, C size of a latent, R rotated numbers of a head, V size of a value, O outputs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import LayerAttention
from ebbtide.srt.layers.heads import AttentionKind, MoeConfig, Rope
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.norm import Addend, NormedResidual, Residual, RMSNorm
from ebbtide.srt.layers.rotary import rope_config, yarn_growth
from ebbtide.srt.layers.step import Step
from ebbtide.srt.mem_cache import Latent
from ebbtide.srt.models.base import INPUTS, OUTPUTS, Split, WeightMap, projection, stacked
from ebbtide.srt.models.dense import DenseConfig, dense_config
from ebbtide.srt.models.moe import ExpertNames, MoeCausalLM, is_behind_layers

# The epsilon of the norms inside attention, which configs do not state.
_EPS = 1e-6


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention.

    Attributes:
        num_heads: of all ranks.
        query_rank: size of the vector that queries are projected from; None: they are projected from hidden
            states.
        latent: what is cached of a token.
        key_dim: numbers of a key that are not rotated.
        value_dim: numbers of a value.
        is_interleaved: whether rotated pairs are (2i, 2i + 1), instead of (i, i + R / 2).
    """

    num_heads: int
    query_rank: int | None
    latent: Latent
    key_dim: int
    value_dim: int
    is_interleaved: bool

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.latent.rope


def latent_sizes(hf_config: Any) -> LatentSizes:
    """Read the sizes of latent attention from a Hugging Face config.

    Raises ConfigurationError for biases, which no published model has.
    """
    if getattr(hf_config, "attention_bias", False):
        raise ConfigurationError("attention_bias is not supported with latent attention")
    return LatentSizes(
        num_heads=hf_config.num_attention_heads,
        query_rank=hf_config.q_lora_rank,
        latent=Latent(hf_config.kv_lora_rank, hf_config.qk_rope_head_dim),
        key_dim=hf_config.qk_nope_head_dim,
        value_dim=hf_config.v_head_dim,
        is_interleaved=bool(getattr(hf_config, "rope_interleave", True)),
    )


def latent_config(hf_config: Any, sizes: LatentSizes) -> DenseConfig:
    """Read all other sizes. `head_dim` is only the rotated part of a head.

    Raises ConfigurationError: only a share of that part is rotated.
    """
    scale = sizes.query_dim**-0.5
    rope = rope_config(hf_config)
    if rope.share != 1.0:
        raise ConfigurationError(
            f"partial_rotary_factor {rope.share} is not supported with latent attention; expected 1"
        )
    if rope.kind != "default":
        settings = getattr(hf_config, "rope_parameters", None) or hf_config.rope_scaling
        scale *= yarn_growth(rope.factor, settings.get("mscale_all_dim") or 0.0) ** 2
    config = dense_config(hf_config, kind=AttentionKind(scale))
    return replace(config, head_dim=sizes.latent.rope)


class LatentAttention(nn.Module):
    """Latent attention: queries and outputs of heads are in the space of latents.

    Attributes:
        qkv_a_proj: yields the query vector (or the queries), then the latent and its rotated part.
        kv_b_proj: each head's matrix for keys, then that for values; both multiply latents.
    """

    def __init__(self, config: DenseConfig, sizes: LatentSizes, dtype: torch.dtype, layer: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.attention = LayerAttention(layer, config.kinds[layer])
        rank, num_heads = sizes.latent.rank, sizes.num_heads
        linear = partial(Linear, bias=False, dtype=dtype)
        num_queries = num_heads * sizes.query_dim
        width = num_queries if sizes.query_rank is None else sizes.query_rank
        self.qkv_a_proj = linear(config.hidden_size, width + rank + sizes.latent.rope)
        # The rows of a latent and its rotated part, usually 576, do not fill whole blocks of 128.
        self.qkv_a_proj.may_be_ragged = True
        self.q_a_layernorm = self.q_b_proj = None
        if sizes.query_rank is not None:
            self.q_a_layernorm = RMSNorm(sizes.query_rank, eps=_EPS, dtype=dtype)
            self.q_b_proj = linear(sizes.query_rank, num_queries)
        self.kv_a_layernorm = RMSNorm(rank, eps=_EPS, dtype=dtype)
        self.kv_b_proj = linear(rank, num_heads * (sizes.key_dim + sizes.value_dim))
        self.kv_b_proj.may_be_adapted = False
        self.o_proj = linear(num_heads * sizes.value_dim, config.hidden_size)

    def forward(self, x: NormedResidual, rope: Rope, step: Step) -> Addend:
        rank, num_rotated, key_dim = self.sizes.latent.rank, self.sizes.latent.rope, self.sizes.key_dim
        a_TO = self.qkv_a_proj(x, step)
        q_TO, latents_TH = a_TO[:, : -rank - num_rotated], a_TO[:, -rank - num_rotated :]
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            # Rows are contiguous only for one token. Then the product computes the norm itself.
            is_one = q_TO.is_contiguous()
            normed = Residual(q_TO).normed(self.q_a_layernorm) if is_one else self.q_a_layernorm(q_TO)
            q_TO = self.q_b_proj(normed, step)
        up_NOC = self.kv_b_proj.wide_weight(a_TO.dtype).view(-1, key_dim + self.sizes.value_dim, rank)
        num_heads = len(up_NOC)
        q_TNO = q_TO.view(len(q_TO), num_heads, -1)
        heads_TNH = q_TO.new_empty(len(q_TO), num_heads + 1, num_rotated + rank)
        self._fill(heads_TNH, q_TNO, latents_TH)
        multiply_heads(q_TNO[..., :key_dim], up_NOC[:, :key_dim], heads_TNH[:, :-1, num_rotated:])
        read_TNC = self.attention(heads_TNH, rope, None, step.attention)
        values_TNV = q_TO.new_empty(len(q_TO), num_heads, self.sizes.value_dim)
        multiply_heads(read_TNC, up_NOC[:, key_dim:].transpose(1, 2), values_TNV)
        return self.o_proj.addend(values_TNV.flatten(1), step)

    def _fill(self, heads_TNH: Tensor, q_TNO: Tensor, latents_TH: Tensor) -> None:
        """Write rotated parts of queries and latents first in each head, normalised latents after them."""
        norm, rank, num_rotated = self.kv_a_layernorm, self.sizes.latent.rank, self.sizes.latent.rope
        if heads_TNH.is_cuda:
            from ebbtide.srt.layers.kernels.latent import fill_heads

            is_interleaved = self.sizes.is_interleaved
            fill_heads(q_TNO, latents_TH, norm.weight, norm.eps, heads_TNH, is_interleaved=is_interleaved)
            return
        heads_TNH[:, :-1, :num_rotated] = self._halves(q_TNO[..., self.sizes.key_dim :])
        heads_TNH[:, -1, :num_rotated] = self._halves(latents_TH[:, rank:])
        heads_TNH[:, -1, num_rotated:] = norm(latents_TH[:, :rank])

    def _halves(self, x: Tensor) -> Tensor:
        """Reorder interleaved pairs: the first numbers of all pairs, then the second ones."""
        if not self.sizes.is_interleaved:
            return x
        return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)


def multiply_heads(x_TNK: Tensor, weight_NKM: Tensor, out_TNM: Tensor) -> None:
    """Multiply each head's x by its own matrix."""
    torch.bmm(x_TNK.transpose(0, 1), weight_NKM, out=out_TNM.transpose(0, 1))


class LatentMoeCausalLM(MoeCausalLM):
    """A decoder with latent attention, and experts in `sparse_layers`."""

    def __init__(
        self,
        hf_config: Any,
        moe: MoeConfig,
        sparse_layers: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sizes = latent_sizes(hf_config)
        config = latent_config(hf_config, sizes)
        make_attention = partial(LatentAttention, config, sizes, dtype)
        super().__init__(config, moe, ExpertNames(), sparse_layers, dtype, device, make_attention)
        self.sizes = sizes

    @property
    def rotates_all(self) -> bool:
        return False

    @property
    def cache_specs(self) -> Sequence[Latent]:
        return [self.sizes.latent] * self.config.num_layers

    def layer_map(self, layer: int) -> WeightMap:
        rows = super().layer_map(layer)
        others = {name: target for name, target in rows.items() if not name.startswith("self_attn.")}
        return others | latent_map(self.config.hidden_size, self.sizes)

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or is_behind_layers(name, self.config.num_layers)


def latent_map(hidden_size: int, sizes: LatentSizes) -> WeightMap:
    """Shard/fuse map of one layer's attention, with names relative to it. Ranks divide only heads."""
    rank, width = sizes.latent.rank, sizes.latent.rank + sizes.latent.rope
    num_queries = sizes.num_heads * sizes.query_dim
    prefix = "self_attn."
    kv_a, kv_b, o = (prefix + name for name in ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj"))
    heads = Split(OUTPUTS, sizes.num_heads, "num_attention_heads")
    if sizes.query_rank is None:
        parts = {prefix + "q_proj": num_queries, kv_a: width}
        rows = projection(prefix + "qkv_a_proj", parts, hidden_size, split=(heads, None))
    else:
        q_a, q_b, norm = (prefix + name for name in ("q_a_proj", "q_b_proj", "q_a_layernorm.weight"))
        rows = projection(prefix + "qkv_a_proj", {q_a: sizes.query_rank, kv_a: width}, hidden_size)
        rows |= projection(q_b, {q_b: num_queries}, sizes.query_rank, split=heads)
        rows |= stacked(norm, {norm: sizes.query_rank})
    norm = prefix + "kv_a_layernorm.weight"
    rows |= stacked(norm, {norm: rank})
    num_rows = sizes.num_heads * (sizes.key_dim + sizes.value_dim)
    rows |= projection(kv_b, {kv_b: num_rows}, rank, split=heads)
    num_columns, inputs = sizes.num_heads * sizes.value_dim, replace(heads, dim=INPUTS)
    return rows | projection(o, {o: hidden_size}, num_columns, split=inputs)


class DeepseekV2ForCausalLM(LatentMoeCausalLM):
    """Experts chosen by softmax. V2 chooses only within the best groups, those with the best experts."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        method = require(hf_config, "topk_method", "greedy", "group_limited_greedy")
        require(hf_config, "scoring_func", "softmax")
        require(hf_config, "norm_topk_prob", False)
        moe = grouped_moe(hf_config, renormalize=False, num_group_scores=1, has_wide_router=True)
        if method == "greedy":
            moe = replace(moe, num_groups=1, num_kept_groups=1)
        super().__init__(hf_config, moe, layers_after_dense(hf_config), dtype, device)


class DeepseekV3ForCausalLM(LatentMoeCausalLM):
    """Experts chosen by sigmoid scores plus a bias."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hf_config, sigmoid_experts(hf_config), layers_after_dense(hf_config), dtype, device)


class Glm4MoeForCausalLM(MoeCausalLM):
    """Only a part of each head is rotated. After the first layers, experts are chosen as in DeepSeek-V3."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        config = dense_config(
            hf_config, qkv_bias=bool(hf_config.attention_bias), qk_norm=bool(hf_config.use_qk_norm)
        )
        layers = range(hf_config.first_k_dense_replace, config.num_layers)
        super().__init__(config, sigmoid_experts(hf_config), ExpertNames(), layers, dtype, device)

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or is_behind_layers(name, self.config.num_layers)


class Glm4MoeLiteForCausalLM(LatentMoeCausalLM):
    """DeepSeek-V3's layers; the config says of each layer whether it has experts."""

    def __init__(self, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        types = hf_config.mlp_layer_types
        if unknown := set(types) - {"dense", "sparse"}:
            raise ConfigurationError(
                f"mlp_layer_types {min(unknown)!r} is not supported; supported are dense and sparse"
            )
        sparse = [layer for layer, name in enumerate(types) if name == "sparse"]
        super().__init__(hf_config, sigmoid_experts(hf_config), sparse, dtype, device)


def sigmoid_experts(hf_config: Any) -> MoeConfig:
    """Experts chosen by sigmoid scores plus a bias, within the best groups.

    Raises ConfigurationError: the config chooses them otherwise.
    """
    require(hf_config, "topk_method", "noaux_tc")
    require(hf_config, "scoring_func", "sigmoid")
    renormalize = bool(hf_config.norm_topk_prob)
    return grouped_moe(hf_config, renormalize=renormalize, scoring="sigmoid", has_bias=True)


def grouped_moe(hf_config: Any, **fields: Any) -> MoeConfig:
    """Experts in groups, with shared experts. `fields`: further ones of `MoeConfig`."""
    return MoeConfig(
        num_experts=hf_config.n_routed_experts,
        num_experts_per_token=hf_config.num_experts_per_tok or 0,
        inner_size=hf_config.moe_intermediate_size,
        num_groups=hf_config.n_group or 1,
        num_kept_groups=hf_config.topk_group or 1,
        scale=hf_config.routed_scaling_factor,
        shared_size=hf_config.moe_intermediate_size * (hf_config.n_shared_experts or 0),
        **fields,
    )


def layers_after_dense(hf_config: Any) -> range:
    """The layers after the first dense ones.

    Raises ConfigurationError: not all of these have experts.
    """
    require(hf_config, "moe_layer_freq", 1)
    return range(hf_config.first_k_dense_replace or 0, hf_config.num_hidden_layers)


def require(hf_config: Any, field: str, *supported: Any) -> Any:
    """The field's value; the first of the supported ones if the config has none.

    Raises ConfigurationError for any other value.
    """
    value = getattr(hf_config, field, None)
    if value is None:
        return supported[0]
    if value not in supported:
        expected = " or ".join(map(repr, supported))
        raise ConfigurationError(f"{field} {value!r} is not supported; expected {expected}")
    return value
