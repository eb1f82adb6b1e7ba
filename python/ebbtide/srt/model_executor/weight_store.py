"""The weights of a model as named tensors over one arena: written in place, or staged and swapped in."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ebbtide.formats.stored_tensor import StoredTensor, copy_into
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.layers.fp8 import BLOCKS, CHANNELS, FP8, SCALE_LAYOUTS, dequantize
from ebbtide.srt.mem_cache.kv_scales import scale_place
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.memory_saver.arena import Arena, round_up
from ebbtide.srt.memory_saver.saver import ArenaSource
from ebbtide.srt.memory_saver.virtual_arena import ChunkArena
from ebbtide.srt.model_executor.weight_copies import (
    CONVERTIBLE,
    Destination,
    Run,
    WeightCopies,
    compile_copies,
    compile_quantizing,
    row_slices,
)
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.quantizing import Quantization, quantize
from ebbtide.srt.models.sharding import Placement, joint, replace_parameter, shard
from ebbtide.srt.slices import Slices

ALIGNMENT_BYTES = 256
LOCAL_SLICE_BYTES = 64 << 20
# A copy of this size from pageable memory takes about as long as a forward pass may be kept waiting.
TRANSFER_BYTES = 16 << 20
# The arguments that decide which weights have 8 bits.
OTHER_PRECISION = "--quantization, --quantization-exclude"
# The most characters that a message repeats of a sender's names and shapes.
MAX_TEXT = 200


@dataclass(frozen=True)
class TensorProblem:
    """Why a tensor cannot be written.

    Attributes:
        missing: a tensor that must come with it and is missing, and the weight that both belong to; None: the
            reason is another one.
    """

    name: str
    reason: str
    missing: tuple[str, str] | None = None


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class WeightStore:
    """All parameters of a model, or of a rank's part of it, laid out in one `weights` arena.

    Parameters have two kinds of names. Checkpoint names (Hugging Face's, not fused) mean whole tensors, the
    same on all ranks. With `direct`, names are those of this rank's own parameters. After construction the
    arena is resident; its contents are valid when every name has been written.

    Args:
        model: with parameters on the meta device; each is replaced by a view of the arena.
        saver: makes the arena.
        chunk_bytes: size of the pieces in which memory is taken, see `Arena`; for staged copies too.
        group: the ranks that divide the model.
        quantization: which weights are kept in 8 bits; None: none.

    Attributes:
        names: every checkpoint name that the model needs.
        placements: where each checkpoint tensor is in this rank's parameters.
        generation: a number that rises with every write to the live weights.
        sums: this rank's share of the checksum (`state_sum`) of live tensors, by checkpoint name, as far as
            known. With it, only the changed elements of a delta are summed, and not whole tensors.
        num_chunks: chunks of the arena, on the rank that has most; 0: the memory saver cannot move chunks.

    Raises ConfigurationError: the model cannot be divided among the ranks, or cannot be quantised.
    """

    def __init__(
        self,
        model: CausalLM,
        saver: ArenaSource,
        chunk_bytes: int | None = None,
        group: ParallelGroup | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        self._model = model
        self._group = ParallelGroup() if group is None else group
        self.placements = shard(model, self._group)
        self._layout = BLOCKS if quantization is None else quantization.layout
        self._scales: dict[str, Placement] = (
            {} if quantization is None else quantize(model, self.placements, quantization)
        )
        self.names = frozenset(self.placements)
        eight_bits = {placement.target.parameter for placement in self._scales.values()}
        self._joint = {
            name: placement
            for name, placement in joint(model, self._group).items()
            if placement.target.parameter + self._layout.suffix not in eight_bits
        }
        self._joint |= {
            also: placement
            for name, placement in (self.placements | self._joint).items()
            if (also := model.also_called(name)) is not None
            and placement.target.parameter + self._layout.suffix not in eight_bits
        }
        self._slots: dict[str, Slot] = {}
        num_bytes = 0
        for name, parameter in model.named_parameters():
            slot = Slot(num_bytes, tuple(parameter.shape), parameter.dtype)
            self._slots[name] = slot
            num_bytes += round_up(slot.num_bytes, ALIGNMENT_BYTES)
        self._sources: dict[str, set[str]] = {name: set() for name in self._slots}
        for name, placement in self.placements.items():
            self._sources[placement.target.parameter].add(name)
        self.arena = saver.arena(MemoryTag.WEIGHTS, num_bytes, chunk_bytes)
        self.arena.resume()
        self.device = self.arena.view(0, (0,), torch.uint8).device
        num_chunks = self.arena.num_chunks if isinstance(self.arena, ChunkArena) else 0
        self.num_chunks = -self._group.smallest(-num_chunks)
        # Computed once, since updates ask for most names several times.
        self._wanted: frozenset[str] = frozenset()
        self._wanted = frozenset(name for name in self.placements if not self.ignored(name))
        self.generation = 0
        self.sums: Mapping[str, int] = {}
        self._runs = {
            False: {
                name: run
                for name in (*self.placements, *self._joint, *self._scales)
                if (run := self._run(name)) is not None
            },
            True: {
                name: Run(slot.offset, slot.num_bytes, 0, slot.dtype) for name, slot in self._slots.items()
            },
        }
        for name, slot in self._slots.items():
            replace_parameter(model, name, self.arena.view(slot.offset, slot.shape, slot.dtype))
        if self.device.type == "cuda":
            of_lines = any(run.line_bytes > 0 for run in self._runs[False].values())
            compile_copies(self.device, of_lines=of_lines)
            if self._scales and self._layout is BLOCKS:
                compile_quantizing(self.device)

    def is_scales(self, name: str, direct: bool = False) -> bool:
        """Whether a tensor of this name holds the scales of another."""
        known = self._slots if direct else self._scales
        return name in known and self._weight_of(name, direct) is not None

    @property
    def num_bytes(self) -> int:
        """Bytes of all of this rank's parameters, padding between them included."""
        return self.arena.num_bytes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor of a checkpoint name."""
        return self._place(name).target.shape

    def ignored(self, name: str) -> bool:
        """Whether a checkpoint may have this name although the model has no use for it."""
        return name not in self._wanted and (self._model.ignored(name) or scale_place(name) is not None)

    def knows(self, name: str, direct: bool = False) -> bool:
        """Whether there is a tensor of this name to write."""
        return self._expected_shape(name, direct) is not None

    def check(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, direct: bool = False
    ) -> TensorProblem | None:
        """Why such a tensor cannot be written; None: it can. Reads and changes no data."""
        if not direct and self.ignored(name):
            return None
        expected = self._expected_shape(name, direct)
        if expected is None:
            reason = "the model has no parameter of this name"
            for layout in SCALE_LAYOUTS.values():
                weight = name.removesuffix(layout.suffix)
                if weight != name and self._expected_shape(weight, direct) is not None:
                    reason = self._kept_as(weight, direct)
            if self._expected_shape(name.removesuffix("input_scale") + "weight", direct) is not None:
                reason += ": activations are quantised as they come, and no scales of theirs expected"
            return TensorProblem(name[:MAX_TEXT], reason)
        if tuple(shape) != expected:
            return TensorProblem(name, f"expected shape {list(expected)}, got {str(list(shape))[:MAX_TEXT]}")
        parameter_dtype = self._slot(name, direct).dtype
        if dtype != parameter_dtype and dtype not in CONVERTIBLE:
            reason = f"expected {parameter_dtype} or a type that converts to it, got {dtype}"
            if dtype == FP8 and self._weight_of(name, direct) is None:
                reason += f": {self._kept_as(name, direct)}"
            return TensorProblem(name, reason)
        return None

    def check_scales(
        self, name: str, dtype: torch.dtype, others: Mapping[str, torch.dtype], direct: bool = False
    ) -> TensorProblem | None:
        """Why a tensor that `check` accepts cannot come together with `others`; None: it can.

        Values of 8 bits and their scales must come together. A weight that is quantised here brings no
        scales.

        Args:
            others: dtypes of all tensors that come together, by name.
        """
        if self._expected_shape(name, direct) is None:
            return None
        weight = self._weight_of(name, direct)
        if weight is not None and others.get(weight) != FP8:
            found = others.get(weight, "nothing")
            missing = None if weight in others else (weight, weight)
            return TensorProblem(name, f"expected with it {weight} in {FP8}, got {found}", missing)
        if self._slot(name, direct).dtype != FP8:
            return None
        if (other := others.get(name, dtype)) != dtype:
            # One would be quantised with other scales than those that came.
            return TensorProblem(name, f"expected it once, got it in {dtype} and in {other}")
        scales = name + self._layout.suffix
        if dtype == FP8 and scales not in others:
            expected = self._expected_shape(scales, direct)
            shape = list(expected) if expected is not None else "?"
            reason = f"expected its scales with it: {scales}, float32 of shape {shape}"
            return TensorProblem(name, reason, (scales, name))
        return None

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of a whole tensor in the model; None: there is no such tensor."""
        return (self.shape(name), self._slot(name, direct=False).dtype) if self._knows(name) else None

    def precision_of(self, name: str) -> str:
        """How values from `read` differ from the stored ones; empty if they do not."""
        if name not in self.placements or self._slot(name, direct=False).dtype != FP8:
            return ""
        return f"dequantized: it is kept as float8_e4m3fn, with a scale for each {self._layout}"

    def check_change(self, name: str, dtype: torch.dtype, *, of_bits: bool) -> TensorProblem | None:
        """Why some elements of a tensor that `check` accepts cannot be changed; None: they can.

        Args:
            of_bits: whether the changes are to the bits of the parameter, and not to values.
        """
        if self.ignored(name):
            return None
        part = self._place(name).part
        if part is not None and (len(part.ranges) > 1 or 0 < part.dim < len(self.shape(name)) - 1):
            return TensorProblem(name, "ranks hold several pieces of it: expected all of it")
        kept = self._slot(name, direct=False).dtype
        if kept == FP8 or name in self._scales:
            reason = "kept in 8 bits here, as values and scales that come together: expected all of it"
            return TensorProblem(name, reason)
        if of_bits and dtype != kept:
            return TensorProblem(name, f"expected the parameter's own {kept}, got {dtype}")
        return None

    def write(
        self, name: str, tensor: Tensor | StoredTensor, shadow: Arena | None, direct: bool = False
    ) -> int:
        """Copy a tensor that `check` accepts into the staged copy, or in place if `shadow` is None.

        Returns the bytes written on this rank, in the parameter's dtype; 0 for an ignored name.
        """
        return sum(self.write_by_slices(name, tensor, shadow, direct))

    def write_by_slices(
        self,
        name: str,
        tensor: Tensor | StoredTensor,
        shadow: Arena | None,
        direct: bool = False,
    ) -> Slices[None]:
        """As `write`, yielding the bytes of each slice just copied; nothing for an ignored name.

        A tensor on the same device is one slice, since its copy is only launched. A copy from another device,
        or of a stored tensor, blocks the caller, so it is cut into slices of at most 16 MiB.

        Raises RequestRejected: a stored tensor cannot be read; some of it may have been written.
        """
        destination = self.destination(name, shadow, direct)
        if destination is None:
            return
        if shadow is None:
            self.note_write()
        region = destination.region
        is_near = isinstance(tensor, Tensor) and tensor.device == region.device
        yield from destination.write_by_slices(tensor, region.nbytes if is_near else TRANSFER_BYTES)

    def plan(
        self, copies: WeightCopies, name: str, tensor: Tensor, shadow: Arena | None, direct: bool = False
    ) -> bool:
        """Plan the copy of a tensor that `check` accepts; False: it is to be written by `write_by_slices`."""
        if not direct and self.ignored(name):
            return False
        if self._slot(name, direct).dtype == FP8 != tensor.dtype:
            if self._layout is CHANNELS:
                return False
            place = self.destination(name, shadow, direct)
            assert place is not None
            assert place.scales is not None
            if place.part is not None and len(place.part.ranges) > 1:
                return False  # A part put together of several ranges would be freed before the copies run.
            return copies.plan_quantized(name, place.part_of(tensor), place.region, place.scales)
        run = self._runs[direct].get(name)
        return run is not None and copies.plan(name, tensor, run, self.address(shadow))

    def run(self, name: str, dtype: torch.dtype, direct: bool = False) -> Run | None:
        """Where a tensor that `check` accepts goes, if it is copied byte for byte; else None."""
        run = None if not direct and self.ignored(name) else self._runs[direct].get(name)
        return run if run is not None and run.dtype == dtype != torch.float64 else None

    def address(self, shadow: Arena | None) -> int:
        """Address of the first byte of the staged copy, or of the live weights."""
        return (self.arena if shadow is None else shadow).address

    def destination(self, name: str, shadow: Arena | None, direct: bool = False) -> Destination | None:
        """Where a tensor that `check` accepts goes; None for an ignored name. Thread-safe.

        A caller that writes there in place must call `note_write`.
        """
        if not direct and self.ignored(name):
            return None
        part = None if direct else self._place(name).part
        is_first = self._group.rank == 0 if part is None else part.is_first
        scales = self._scales_region(name, shadow, direct)
        return Destination(self._region(name, shadow, direct), part, is_first, scales, self._layout)

    def note_write(self, sums: Mapping[str, int] = MappingProxyType({})) -> None:
        """Note that the live weights are written. `sums`: the checksums that are known from then on."""
        self.generation += 1
        self.sums = sums

    def covered(self, name: str, direct: bool = False) -> frozenset[str]:
        """The checkpoint names that writing `name` makes valid."""
        if direct:
            return frozenset(self._sources[name])
        if name in self._joint:
            target = self._joint[name].target
            filled = range(target.start, target.start + target.length)
            sources = self._sources[target.parameter]
            return frozenset(each for each in sources if self.placements[each].target.start in filled)
        return frozenset() if self.ignored(name) or name in self._scales else frozenset({name})

    def complete(self, shadow: Arena, written: Iterable[str]) -> Slices[None]:
        """Copy everything but `written` (checkpoint names) from the live weights into the staged copy.

        Slices have at most 64 MiB. The live weights may not change between two slices.
        """
        kept = sorted(self.names - frozenset(written))
        scales = [scale for name in kept if (scale := name + self._layout.suffix) in self._scales]
        for name in (*kept, *scales):
            source, destination = self._region(name, None), self._region(name, shadow)
            for piece, room in row_slices(source, destination, LOCAL_SLICE_BYTES):
                copy_into(room, piece)
                yield room.nbytes

    def parameters(self, shadow: Arena | None = None) -> Iterator[tuple[str, Tensor]]:
        """This rank's own parameters, by the names that `direct` means; live, or of a staged copy."""
        for name in self._slots:
            yield name, self._region(name, shadow, direct=True)

    def buffers(self) -> dict[str, Tensor]:
        """Copies of the model's buffers, which no checkpoint holds."""
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def commit(self, shadow: Arena) -> None:
        """Make the staged copy live, at the same addresses.

        The shadow then holds the former weights. They cannot be read, but a second commit makes them live.
        """
        self.arena.swap(shadow)
        self.note_write()

    def stored_as(self, name: str) -> str:
        """The name under which a tensor is stored: for a tied output layer, that of the embedding."""
        return self._model.stored_as(name)

    def read(self, name: str, max_rows: int) -> Callable[[], Tensor]:
        """Read this rank's part of a whole tensor's first rows. RequestRejected: there is no such tensor.

        Returns a function that gives the whole rows in float32; all ranks must call it in the same turn.
        Tensors of 8 bits are dequantised.
        """
        name = self.stored_as(name)
        if not self._knows(name):
            raise RequestRejected(f"the model has no parameter {name!r}")
        mine, placement = self._region(name, None), self._place(name)
        if (scales := self._scales_region(name, None)) is not None:
            mine = dequantize(mine[:max_rows], scales, self._layout)
        part = placement.part
        if part is None:
            whole = mine[:max_rows].to(torch.float32, copy=True)
            return lambda: whole
        num_rows, *others = placement.target.shape
        rows = torch.zeros((min(max_rows, num_rows), *others), dtype=torch.float32, device=mine.device)
        start = 0
        for first, length in part.ranges if part.is_first else ():
            end = start + length
            if part.dim == 0:
                room = rows[first : first + length]
                room.copy_(mine[start : start + len(room)])
            else:
                rows.narrow(part.dim, first, length).copy_(mine[:max_rows].narrow(part.dim, start, length))
            start = end
        # The parts of other ranks are zeros here, so a sum puts all parts together.
        return lambda: self._group.all_reduce_(rows)

    def _slot(self, name: str, direct: bool) -> Slot:
        return self._slots[name if direct else self._place(name).target.parameter]

    def _place(self, name: str) -> Placement:
        """The placement of a checkpoint tensor, or of scales."""
        placement = self.placements.get(name) or self._joint.get(name)
        return self._scales[name] if placement is None else placement

    def _knows(self, name: str) -> bool:
        return name in self.placements or name in self._joint or name in self._scales

    def _weight_of(self, name: str, direct: bool) -> str | None:
        """The name of the values that these scales belong to; None: it is no name of scales."""
        weight = name.removesuffix(self._layout.suffix)
        is_known = weight in self._slots if direct else name in self._scales
        return weight if is_known and weight != name else None

    def _scales_region(self, name: str, shadow: Arena | None, direct: bool = False) -> Tensor | None:
        if self._slot(name, direct).dtype != FP8:
            return None
        return self._region(name + self._layout.suffix, shadow, direct)

    def _kept_as(self, weight: str, direct: bool) -> str:
        """For a refusal: how a weight is kept."""
        if self._slot(weight, direct).dtype != FP8:
            return f"its weight is not kept in 8 bits here ({OTHER_PRECISION})"
        scales, layout = weight + self._layout.suffix, self._layout
        shape = self._expected_shape(scales, direct)
        expected = "?" if shape is None else list(shape)
        return f"its weight has a scale for each {layout} here: {scales}, float32 of shape {expected}"

    def _run(self, name: str) -> Run | None:
        """Where a checkpoint tensor goes, if it is copied byte for byte into one piece; else None."""
        placement = self._place(name)
        target, part, slot = placement.target, placement.part, self._slots[placement.target.parameter]
        if part is not None and (part.dim > 1 or len(part.ranges) > 1):
            return None
        row_bytes = slot.num_bytes // max(1, slot.shape[0])
        offset, num_bytes = slot.offset + target.start * row_bytes, target.length * row_bytes
        if part is None or part.dim == 0:
            return Run(offset, num_bytes, 0 if part is None else part.start * row_bytes, slot.dtype)
        line_bytes = num_bytes // target.shape[0]
        column_bytes = line_bytes // part.length
        steps = part.start * column_bytes, target.shape[1] * column_bytes
        return Run(offset, num_bytes, steps[0], slot.dtype, line_bytes, steps[1])

    def _expected_shape(self, name: str, direct: bool) -> tuple[int, ...] | None:
        if direct:
            return self._slots[name].shape if name in self._slots else None
        return self.shape(name) if self._knows(name) else None

    def _region(self, name: str, shadow: Arena | None, direct: bool = False) -> Tensor:
        slot = self._slot(name, direct)
        memory = self.arena if shadow is None else shadow
        parameter = memory.view(slot.offset, slot.shape, slot.dtype)
        if direct:
            return parameter
        target = self._place(name).target
        region = parameter[target.start : target.start + target.length]
        if len(target.shape) > region.dim():
            region = region.view(target.shape[0], -1, *region.shape[1:])
        return region
