"""What the engine asks of a model.

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

# Dimensions of a projection's weight in a checkpoint.
OUTPUTS, INPUTS = 0, 1


@dataclass(frozen=True)
class Split:
    """How tensor-parallel ranks divide a checkpoint's tensor.

    Attributes:
        dim: of the tensor, cut into runs of units.
        units: pieces along it that stay whole, e.g. heads.
        what: the units, as config.json calls their number.
        runs: lengths along it that are divided each by itself, e.g. queries, keys and values in one tensor;
            none: it is one.
    """

    dim: int
    units: int
    what: str
    division: Division = Division.EQUAL
    runs: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightTarget:
    """Where a checkpoint's tensor lies in the engine's parameters.

    Attributes:
        parameter: the engine's parameter.
        start, length: its range of rows: fused tensors lie one below the other, in the first dimension.
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


# Of all parts of a parameter, or of each in their order.
Splits = Split | Sequence[Split | None] | None


def stacked(
    parameter: str, parts: Mapping[str, int], num_columns: int | None = None, split: Splits = None
) -> WeightMap:
    """Rows of a shard/fuse map: tensors that lie one below the other in one parameter.

    Args:
        parts: checkpoint name → number of rows, in the parameter's order.
        num_columns: row length; None for vectors (biases, norms).
        split: how ranks divide them. A vector has no inputs: where those are divided every rank holds all of
            it, and one rank adds it.
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
    """Rows of a shard/fuse map for one `Linear`: `parts` are checkpoint modules and their output sizes."""
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
    """Shard/fuse map of an MLP: `parts`, a gate and what it is for or one alone, are its first product.

    `what`: the inner numbers, as config.json calls them.
    """
    outputs, inputs = Split(OUTPUTS, inner, what), Split(INPUTS, inner, what)
    first = f"{module}.gate_up_proj" if len(parts) > 1 else f"{module}.up_proj"
    rows = projection(first, dict.fromkeys(parts, inner), hidden_size, bias=bias, split=outputs)
    return rows | projection(f"{module}.down_proj", {down: hidden_size}, inner, bias=bias, split=inputs)


@dataclass(frozen=True)
class RoutedLayers:
    """Which layers of a model choose experts for tokens.

    Attributes:
        num_layers: all of the model's.
        sparse_layers: those that do.
        num_experts: of each of these.
        per_token: that a token takes there.
    """

    num_layers: int
    sparse_layers: Sequence[int]
    num_experts: int
    per_token: int


class CausalLM(nn.Module, ABC):
    """A decoder whose parameters are made on the meta device and get their memory from the weight store.

    Attributes:
        is_native: whether its layers are ours: what is applied to models from outside knows no others.
        routed: None: no layer has experts.
    """

    is_native = True
    routed: RoutedLayers | None = None

    @abstractmethod
    def forward(self, step: Step) -> Tensor:
        """Final hidden states [T, D], or [M, D] of the rows that the step wants."""

    @property
    @abstractmethod
    def attention_layers(self) -> list[LayerAttention]:
        """The attention of every layer that has one, for the backend to make ready."""

    @property
    def rotates_all(self) -> bool:
        """Whether every number of queries and keys is rotated by its position."""
        return True

    @property
    @abstractmethod
    def cache_specs(self) -> Sequence[CacheSpec]:
        """What each layer keeps of a request, with the heads of all ranks.

        Layers with keys and values count among themselves, and so do those with states.
        """

    @abstractmethod
    def logits(self, hidden_TD: Tensor, kernels: Kernels) -> Tensor:
        """Scores [T, V] of the next token, in the model's dtype, or in float32 after `use_float32_logits`."""

    @abstractmethod
    def use_float32_logits(self) -> None:
        """Compute logits in float32 from now on."""

    @abstractmethod
    def checkpoint_map(self) -> WeightMap:
        """Every tensor that a checkpoint of this model must hold, and where it goes."""

    def joint_map(self) -> WeightMap:
        """Further tensors, each a whole parameter: they may come in place of all those that fill it."""
        return {}

    def stored_as(self, name: str) -> str:
        """The checkpoint name of the tensor that the model uses for `name`; another where two are tied."""
        return name

    def also_called(self, name: str) -> str | None:
        """Another name by which updates may bring the tensor of this checkpoint name."""
        return None

    @abstractmethod
    def ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold this name although the model has no parameter for it."""
