"""Any causal language model of transformers, with attention and products of ours.

Transformers' code runs unchanged. Its attention interface calls our `LayerAttention`, which uses the paged
cache, and our `Linear` replaces each of torch's. Nothing is fused, so parameters have their names in
checkpoints. One trial pass on tensors without data finds out how the code calls attention. What we do not
support is refused then, by name, instead of being computed wrongly.

Shapes: T tokens, N query heads, K KV heads, H head_dim, D hidden, M rows that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.attention.base import LayerAttention
from ebbtide.srt.layers.heads import AttentionKind, Rope
from ebbtide.srt.layers.linear import Inputs, Linear, VocabEmbedding
from ebbtide.srt.layers.step import Kernels, Step
from ebbtide.srt.mem_cache import CacheSpec, Paged
from ebbtide.srt.models.base import CausalLM, WeightMap, WeightTarget

# Names of our attention in transformers' interface. Only the second, for trials, makes transformers build
# masks.
_SERVED, _TRIED = "ebbtide", "ebbtide_trial"
_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Rotary embeddings whose frequencies depend on the longest position of a pass, which the host reads.
_CHANGING_ROPES = {"dynamic", "longrope"}
_TRIAL_TOKENS = 3
_MANY_ROWS = 256  # so many that none of our own kernels is used
# Arguments of attention, besides queries, keys, values and mask, that may be ignored: they repeat what comes
# in another way, or are meant for other implementations.
_UNUSED = {
    "cache",
    "cache_position",
    "cu_seq_lens_k",
    "cu_seq_lens_q",
    "dropout",
    "layer_idx",
    "max_length_k",
    "max_length_q",
    "past_key_value",
    "past_key_values",
    "position_embeddings",
    "position_ids",
    "training",
    "use_cache",
}


# The mask function of transformers: (batch, head, query, key), all scalars → whether the query sees the key.
_Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _Pass(Protocol):
    """A forward pass, as our attention function reaches it."""

    def attend(
        self, module: Any, q_1NTH: Tensor, k_1KTH: Tensor, v_1KTH: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        """The output [1, T, N, H] of one layer. `options`: all other arguments of attention."""
        ...


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls for every layer."""
    ours: _Pass | None = options.pop("ebbtide_pass", None)
    if ours is None:
        raise ConfigurationError(f"{type(module).__name__} does not hand on what it is called with")
    return ours.attend(module, query, key, value, attention_mask, options), None


