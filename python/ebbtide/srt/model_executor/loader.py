"""Checkpoint folders: what they hold, without reading the data, and their tensors one by one."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from ebbtide.formats.stored_tensor import StoredTensor
from ebbtide.srt.errors import ConfigurationError, RequestRejected, first_few
from ebbtide.srt.layers.attention.base import Progress, no_progress
from ebbtide.srt.layers.fp8 import are_scales
from ebbtide.srt.model_executor.checkpoint_file import CheckpointFile
from ebbtide.srt.model_executor.mxfp4 import BLOCKS, SCALES, Mxfp4Tensor
from ebbtide.srt.model_executor.weight_store import WeightStore

CHECKPOINT_FORMATS = ("auto", "safetensors", "pt")
DUMMY_SEED = 0
DUMMY_SCALE = 0.02


class Checkpoint:
    """The tensors of a Hugging Face folder: headers at once, data when it is asked for.

    Two tensors that are one in MXFP4 are that one here, see `Mxfp4Tensor`.

    Args:
        load_format: `auto` prefers safetensors; `safetensors`, `pt` (torch's `pytorch_model*.bin`).

    Attributes:
        entries: the header of each tensor, by name, in the order of `tensors`.

    Raises ConfigurationError, naming the path and what was expected, where the folder, a file of its
    index or a tensor is missing, a file is damaged, or two files hold the same name.
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
            name: CheckpointEntry(place.tensor.shape, place.tensor.dtype, place.file.path)
            for name, place in self._places.items()
        }

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Yield (name, tensor) of all tensors, to be read before the next is asked for.

        Raises RequestRejected, as reading the tensors does, naming a file that has changed since its header
        was read.
        """
        for file, places in groupby(self._places.items(), lambda item: item[1].file):
            with file.open():
                for name, place in places:
                    scales = place.scales_file
                    with nullcontext() if scales is None or scales is file else scales.open():
                        yield name, place.tensor


@dataclass(frozen=True)
class CheckpointEntry:
    """The header of a tensor of a checkpoint, and the file that holds it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


class _Place(NamedTuple):
    """A tensor, and the files that are read for it."""

    tensor: StoredTensor
    file: CheckpointFile
    scales_file: CheckpointFile | None = None


def _with_pairs_joined(places: dict[str, _Place]) -> dict[str, _Place]:
    """The same in the same order, with one tensor in the place of each pair of MXFP4."""
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


def load_weights(
    store: WeightStore, path: str | Path, load_format: str, progress: Progress = no_progress
) -> None:
    """Fill a model's weights from a folder, or with seeded small random values where it is `dummy`.

    Raises ConfigurationError before anything is written if tensors are missing, unknown or misshapen.
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
    """Small random values, the same each time on one kind of device, by checkpoint name; norms are one."""
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
            # What is no file, like a pipe, might never end or never begin.
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
