"""The weights of a model as named tensors over one arena: written in place, or staged and swapped in."""

import hashlib
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ebbtide.srt.distributed.parallel_group import ParallelGroup, SoloGroup
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.mem_cache.kv_scales import scale_place
from ebbtide.srt.memory_saver.arena import Shadow
from ebbtide.srt.memory_saver.chunk_pool import ChunkArena
from ebbtide.srt.memory_saver.saver import ArenaSource
from ebbtide.srt.memory_saver.tags import MemoryTag
from ebbtide.srt.model_executor.kept_sums import KeptSums
from ebbtide.srt.model_executor.weight_copies import CONVERTIBLE, Run, WeightCopies, compile_copies
from ebbtide.srt.models.base import CausalLM
from ebbtide.srt.models.sharding import Part, replace_parameter, shard
from ebbtide.srt.stored_tensor import StoredTensor, copy_into

ALIGNMENT_BYTES = 256
LOCAL_SLICE_BYTES = 64 << 20
# At the speed of pageable memory, about what a forward pass can be kept waiting for.
TRANSFER_BYTES = 16 << 20
# So much of a sender's names and shapes is repeated in a message.
MAX_TEXT = 200

AnyTensor = TypeVar("AnyTensor", Tensor, StoredTensor, Tensor | StoredTensor)


