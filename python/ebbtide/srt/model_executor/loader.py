"""Reads checkpoints: the headers of files and folders first, then their tensors. Files are never mapped.

So if a file is cut short or replaced while it is read, that is an ordinary error, not a crash.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ebbtide.formats.stored_tensor import StoredTensor, read_exactly
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.errors import ConfigurationError, RequestRejected, first_few
from ebbtide.srt.layers.attention.base import Progress, no_progress
from ebbtide.srt.layers.fp8 import are_scales
from ebbtide.srt.model_executor.weight_store import WeightStore

CHECKPOINT_FORMATS = ("auto", "safetensors", "pt")
DUMMY_SEED = 0
DUMMY_SCALE = 0.02
SAFETENSORS_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
# The limit of the format's own library.
MAX_HEADER_BYTES: Final = 100_000_000
LENGTH_BYTES: Final = 8
# MXFP4 keeps numbers of 4 bits in groups with one exponent each, in two tensors with these suffixes.
BLOCKS, SCALES = "_blocks", "_scales"
GROUP, GROUP_BYTES, EXPONENT_BIAS = 32, 16, 127
# e2m1, then the same with the sign bit set.
FOUR_BITS = [sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


class CheckpointFile:
    """A safetensors file, or a torch file of tensors by name.

    Attributes:
        path: of the file; errors name it.
        tensors: by name, in the order in which they are in the file. They can be read inside `open`.
        metadata: the texts of a safetensors header.

    Raises ConfigurationError: the file is damaged, or of another kind. It names the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self._descriptor: int | None = None
        try:
            with self._opened():
                self._state = self._look()
                read = self._read_safetensors if path.suffix == ".safetensors" else self._read_torch_file
                self.tensors = dict(sorted(read().items(), key=lambda item: item[1].offset))
                self._require_unchanged()
        except RequestRejected as error:
            raise ConfigurationError(error.message) from error

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within, the tensors can be read.

        Raises:
            RequestRejected: 400, at the start or the end: the file has changed since its header was read.
        """
        with self._opened():
            self._require_unchanged()
            yield
            self._require_unchanged()

    def read_into(self, room: memoryview, offset: int) -> None:
        """Fill `room` with the bytes from `offset` on.

        Raises:
            RequestRejected: 400, they cannot be read, or the file was cut short.
        """
        assert self._descriptor is not None, "tensors are read inside `open`"
        try:
            num_bytes = read_exactly(self._descriptor, room, offset)
        except OSError as error:
            raise RequestRejected(f"{self.path} cannot be read: {error.strerror}") from error
        if num_bytes < len(room):
            raise RequestRejected(
                f"{self.path} was cut short while it was read: it ends within the {len(room)} bytes from "
                f"{offset} on"
            )

    @contextmanager
    def _opened(self) -> Iterator[None]:
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RequestRejected(f"{self.path} cannot be opened: {error.strerror}") from error
        self._descriptor = descriptor
        try:
            # A hint, which not every file system supports.
            with suppress(OSError):
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
            yield
        finally:
            self._descriptor = None
            os.close(descriptor)

    def _look(self) -> tuple[int, int]:
        """The file's size, and when it was last written."""
        assert self._descriptor is not None
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _require_unchanged(self) -> None:
        if self._look() != self._state:
            raise RequestRejected(f"{self.path} was changed or replaced while the checkpoint was being read")

    # ------------------------------------------------------------------------------------------- safetensors

    def _read_safetensors(self) -> dict[str, StoredTensor]:
        try:
            return self._safetensors_header()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigurationError(f"{self.path} is not a complete safetensors file: {error}") from error

    def _safetensors_header(self) -> dict[str, StoredTensor]:
        """Source: https://github.com/huggingface/safetensors#format."""
        num_bytes, _ = self._state
        header_bytes = int.from_bytes(self._take(0, LENGTH_BYTES), "little")
        start = LENGTH_BYTES + header_bytes
        if header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"its header says that it has {header_bytes} bytes")
        header = json.loads(self._take(LENGTH_BYTES, header_bytes))
        metadata = header.pop("__metadata__", None) or {}
        self.metadata = {str(name): str(text) for name, text in metadata.items()}
        tensors = {name: self._safetensors_entry(name, entry, start) for name, entry in header.items()}
        end = start
        for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, _num_bytes(tensor))):
            if tensor.offset != end:
                raise ValueError(f"no tensor or two begin at byte {end}")
            end += _num_bytes(tensor)
        if end != num_bytes:
            raise ValueError(f"its tensors end at byte {end}, the file at {num_bytes}")
        return tensors

    def _safetensors_entry(self, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
        if entry["dtype"] not in SAFETENSORS_DTYPES:
            raise ConfigurationError(
                f"{self.path}: {name} has the type {entry['dtype']!r:.50}, which is not supported"
            )
        begin, end = entry["data_offsets"]
        numbers = [begin, end, *entry["shape"]]
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise ValueError(f"{name[:200]}: expected natural numbers in its shape and its data_offsets")
        dtype = SAFETENSORS_DTYPES[entry["dtype"]]
        tensor = StoredTensor.contiguous(self, start + begin, tuple(entry["shape"]), dtype)
        if _num_bytes(tensor) != end - begin:
            raise ValueError(f"{name[:200]}: its shape takes {_num_bytes(tensor)} bytes, not {end - begin}")
        return tensor

    def _take(self, offset: int, num_bytes: int) -> bytes:
        if offset + num_bytes > self._state[0]:
            raise ValueError(f"it has only {self._state[0]} bytes")
        taken = bytearray(num_bytes)
        self.read_into(memoryview(taken), offset)
        return bytes(taken)

    # -------------------------------------------------------------------------------------------- torch files

    def _read_torch_file(self) -> dict[str, StoredTensor]:
        """Let torch's restricted unpickler find where the storages are, without reading them."""
        from torch._subclasses.fake_tensor import FakeTensorMode  # takes seconds, and few need it

        try:
            self._require_uncompressed()
            with FakeTensorMode():
                content = torch.load(self.path, map_location="cpu", weights_only=True)
        except (
            OSError,
            RuntimeError,
            ValueError,
            EOFError,
            pickle.UnpicklingError,
            zipfile.BadZipFile,
        ) as error:
            raise ConfigurationError(f"{self.path} is not a torch file of tensors: {error}") from error
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise ConfigurationError(f"{self.path} does not hold a mapping of names to tensors")
        return {name: self._torch_entry(name, tensor) for name, tensor in content.items()}

    def _require_uncompressed(self) -> None:
        """Refuse compressed entries, since tensors are read directly from the file."""
        with zipfile.ZipFile(self.path) as archive:
            packed = [one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"its entry {packed[0]} is compressed")

    def _torch_entry(self, name: str, tensor: Tensor) -> StoredTensor:
        storage: Any = tensor.untyped_storage()
        offset = int(tensor.storage_offset()) * tensor.dtype.itemsize
        start: int = storage._checkpoint_offset  # documented in torch's notes on serialization
        if start + storage.nbytes() > self._state[0]:
            raise ConfigurationError(f"{self.path} is not a torch file of tensors: it ends within {name}")
        return StoredTensor(self, start + offset, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _num_bytes(tensor: StoredTensor) -> int:
    return torch.Size(tensor.shape).numel() * tensor.dtype.itemsize


class Checkpoint:
    """The tensors of a Hugging Face folder: headers are read at once, data when asked for.

    The two tensors of one MXFP4 weight appear as one, see `Mxfp4Tensor`.

    Args:
        load_format: `auto` prefers safetensors; `safetensors`, `pt` (torch's `pytorch_model*.bin`).

    Attributes:
        entries: the header of each tensor, by name, in the order of `tensors`.

    Raises ConfigurationError: the folder, a file of its index or a tensor is missing, a file is damaged, or
    two files have the same name. It says what was expected.
    """

    def __init__(self, path: str | Path, load_format: str = "auto") -> None:
        paths, listed = checkpoint_files(Path(path), load_format)
        places: dict[str, _Place] = {}
        for file in map(CheckpointFile, paths):
            for name, tensor in file.tensors.items():
                if name in places:
                    raise ConfigurationError(f"{name} is in both {places[name].file.path} and {file.path}")
                places[name] = _Place(tensor, file)
        absent = [f"{name} (in {file})" for name, file in listed.items() if name not in places]
        if absent:
            raise ConfigurationError(
                f"{path}: the index lists tensors that the files lack: {first_few(absent)}"
            )
        self._places = _with_pairs_joined(places)
        self.entries = {
            name: TensorHeader(name, place.tensor.shape, place.tensor.dtype)
            for name, place in self._places.items()
        }

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (name, tensor) of all tensors. Each must be read before the next is asked for.

        Raises RequestRejected, as reading does: a file has changed since its header was read.
        """
        for file, places in groupby(self._places.items(), lambda item: item[1].file):
            with file.open():
                for name, place in places:
                    scales = place.scales_file
                    with nullcontext() if scales is None or scales is file else scales.open():
                        yield name, place.tensor


class _Place(NamedTuple):
    """A tensor, and the files that are read for it."""

    tensor: StoredTensor
    file: CheckpointFile
    scales_file: CheckpointFile | None = None


def _with_pairs_joined(places: dict[str, _Place]) -> dict[str, _Place]:
    """The same tensors in order, with one in the place of each MXFP4 pair."""
    joined: dict[str, _Place] = {}
    for name, place in places.items():
        whole = name.removesuffix(BLOCKS).removesuffix(SCALES)
        pair = None if name == whole else _pair(places, whole)
        if pair is None:
            joined[name] = place
        elif name.endswith(BLOCKS):
            joined[whole] = pair
    return joined


def _pair(places: dict[str, _Place], name: str) -> _Place | None:
    blocks, scales = places.get(name + BLOCKS), places.get(name + SCALES)
    if blocks is None or scales is None:
        return None
    tensor = Mxfp4Tensor.of(blocks.tensor, scales.tensor)
    return None if tensor is None else _Place(tensor, blocks.file, scales.file)


@dataclass(frozen=True, slots=True)
class Mxfp4Tensor(StoredTensor):
    """An MXFP4 weight of two checkpoint tensors. It is [E, D, R] in bfloat16, widened on its destination
    device.

    Source: OCP Microscaling Formats (MX) Specification 1.0, as in gpt-oss's checkpoints. E experts, R
        outputs, D inputs, G = D / 32 groups.

    Attributes:
        blocks: uint8 [E, R, G, 16].
        scales: uint8 [E, R, G].
        first_input: where this view begins among the D inputs of the blocks.
    """

    blocks: StoredTensor
    scales: StoredTensor
    first_input: int = 0

    @classmethod
    def of(cls, blocks: StoredTensor, scales: StoredTensor) -> Mxfp4Tensor | None:
        """The weight; None: these tensors are no MXFP4 pair."""
        alike = blocks.dtype == scales.dtype == torch.uint8 and blocks.shape == (*scales.shape, GROUP_BYTES)
        if not alike or scales.dim() != 3:
            return None
        num_experts, num_outputs, num_groups = scales.shape
        num_inputs = num_groups * GROUP
        shape = (num_experts, num_inputs, num_outputs)
        stride = (num_inputs * num_outputs, 1, num_inputs)
        return cls(blocks.storage, blocks.offset, shape, stride, torch.bfloat16, blocks, scales)

    def narrow(self, dim: int, start: int, length: int) -> Mxfp4Tensor:
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        if dim == 1:
            return replace(self, shape=shape, first_input=self.first_input + start)
        stored_dim = 0 if dim == 0 else 1
        blocks, scales = (each.narrow(stored_dim, start, length) for each in (self.blocks, self.scales))
        return replace(self, shape=shape, blocks=blocks, scales=scales)

    def split(self, num_rows: int) -> Iterator[StoredTensor]:
        for start in range(0, self.shape[0], num_rows):
            yield self.narrow(0, start, min(num_rows, self.shape[0] - start))

    def read(self) -> Tensor:
        return self._widened(torch.device("cpu"))

    def copy_to(self, room: Tensor) -> None:
        room.copy_(self._widened(room.device))

    def _widened(self, device: torch.device) -> Tensor:
        wide_ERD = widen(self.blocks.read().to(device), self.scales.read().to(device))
        return wide_ERD.transpose(1, 2).narrow(1, self.first_input, self.shape[1])


def widen(blocks: Tensor, scales: Tensor) -> Tensor:
    """bfloat16 [..., 32 G] from uint8 [..., G, 16] and [..., G]. A byte's low bits are the first number."""
    values = torch.tensor(FOUR_BITS, dtype=torch.bfloat16, device=blocks.device)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=1)
    factors = torch.ldexp(torch.ones(scales.shape, device=blocks.device), scales.int() - EXPONENT_BIAS).to(
        torch.bfloat16
    )
    wide = torch.nn.functional.embedding(blocks.int(), pairs).flatten(-2).mul_(factors.unsqueeze(-1))
    return wide.flatten(-2)


def load_weights(
    store: WeightStore, path: str | Path, load_format: str, progress: Progress = no_progress
) -> None:
    """Fill a model's weights from a folder; if the format is `dummy`, with seeded small random values.

    Raises ConfigurationError before anything is written: tensors are missing, unknown or of a wrong shape.
    """
    if load_format == "dummy":
        progress("making weights", 0, 0)
        write_dummy_weights(store)
        return
    checkpoint = Checkpoint(path, load_format)
    known = (store.covered(name) for name in checkpoint.entries if store.knows(name))
    missing = sorted(store.names.difference(*known))
    if missing:
        raise ConfigurationError(f"{path}: {len(missing)} tensors are missing: {first_few(missing)}")
    dtypes = {name: entry.dtype for name, entry in checkpoint.entries.items()}
    problems = [
        f"{problem.name}: {problem.reason}"
        for name, entry in checkpoint.entries.items()
        if (
            problem := store.check(name, entry.shape, entry.dtype)
            or store.check_scales(name, entry.dtype, dtypes)
        )
    ]
    if problems:
        raise ConfigurationError(f"{path} does not fit the model: {first_few(problems)}")
    try:
        for number, (name, tensor) in enumerate(checkpoint.tensors()):
            progress("loading weights", number, len(checkpoint.entries))
            if store.is_scales(name) and not are_scales(tensor.read()):
                raise ConfigurationError(f"{path}: {name}: expected scales that are finite and above zero")
            store.write(name, tensor, None)
    except RequestRejected as error:
        raise ConfigurationError(error.message) from error


def write_dummy_weights(store: WeightStore) -> None:
    """Write small random values, and ones for norms. They are reproducible on one kind of device."""
    device = store.device
    generator = torch.Generator(device).manual_seed(DUMMY_SEED)
    for name in sorted(store.names):
        shape = store.shape(name)
        if name.endswith("norm.weight"):
            value = torch.ones(shape, device=device)
        else:
            value = torch.randn(shape, generator=generator, device=device).mul_(DUMMY_SCALE)
        store.write(name, value, None)


def checkpoint_files(path: Path, load_format: str) -> tuple[list[Path], dict[str, str]]:
    """The weight files of a folder, and what its index (if any) says: tensor name → file name."""
    if load_format not in CHECKPOINT_FORMATS:
        raise ConfigurationError(
            f"load_format {load_format!r} is unknown; valid are {', '.join(CHECKPOINT_FORMATS)}"
        )
    if not path.is_dir():
        raise ConfigurationError(f"{path} is not a folder; expected a Hugging Face checkpoint folder")
    families = {"safetensors": ("model", "safetensors"), "pt": ("pytorch_model", "bin")}
    wanted = list(families) if load_format == "auto" else [load_format]
    for family in wanted:
        stem, suffix = families[family]
        index_file = path / f"{stem}.{suffix}.index.json"
        if index_file.is_file():
            listed = read_index(index_file)
            files = [path / name for name in sorted(set(listed.values()))]
            absent = [str(file) for file in files if not file.is_file()]
            if absent:
                raise ConfigurationError(f"{index_file} names files that are missing: {first_few(absent)}")
            return files, listed
        for pattern in (f"{stem}*.{suffix}", f"*.{suffix}"):
            # Files only: a pipe could block for ever.
            if files := sorted(file for file in path.glob(pattern) if file.is_file()):
                return files, {}
    expected = " or ".join(f"{families[family][0]}*.{families[family][1]}" for family in wanted)
    raise ConfigurationError(f"{path} holds no weights; expected {expected}")


def read_index(file: Path) -> dict[str, str]:
    """The `weight_map` of an index file."""
    try:
        weight_map = json.loads(file.read_text())["weight_map"]
        listed = {str(name): str(shard) for name, shard in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"{file} is not an index with a weight_map: {error}") from error
    outside = [shard for shard in listed.values() if Path(shard).name != shard]
    if outside:
        raise ConfigurationError(f"{file} names files outside its folder: {first_few(outside)}")
    return listed
