"""The interface of a model: what the engine asks of it, and how it maps checkpoint tensors to parameters.

Shapes: T tokens, D hidden, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ebbtide.srt.distributed import Division
from ebbtide.srt.layers.attention.base import LayerAttention
from ebbtide.srt.layers.step import Kernels, Step
from ebbtide.srt.mem_cache import CacheSpec

# Dimensions of a projection's weight [outputs, inputs] in a checkpoint.
OUTPUTS, INPUTS = 0, 1


@dataclass(frozen=True)
class Split:
    """How tensor-parallel ranks divide a checkpoint's tensor.

    Attributes:
        dim: the dimension that is divided.
        units: how many pieces along it must stay whole, e.g. heads.
        what: how config.json calls the number of units.
        runs: the lengths of parts along it that are divided separately, e.g. queries, keys and values in one
            tensor; empty: the tensor is one part.
    """

    dim: int
    units: int
    what: str
    division: Division = Division.EQUAL
    runs: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightTarget:
    """Where a checkpoint's tensor is in the engine's parameters.

    Attributes:
        parameter: the name of the engine's parameter.
        start, length: its range of rows; fused tensors follow each other along the first dimension.
        shape: of the whole tensor in the checkpoint. If it has one dimension more than the parameter, the
            parameter merges its first two.
        split: None: every rank holds the whole tensor.
    """

    parameter: str
    start: int
    length: int
    shape: tuple[int, ...]
    split: Split | None = None


WeightMap = dict[str, WeightTarget]


# One for all parts of a parameter, or one for each in their order.
Splits = Split | Sequence[Split | None] | None


def stacked(
    parameter: str, parts: Mapping[str, int], num_columns: int | None = None, split: Splits = None
) -> WeightMap:
    """Rows of a shard/fuse map for tensors that follow each other in one parameter.

    Args:
        parts: checkpoint name → number of rows, in the parameter's order.
        num_columns: row length; None for vectors (biases, norms).
        split: how ranks divide them. A split along inputs does not divide vectors, which have no inputs:
            every rank then holds the whole bias, and one rank adds it.
    """
    rows, start = {}, 0
    splits = split if isinstance(split, Sequence) else [split] * len(parts)
    for (name, length), own in zip(parts.items(), splits, strict=True):
        shape = (length,) if num_columns is None else (length, num_columns)
        is_divided = own is not None and own.dim < len(shape)
        rows[name] = WeightTarget(parameter, start, length, shape, own if is_divided else None)
        start += length
    return rows


def projection(
    module: str, parts: Mapping[str, int], num_columns: int, *, bias: bool = False, split: Splits = None
) -> WeightMap:
    """Rows of a shard/fuse map for one `Linear`. `parts`: checkpoint modules and their output sizes."""
    rows: WeightMap = {}
    for name, columns in (("weight", num_columns), ("bias", None)) if bias else (("weight", num_columns),):
        sizes = {f"{part}.{name}": size for part, size in parts.items()}
        rows |= stacked(f"{module}.{name}", sizes, columns, split)
    return rows


def mlp_map(
    module: str,
    parts: Sequence[str],
    down: str,
    hidden_size: int,
    inner: int,
    *,
    what: str = "intermediate_size",
    bias: bool = False,
) -> WeightMap:
    """Shard/fuse map of an MLP. `parts`: checkpoint modules of its first product, gate and up or up alone.

    `what`: how config.json calls the inner size.
    """
    outputs, inputs = Split(OUTPUTS, inner, what), Split(INPUTS, inner, what)
    first = f"{module}.gate_up_proj" if len(parts) > 1 else f"{module}.up_proj"
    rows = projection(first, dict.fromkeys(parts, inner), hidden_size, bias=bias, split=outputs)
    return rows | projection(f"{module}.down_proj", {down: hidden_size}, inner, bias=bias, split=inputs)


@dataclass(frozen=True)
class RoutedLayers:
    """The layers of a model that route tokens to experts.

    Attributes:
        num_layers: of the whole model.
        sparse_layers: the layers with experts.
        num_experts: of each such layer.
        per_token: experts that each token takes there.
    """

    num_layers: int
    sparse_layers: Sequence[int]
    num_experts: int
    per_token: int


class CausalLM(nn.Module, ABC):
    """A decoder. Its parameters are created on the meta device; the weight store gives them memory.

    Attributes:
        is_native: whether it is made of our layers, as tensor parallelism, quantization and adapters require.
        routed: None: no layer has experts.
    """

    is_native = True
    routed: RoutedLayers | None = None

    @abstractmethod
    def forward(self, step: Step) -> Tensor:
        """Final hidden states [T, D], or [M, D] of the rows that `step.wanted_M` names."""

    @property
    @abstractmethod
    def attention_layers(self) -> list[LayerAttention]:
        """The attention of every layer that has one, which the backend prepares for."""

    @property
    def rotates_all(self) -> bool:
        """Whether the whole query and key heads are rotated by position, not only a part of each."""
        return True

    @property
    @abstractmethod
    def cache_specs(self) -> Sequence[CacheSpec]:
        """What each layer caches of a request, with the heads of all ranks.

        Layers with keys and values are numbered among themselves, and so are layers with states.
        """

    @abstractmethod
    def logits(self, hidden_TD: Tensor, kernels: Kernels) -> Tensor:
        """Scores [T, V] of the next token, in the model's dtype, or float32 after `use_float32_logits`."""

    @abstractmethod
    def use_float32_logits(self) -> None:
        """Compute logits in float32 from now on."""

    @abstractmethod
    def checkpoint_map(self) -> WeightMap:
        """Every tensor that a checkpoint of this model must hold, and where it goes."""

    def joint_map(self) -> WeightMap:
        """Further tensors, each of which fills a whole parameter and may replace all tensors that fill it."""
        return {}

    def stored_as(self, name: str) -> str:
        """The checkpoint name of the tensor that the model uses for `name`; differs for tied weights."""
        return name

    def also_called(self, name: str) -> str | None:
        """Another name by which updates may bring the tensor of this checkpoint name; None: there is none."""
        return None

    @abstractmethod
    def ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no parameter for it."""
