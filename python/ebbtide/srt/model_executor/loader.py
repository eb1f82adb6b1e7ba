"""Checkpoint folders: what they hold, without reading the data, and their tensors one by one."""

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.model_executor.weight_store import WeightStore

CHECKPOINT_FORMATS = ("auto", "safetensors", "pt")
SAFETENSORS_DTYPES = {
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
DUMMY_SEED = 0
DUMMY_SCALE = 0.02
MAX_NAMES_IN_MESSAGE = 5


@dataclass(frozen=True)
class CheckpointEntry:
    """One tensor of a checkpoint: its header, and the file that holds it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: Path


def checkpoint_index(path: str | Path, load_format: str = "auto") -> dict[str, CheckpointEntry]:
    """Names, shapes, dtypes and files of all tensors of a Hugging Face folder. Reads headers only.

    Args:
        load_format: `auto` prefers safetensors; `safetensors`, `pt` (torch's `pytorch_model*.bin`).

    Raises ConfigurationError, naming the path and what was expected, where the folder, a file of its
    index or a tensor is missing, a file is damaged, or two files hold the same name.
    """
    entries: dict[str, CheckpointEntry] = {}
    files, listed = checkpoint_files(Path(path), load_format)
    for file in files:
        for entry in file_entries(file):
            if entry.name in entries:
                raise ConfigurationError(f"{entry.name} is in both {entries[entry.name].file} and {file}")
            entries[entry.name] = entry
    absent = [f"{name} (in {file})" for name, file in listed.items() if name not in entries]
    if absent:
        raise ConfigurationError(f"{path}: the index lists tensors that the files lack: {summary(absent)}")
    return entries


def iterate_checkpoint(path: str | Path, load_format: str = "auto") -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors of a folder, one at a time, in the files' order.

    A tensor is backed by the mapped file: copy what is to outlive the iteration.
    Raises ConfigurationError as `checkpoint_index` does.
    """
    files, _ = checkpoint_files(Path(path), load_format)
    for file in files:
        if file.suffix == ".safetensors":
            with open_safetensors(file) as handle:
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    yield name, handle.get_tensor(name)
        else:
            yield from load_torch_file(file).items()


def load_weights(store: WeightStore, path: str | Path, load_format: str) -> None:
    """Fill a model's weights from a folder, or with seeded small random values where it is `dummy`.

    Raises ConfigurationError before anything is written if tensors are missing, unknown or misshapen.
    """
    if load_format == "dummy":
        write_dummy_weights(store)
        return
    index = checkpoint_index(path, load_format)
    missing = sorted(store.names - index.keys())
    if missing:
        raise ConfigurationError(f"{path}: {len(missing)} tensors are missing: {summary(missing)}")
    problems = [
        f"{problem.name}: {problem.reason}"
        for entry in index.values()
        if (problem := store.check(entry.name, entry.shape, entry.dtype))
    ]
    if problems:
        raise ConfigurationError(f"{path} does not fit the model: {summary(problems)}")
    for name, tensor in iterate_checkpoint(path, load_format):
        store.write(name, tensor, None)


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
                raise ConfigurationError(f"{index_file} names files that are missing: {summary(absent)}")
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
        raise ConfigurationError(f"{file} names files outside its folder: {summary(outside)}")
    return listed


def file_entries(file: Path) -> list[CheckpointEntry]:
    """The headers of one file."""
    if file.suffix != ".safetensors":
        return [
            CheckpointEntry(name, tuple(tensor.shape), tensor.dtype, file)
            for name, tensor in load_torch_file(file).items()
        ]
    entries = []
    with open_safetensors(file) as handle:
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            header = handle.get_slice(name)
            kind = header.get_dtype()
            if kind not in SAFETENSORS_DTYPES:
                raise ConfigurationError(f"{file}: {name} has the type {kind}, which is not supported")
            entries.append(CheckpointEntry(name, tuple(header.get_shape()), SAFETENSORS_DTYPES[kind], file))
    return entries


def open_safetensors(file: Path) -> Any:
    """An open safetensors file, a context manager; its header has been checked against its size."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigurationError(f"{file} is not a complete safetensors file: {error}") from error


def load_torch_file(file: Path) -> dict[str, Tensor]:
    """The tensors of a torch file, mapped, by torch's restricted unpickler."""
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ConfigurationError(f"{file} is not a torch file of tensors: {error}") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ConfigurationError(f"{file} does not hold a mapping of names to tensors")
    return content


def summary(items: list[str]) -> str:
    """The first few items and how many more there are."""
    more = len(items) - MAX_NAMES_IN_MESSAGE
    return ", ".join(items[:MAX_NAMES_IN_MESSAGE]) + (f" and {more} more" if more > 0 else "")