@dataclass(frozen=True)
class TensorProblem:
    """Why a tensor cannot be written."""

    name: str
    reason: str


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in the arena."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Destination:
    """Where a tensor goes on this rank.

    Attributes:
        region: of a parameter, which may be wider than what is written.
        part: what this rank holds of the tensor; None: all of it.
        is_first: whether no rank before this one holds the same.
    """

    region: Tensor
    part: Part | None
    is_first: bool = True

    def is_like(self, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether such a tensor could be received here as it is: byte for byte, in one piece."""
        same = self.part is None and tuple(self.region.shape) == shape and self.region.dtype == dtype
        return same and self.region.is_contiguous()

    def part_of(self, tensor: AnyTensor) -> AnyTensor:
        """What this rank holds of a whole tensor."""
        part = self.part
        return tensor if part is None else tensor.narrow(part.dim, part.start, part.length)


class WeightStore:
    """All parameters of a model, or of a rank's part of it, laid out in one `weights` arena.

    Two kinds of names lead to the same memory: checkpoint names (Hugging Face's, unfused), which speak of
    whole tensors on every rank, and with `direct` this rank's own parameters. The arena is resident after
    construction; its contents are not valid until every name has been written.

    Args:
        model: with parameters on the meta device; each is replaced by a view of the arena.
        saver: where the arena comes from.
        chunk_bytes: pieces in which it is taken, see `Arena`. A staged copy is taken piece by piece too.
        group: the ranks that divide the model among them.

    Attributes:
        places: kept here for those who write with kernels of their own: by checkpoint name, where it lies.
        sums: of the live weights, kept for those who check what they will hold.
        num_chunks: of the arena, on the rank where it has most; 0 where it has none that change places.

    Raises ConfigurationError where the model cannot be divided among them.
    """

    def __init__(
        self,
        model: CausalLM,
        saver: ArenaSource,
        chunk_bytes: int | None = None,
        group: ParallelGroup | None = None,
    ) -> None:
        self._model = model
        self._group: ParallelGroup = SoloGroup() if group is None else group
        self._placements = shard(model, self._group)
        self._slots: dict[str, Slot] = {}
        num_bytes = 0
        for name, parameter in model.named_parameters():
            slot = Slot(num_bytes, tuple(parameter.shape), parameter.dtype)
            self._slots[name] = slot
            num_bytes += -(-slot.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._sources: dict[str, set[str]] = {name: set() for name in self._slots}
        for name, placement in self._placements.items():
            self._sources[placement.target.parameter].add(name)
        self.arena = saver.arena(MemoryTag.WEIGHTS, num_bytes, chunk_bytes)
        self.arena.resume()
        num_chunks = self.arena.num_chunks if isinstance(self.arena, ChunkArena) else 0
        self.num_chunks = -self._group.smallest(-num_chunks)
        self.generation = 0
        self.sums = KeptSums()
        self.places: dict[str, list[int] | None] = {}
        self._runs = {
            False: {name: run for name in self._placements if (run := self._run(name)) is not None},
            True: {
                name: Run(slot.offset, slot.num_bytes, 0, slot.dtype) for name, slot in self._slots.items()
            },
        }
        for name, slot in self._slots.items():
            replace_parameter(model, name, self.arena.view(slot.offset, slot.shape, slot.dtype))
        if self.device.type == "cuda":
            compile_copies(self.device)

    @property
    def names(self) -> frozenset[str]:
        """Every checkpoint name that the model needs."""
        return frozenset(self._placements)

    @property
    def num_bytes(self) -> int:
        """Bytes of all of this rank's parameters, padding between them included."""
        return self.arena.num_bytes

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.arena.view(0, (0,), torch.uint8).device

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor by its checkpoint name."""
        return self._placements[name].target.shape

    def ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold this name although there is nothing to write."""
        return self._model.ignored(name) or scale_place(name) is not None

    def knows(self, name: str, direct: bool = False) -> bool:
        """Whether there is a tensor of this name to write."""
        return self._expected_shape(name, direct) is not None

    def check(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, direct: bool = False
    ) -> TensorProblem | None:
        """What stands against writing such a tensor; None if nothing does. Reads and changes no data."""
        if not direct and self.ignored(name):
            return None
        expected = self._expected_shape(name, direct)
        if expected is None:
            return TensorProblem(name[:MAX_TEXT], "the model has no parameter of this name")
        if tuple(shape) != expected:
            return TensorProblem(name, f"expected shape {list(expected)}, got {str(list(shape))[:MAX_TEXT]}")
        parameter_dtype = self._slot(name, direct).dtype
        if dtype != parameter_dtype and dtype not in CONVERTIBLE:
            return TensorProblem(
                name, f"expected {parameter_dtype} or a type that converts to it, got {dtype}"
            )
        return None

    def described(self, name: str) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Shape and dtype of a whole tensor as the model keeps it; None if it has none of this name."""
        return (self.shape(name), self._slot(name, direct=False).dtype) if name in self._placements else None

    def check_bits(self, name: str, dtype: torch.dtype) -> TensorProblem | None:
        """What stands against changing some elements of a tensor that `check` accepts, bit for bit."""
        if self.ignored(name) or dtype == self._slot(name, direct=False).dtype:
            return None
        return TensorProblem(
            name, f"expected the parameter's own {self._slot(name, direct=False).dtype}, got {dtype}"
        )

    def write(
        self, name: str, tensor: Tensor | StoredTensor, shadow: Shadow | None, direct: bool = False
    ) -> int:
        """Copy a tensor that `check` accepts into the staged copy, or in place where `shadow` is None.

        Returns the bytes written on this rank, in the parameter's dtype; 0 for an ignored name.
        """
        return sum(self.write_by_slices(name, tensor, shadow, direct))

    def write_by_slices(
        self,
        name: str,
        tensor: Tensor | StoredTensor,
        shadow: Shadow | None,
        direct: bool = False,
    ) -> Generator[int, None, None]:
        """As `write`, yielding the bytes of each slice just copied; nothing for an ignored name.

        Tensors of the same device are one slice: there a copy is launched and not waited for. A copy to
        another device, or of what has to be read first, holds the caller up, so it is cut into slices of at
        most 16 MiB.

        Raises RequestRejected where a stored tensor cannot be read: some of it may have been written.
        """
        destination = self.destination(name, shadow, direct)
        if destination is None:
            return
        if shadow is None:
            self.generation += 1
        part, region = destination.part_of(tensor), destination.region
        is_near = isinstance(part, Tensor) and part.device == region.device
        for piece, room in _row_slices(part, region, region.nbytes if is_near else TRANSFER_BYTES):
            copy_into(room, piece)
            yield room.nbytes

    def plan(
        self, copies: WeightCopies, name: str, tensor: Tensor, shadow: Shadow | None, direct: bool = False
    ) -> bool:
        """Plan the copy of a tensor that `check` accepts; False: it is to be written by `write_by_slices`."""
        run = self._runs[direct].get(name)
        memory = self.arena if shadow is None else shadow.twin
        return run is not None and copies.plan(name, tensor, run, memory.address)

    def destination(self, name: str, shadow: Shadow | None, direct: bool = False) -> Destination | None:
        """Where a tensor that `check` accepts goes; None for an ignored name.

        Who writes there in place says so: `note_write`. From any thread.
        """
        if not direct and self.ignored(name):
            return None
        part = None if direct else self._placements[name].part
        is_first = self._group.rank == 0 if part is None else part.is_first
        return Destination(self._region(name, shadow, direct), part, is_first)

    def note_write(self) -> None:
        """The live weights are about to be written, or have been, by somebody else."""
        self.generation += 1

    def covered(self, name: str, direct: bool = False) -> frozenset[str]:
        """The checkpoint names that writing `name` makes valid."""
        if direct:
            return frozenset(self._sources[name])
        return frozenset() if self.ignored(name) else frozenset({name})

    def complete(self, shadow: Shadow, written: Iterable[str]) -> Generator[int, None, None]:
        """Copy everything but `written` (checkpoint names) from the live weights into the staged copy.

        A generator of the bytes of each slice (at most 64 MiB) just copied: the caller may do other
        things between two slices, as long as the live weights stay as they are.
        """
        for name in sorted(self.names - frozenset(written)):
            source, destination = self._region(name, None), self._region(name, shadow)
            for piece, room in _row_slices(source, destination, LOCAL_SLICE_BYTES):
                copy_into(room, piece)
                yield room.nbytes

    def parameters(self, shadow: Shadow | None = None) -> Iterator[tuple[str, Tensor]]:
        """This rank's own parameters under the names that `direct` means: live, or those of a staged copy."""
        for name in self._slots:
            yield name, self._region(name, shadow, direct=True)

    def buffers(self) -> dict[str, Tensor]:
        """Copies of what the model computes with beside its parameters; no checkpoint holds that."""
        return {name: buffer.clone() for name, buffer in self._model.named_buffers()}

    def commit(self, shadow: Shadow) -> None:
        """Make the staged copy live, at the same addresses.

        The shadow then holds the former weights: not to be read, but to be made live again.
        """
        self.arena.swap(shadow, maps_former=False)
        self.generation += 1

    def stored_as(self, name: str) -> str:
        """The name under which a tensor is read: the embedding's for an output layer that is tied to it."""
        return self._model.stored_as(name)

    def read(self, name: str, max_rows: int) -> Tensor:
        """The first rows of a whole tensor by its checkpoint name, as float32; RequestRejected if unknown.

        All ranks of the group call it in the same turn.
        """
        name = self.stored_as(name)
        if name not in self._placements:
            raise RequestRejected(f"the model has no parameter {name!r}")
        mine, placement = self._region(name, None), self._placements[name]
        part = placement.part
        if part is None:
            return mine[:max_rows].to(torch.float32, copy=True)
        num_rows, *others = placement.target.shape
        rows = torch.zeros((min(max_rows, num_rows), *others), dtype=torch.float32, device=mine.device)
        if part.is_first:
            whole = Destination(mine, part)
            room = rows[part.start : part.start + part.length] if part.dim == 0 else whole.part_of(rows)
            room.copy_(mine[: len(room)])
        # What the others hold is zero here.
        return self._group.all_reduce_(rows)

    def checksum(self) -> str:
        """A hash of this rank's bytes: equal if and (all but certainly) only if the weights are."""
        digest = hashlib.blake2b(digest_size=16)
        for slot in self._slots.values():
            live = self.arena.view(slot.offset, (slot.num_bytes,), torch.uint8)
            for piece in torch.split(live, LOCAL_SLICE_BYTES):
                digest.update(piece.cpu().numpy().data)
        return digest.hexdigest()

    def _slot(self, name: str, direct: bool) -> Slot:
        return self._slots[name if direct else self._placements[name].target.parameter]

    def _run(self, name: str) -> Run | None:
        """Where a tensor of a checkpoint goes, if it goes there as it is, in one piece."""
        placement = self._placements[name]
        target, part, slot = placement.target, placement.part, self._slots[placement.target.parameter]
        if target.dim != 0 or (part is not None and part.dim != 0):
            return None
        row_bytes = slot.num_bytes // max(1, slot.shape[0])
        skipped_bytes = 0 if part is None else part.start * row_bytes
        return Run(
            slot.offset + target.start * row_bytes, target.length * row_bytes, skipped_bytes, slot.dtype
        )

    def _expected_shape(self, name: str, direct: bool) -> tuple[int, ...] | None:
        if direct:
            return self._slots[name].shape if name in self._slots else None
        return self.shape(name) if name in self._placements else None

    def _region(self, name: str, shadow: Shadow | None, direct: bool = False) -> Tensor:
        slot = self._slot(name, direct)
        memory = self.arena if shadow is None else shadow
        parameter = memory.view(slot.offset, slot.shape, slot.dtype)
        if direct:
            return parameter
        target = self._placements[name].target
        return parameter.narrow(target.dim, target.start, target.length)


def _row_slices(
    source: Tensor | StoredTensor, destination: Tensor, slice_bytes: int
) -> Iterator[tuple[Tensor | StoredTensor, Tensor]]:
    """Pairs of rows of two tensors of one shape, of at most `slice_bytes` in the destination, or one row."""
    if destination.nbytes <= slice_bytes or source.dim() == 0:
        yield source, destination
        return
    num_rows = max(1, slice_bytes // max(1, destination[:1].nbytes))
    pieces = torch.split(source, num_rows) if isinstance(source, Tensor) else source.split(num_rows)
    yield from zip(pieces, torch.split(destination, num_rows), strict=True)
