"""Tensor parallelism, applied to a model from outside: its shard/fuse map says what ranks divide.

Attention is divided by heads, MLPs and experts by inner columns, embeddings by rows. Norms, routers, and the
biases of row-parallel products are whole on every rank. Each layer does two all-reduces.

Source: Megatron-LM (Shoeybi et al. 2019), https://arxiv.org/abs/1909.08053.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from ebbtide.srt.distributed import part_of
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.layers.heads import Sinks
from ebbtide.srt.layers.linear import Linear
from ebbtide.srt.layers.moe import Experts
from ebbtide.srt.layers.state import StateLayer
from ebbtide.srt.models.base import CausalLM, WeightTarget


@dataclass(frozen=True)
class Part:
    """The ranges of a checkpoint's tensor that a rank holds.

    Attributes:
        dim: the dimension that is divided.
        ranges: (start, length) along it; they follow each other in the parameter.
        is_first: whether no lower rank holds the same.
    """

    dim: int
    ranges: tuple[tuple[int, int], ...]
    is_first: bool

    @property
    def start(self) -> int:
        """Where its only range begins. There must be just one."""
        [(start, _)] = self.ranges
        return start

    @property
    def length(self) -> int:
        return sum(length for _, length in self.ranges)


@dataclass(frozen=True)
class Placement:
    """Where a rank keeps what it holds of a checkpoint's tensor.

    Attributes:
        target: with `start` and `length` in the rank's own parameter.
        part: None: the whole tensor.
    """

    target: WeightTarget
    part: Part | None


def shard(model: CausalLM, group: ParallelGroup) -> dict[str, Placement]:
    """Reduce a model to this rank's part: its meta parameters shrink, and its layers join the group.

    Returns:
        The placement of each checkpoint tensor, by its name.

    Raises ConfigurationError: the model cannot be divided among so many ranks.
    """
    targets = model.checkpoint_map()
    if group.size == 1:
        return {name: Placement(target, None) for name, target in targets.items()}
    placements: dict[str, Placement] = {}
    shapes: dict[str, list[int]] = {}
    for name, target in sorted(targets.items(), key=lambda item: item[1].start):
        part = _part(target, group)
        shape = shapes.get(target.parameter)
        if shape is None:
            shape = shapes[target.parameter] = list(model.get_parameter(target.parameter).shape)
            shape[0] = 0
        length = target.length
        if part is not None and part.dim == 0:
            length = part.length
        elif part is not None:
            shape[part.dim] = part.length
        placements[name] = Placement(replace(target, start=shape[0], length=length), part)
        shape[0] += length
    for name in {place.target.parameter for place in placements.values() if place.part is not None}:
        _shrink(model, name, shapes[name], group)
    return placements


def joint(model: CausalLM, group: ParallelGroup) -> dict[str, Placement]:
    """The placements of the tensors in `joint_map`, in a model that `shard` has divided."""
    placements = {}
    for name, target in model.joint_map().items():
        num_rows = model.get_parameter(target.parameter).shape[0]
        part = None if group.size == 1 else _part(target, group)
        placements[name] = Placement(replace(target, length=num_rows), part)
    return placements


def replace_parameter(model: nn.Module, name: str, value: torch.Tensor) -> nn.Module:
    """Replace the parameter of this name. Returns the module that holds it."""
    module_name, _, attribute = name.rpartition(".")
    module = model.get_submodule(module_name)
    setattr(module, attribute, nn.Parameter(value, requires_grad=False))
    return module


def _part(target: WeightTarget, group: ParallelGroup) -> Part | None:
    split = target.split
    if split is None:
        return None
    first, count = part_of(group.rank, group.size, split.units, split.division, split.what)
    runs = split.runs or (target.shape[split.dim],)
    before = None
    if group.rank > 0:
        before, _ = part_of(group.rank - 1, group.size, split.units, split.division, split.what)
    starts = [sum(runs[:index]) for index in range(len(runs))]
    units = [length // split.units for length in runs]
    ranges = tuple((start + first * unit, count * unit) for start, unit in zip(starts, units, strict=True))
    return Part(split.dim, ranges, is_first=first != before)


def _shrink(model: CausalLM, name: str, shape: list[int], group: ParallelGroup) -> None:
    dtype = model.get_parameter(name).dtype
    module = replace_parameter(model, name, torch.empty(shape, dtype=dtype, device="meta"))
    if isinstance(module, Linear | Experts | StateLayer):
        module.group = group
    else:
        assert isinstance(module, Sinks), f"{name}: {type(module)} cannot be divided"