@dataclass(frozen=True, slots=True)
class _Served:
    """A real pass of the engine."""

    step: Step
    rope: Rope
    kinds: tuple[AttentionKind, ...]

    def attend(
        self, module: Any, q_1NTH: Tensor, k_1KTH: Tensor, v_1KTH: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        heads = (q_1NTH[0].transpose(0, 1), k_1KTH[0].transpose(0, 1), v_1KTH[0].transpose(0, 1))
        layer = LayerAttention(module.layer_idx, self.kinds[module.layer_idx], options.get("s_aux"))
        return layer(torch.cat(heads, dim=1), self.rope, None, self.step.attention).unsqueeze(0)


@dataclass(frozen=True)
class _Called:
    """How a layer called its attention."""

    kind: AttentionKind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_sinks: bool


@dataclass
class _Trial:
    """A pass without data that records how each layer calls attention.

    Attributes:
        masks: (mask, its window, its mask function) of each mask that transformers built.
        called: by layer.
    """

    masks: list[tuple[Tensor, int | None, _Sees]] = field(default_factory=list)
    called: dict[int, _Called] = field(default_factory=dict)

    def mask(self, *_: Any, mask_function: _Sees, local_size: int | None = None, **options: Any) -> Tensor:
        """Record a mask; transformers calls this in order to build one."""
        made = torch.empty(1, 1, _TRIAL_TOKENS, _TRIAL_TOKENS)
        self.masks.append((made, local_size, mask_function))
        return made

    def attend(
        self, module: Any, q_1NTH: Tensor, k_1KTH: Tensor, v_1KTH: Tensor, mask: Any, options: dict[str, Any]
    ) -> Tensor:
        name, layer = type(module).__name__, getattr(module, "layer_idx", None)
        if not isinstance(layer, int) or layer in self.called:
            raise ConfigurationError(f"{name} attends more than once, or is of no layer")
        if getattr(module, "is_causal", True) is False or options.pop("is_causal", True) is False:
            raise ConfigurationError(f"{name} attends to tokens that come later")
        (_, num_heads, num_tokens, head_dim), (_, num_kv_heads, num_keys, _) = q_1NTH.shape, k_1KTH.shape
        if num_keys != num_tokens or k_1KTH.shape != v_1KTH.shape or k_1KTH.shape[3] != head_dim:
            raise ConfigurationError(
                f"{name}: keys {tuple(k_1KTH.shape)} and values {tuple(v_1KTH.shape)} are not alike, or not "
                f"of the tokens and the size of the queries, {tuple(q_1NTH.shape)}"
            )
        scaling, softcap = options.pop("scaling", None), options.pop("softcap", None)
        sinks, window = options.pop("s_aux", None), options.pop("sliding_window", None)
        kind = AttentionKind(
            head_dim**-0.5 if scaling is None else float(scaling), self._window(name, mask, window), softcap
        )
        given = {key for key, value in options.items() if value is not None and value is not False}
        if unknown := given - _UNUSED:
            raise ConfigurationError(f"{name} attends with {min(unknown)}, which is not supported")
        self.called[layer] = _Called(kind, num_heads, num_kv_heads, head_dim, sinks is not None)
        return q_1NTH.transpose(1, 2).contiguous()

    def _window(self, name: str, mask: Any, given: int | None) -> int | None:
        windows = [window for made, window, _ in self.masks if made is mask]
        if not windows:
            raise ConfigurationError(f"{name} has a mask of its own")
        if given not in (None, windows[0]):
            raise ConfigurationError(f"{name} has a window of {given}, and its mask one of {windows[0]}")
        return windows[0]


class _Projection(Linear):
    """A `Linear` that is called like torch's."""

    is_quantizable = may_be_adapted = False

    def __init__(self, theirs: nn.Linear, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(theirs.in_features, theirs.out_features, bias=theirs.bias is not None, dtype=dtype)
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out_TO = self.project(Inputs(x.flatten(0, -2).contiguous()), self.bias, self._kernels)
        return out_TO.view(*x.shape[:-1], -1)


class _Embedding(VocabEmbedding):
    """A `VocabEmbedding` that is called like torch's `Embedding`."""

    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.embed(input_ids)


class _Output(nn.Module):
    """Replaces the output layer; its weight may be the embedding's."""

    def __init__(self, weight: VocabEmbedding, bias: nn.Parameter | None, kernels: Kernels) -> None:
        super().__init__()
        self._weight, self._kernels = [weight], kernels  # in a list: it is already a parameter elsewhere
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        logits_TV = self._weight[0].logits(x.flatten(0, -2), self._kernels)
        if self.bias is not None:
            logits_TV = logits_TV + self.bias
        return logits_TV.view(*x.shape[:-1], -1)

    def use_float32(self) -> None:
        self._weight[0].has_float32_logits = True


class _Given(nn.Module):
    """Replaces the decoder inside the outer model, in order to compute only what comes after the decoder."""

    def forward(
        self, *_: Any, inputs_embeds: Tensor, **options: Any
    ) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


class TransformersCausalLM(CausalLM):
    """A model that runs transformers' code.

    Raises ConfigurationError: the model cannot be served; the error says why.
    """

    is_native = False

    def __init__(self, architecture: str, hf_config: Any, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        kernels = Kernels.for_(device, dtype)
        try:
            config, their_class = _config(hf_config), _class(architecture, hf_config)
            called = _tried(their_class, config, dtype)
            with _parameters_on_meta():
                theirs = their_class._from_config(config, dtype=dtype, attn_implementation=_SERVED).eval()
            self._output_name, self.output_weight = _replace_ends(theirs, kernels, dtype)
        except ConfigurationError as error:
            raise ConfigurationError(f"model_impl=transformers: {architecture}: {error}") from error
        for name, module in list(theirs.named_modules()):
            if type(module) is nn.Linear:
                theirs.set_submodule(name, _Projection(module, dtype, kernels))
        self._prefix: str = theirs.base_model_prefix
        self.decoder: Any = getattr(theirs, self._prefix)
        setattr(theirs, self._prefix, _Given())
        self.behind: Any = theirs
        self._called, self._dtype, self._device = called, dtype, device
        self._kinds = tuple(layer.kind for layer in called)
        _move_others(self, device)
        self._try_behind(config.hidden_size)

    def forward(self, step: Step) -> Tensor:
        num_tokens, head_dim = len(step.input_ids_T), self._called[0].head_dim
        # Transformers has already rotated queries and keys, so these rotate by an angle of 0.
        cos = torch.ones((num_tokens, 1, head_dim), dtype=self._dtype, device=self._device)
        sin = torch.zeros((num_tokens, 1, head_dim // 2), dtype=self._dtype, device=self._device)
        hidden_1TD: Tensor = self.decoder(
            input_ids=step.input_ids_T.unsqueeze(0),
            position_ids=step.positions_T.unsqueeze(0),
            use_cache=False,
            ebbtide_pass=_Served(step, Rope(cos, sin), self._kinds),
        )[0]
        return hidden_1TD[0] if step.wanted_M is None else hidden_1TD[0, step.wanted_M]

    @property
    def attention_layers(self) -> list[LayerAttention]:
        some = torch.empty(0)
        return [
            LayerAttention(layer, each.kind, some if each.has_sinks else None)
            for layer, each in enumerate(self._called)
        ]

    @property
    def cache_specs(self) -> list[CacheSpec]:
        return [Paged(each.num_kv_heads, each.head_dim, each.kind.window) for each in self._called]

    def logits(self, hidden_TD: Tensor, kernels: Kernels) -> Tensor:
        logits_1TV: Tensor = self.behind(inputs_embeds=hidden_TD.unsqueeze(0), use_cache=False).logits
        return logits_1TV[0]

    def _try_behind(self, hidden_size: int) -> None:
        """Raises ConfigurationError if computing logits needs more than hidden states."""
        try:
            self.logits(torch.empty((_MANY_ROWS, hidden_size), dtype=self._dtype, device="meta"), Kernels())
        except Exception as error:  # unknown code may raise anything
            raise ConfigurationError(
                f"model_impl=transformers: logits cannot be computed: {error}"
            ) from error

    def use_float32_logits(self) -> None:
        output: Any = self.behind.get_output_embeddings()
        output.use_float32()

    def checkpoint_map(self) -> WeightMap:
        rows: WeightMap = {}
        for parameter, value in self.named_parameters():
            shape = tuple(value.shape)
            rows[self._name_of(parameter)] = WeightTarget(parameter, 0, shape[0], shape)
        return rows

    def _name_of(self, parameter: str) -> str:
        """The checkpoint name of a parameter."""
        part, _, rest = parameter.partition(".")
        before = {"decoder": f"{self._prefix}.", "output_weight": f"{self._output_name}."}
        return before.get(part, "") + rest

    def stored_as(self, name: str) -> str:
        if not self._is_tied(name):
            return name
        embedding = self.decoder.get_input_embeddings()
        path = next(path for path, module in self.decoder.named_modules() if module is embedding)
        return f"{self._prefix}.{path}.weight"

    def ignored(self, name: str) -> bool:
        return name.endswith(".rotary_emb.inv_freq") or self._is_tied(name)

    def _is_tied(self, name: str) -> bool:
        return self.output_weight is None and name == f"{self._output_name}.weight"


def _config(hf_config: Any) -> PreTrainedConfig:
    """Convert to transformers' config. Raises ConfigurationError for what we do not support."""
    fields = hf_config.to_dict() if isinstance(hf_config, PreTrainedConfig) else vars(hf_config)
    if (kind := fields.get("model_type")) not in CONFIG_MAPPING:
        raise ConfigurationError(f"model_type {kind!r} is not one of transformers'")
    if fields.get("layer_types") and (unknown := set(fields["layer_types"]) - _LAYER_TYPES):
        raise ConfigurationError(f"layer type {min(unknown)!r} is not supported")
    for name in ("is_encoder_decoder", "add_cross_attention", "attention_chunk_size", "num_kv_shared_layers"):
        if fields.get(name):
            raise ConfigurationError(f"{name} {fields[name]!r} is not supported")
    ropes = fields.get("rope_parameters") or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if str(rope.get("rope_type")) in _CHANGING_ROPES:
            raise ConfigurationError(f"rope type {rope['rope_type']!r} is not supported")
    if any(getattr(each, "operations", None) for each in get_checkpoint_conversion_mapping(kind) or ()):
        raise ConfigurationError("its checkpoints are converted when transformers loads them")
    config: PreTrainedConfig = CONFIG_MAPPING[kind].from_dict(dict(fields))
    return config


def _class(architecture: str, hf_config: Any) -> Any:
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(CONFIG_MAPPING[hf_config.model_type], None)
    if found is None or found.__name__ != architecture:
        raise ConfigurationError("transformers has no causal language model of this name")
    if "position_ids" not in signature(found.forward).parameters:
        raise ConfigurationError("it takes no position_ids")
    return found


def _tried(their_class: Any, config: PreTrainedConfig, dtype: torch.dtype) -> list[_Called]:
    """Find out how each layer calls attention, by a pass on tensors without data."""
    trial = _Trial()
    AttentionMaskInterface.register(_TRIED, trial.mask)
    for name in (_SERVED, _TRIED):
        AttentionInterface.register(name, _attention)
    try:
        with FakeTensorMode(), torch.inference_mode():
            theirs = their_class._from_config(
                deepcopy(config), dtype=dtype, attn_implementation=_TRIED
            ).eval()
            positions = torch.arange(_TRIAL_TOKENS).unsqueeze(0)
            theirs(
                input_ids=torch.zeros_like(positions),
                position_ids=positions,
                attention_mask=torch.ones_like(positions),
                use_cache=False,
                ebbtide_pass=trial,
            )
    except ConfigurationError:
        raise
    except Exception as error:  # unknown code may raise anything
        raise ConfigurationError(f"its code does not run: {type(error).__name__}: {error}") from error
    if not all(_is_causal(sees, window) for _, window, sees in trial.masks):
        raise ConfigurationError("its masks are others than causal ones with and without windows")
    if missing := set(range(config.num_hidden_layers)) - trial.called.keys():
        raise ConfigurationError(f"layer {min(missing)} has no attention by transformers' interface")
    called = [trial.called[layer] for layer in range(config.num_hidden_layers)]
    heads = {(each.num_heads, each.num_kv_heads, each.head_dim) for each in called}
    if len(heads) > 1 or called[0].num_heads != config.num_attention_heads:
        raise ConfigurationError(f"its layers have other heads than its config says: {sorted(heads)}")
    return called


def _is_causal(sees: _Sees, window: int | None) -> bool:
    """Whether a mask shows each token itself and all before it, or the last `window` of these."""
    query = (window or 1) + 2
    first = 0 if window is None else query - window + 1
    expected = {query + 1: False, query: True, first: True} | ({first - 1: False} if first else {})
    some, at = torch.tensor(0), torch.tensor
    return all(bool(sees(some, some, at(query), at(key))) == seen for key, seen in expected.items())


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Build modules whose buffers have data and whose parameters have none."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _replace_ends(theirs: Any, kernels: Kernels, dtype: torch.dtype) -> tuple[str, VocabEmbedding | None]:
    """Replace the output layer, and a tied embedding, by ours.

    Returns:
        The output layer's name, and its weight; None: it is the embedding's.
    """
    output, embedding = theirs.get_output_embeddings(), theirs.get_input_embeddings()
    if type(output) is not nn.Linear:
        raise ConfigurationError(f"an output layer of {type(output).__name__} is not supported")
    name = next(name for name, module in theirs.named_modules() if module is output)
    is_tied = bool(theirs.config.tie_word_embeddings)
    if is_tied:
        if type(embedding) is not nn.Embedding:
            raise ConfigurationError(f"a tied embedding of {type(embedding).__name__} is not supported")
        weight: VocabEmbedding = _Embedding(*embedding.weight.shape, dtype=dtype)
        theirs.set_input_embeddings(weight)
    else:
        weight = VocabEmbedding(*output.weight.shape, dtype=dtype)
    theirs.set_output_embeddings(_Output(weight, output.bias, kernels))
    return name, None if is_tied else weight


def _move_others(model: nn.Module, device: torch.device) -> None:
    """Move everything but parameters to the device."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, value.to(device))
