"""A weight source over a checkpoint folder, for `update_weights_from_disk`. Source: wire_api section 3.3."""

import json
from collections.abc import Iterator
from pathlib import Path

from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.model_executor.loader import Checkpoint
from ebbtide.srt.stored_tensor import StoredTensor
from ebbtide.srt.weight_sync.source import TensorHeader, WeightSource


def open_checkpoint(model_path: str, load_format: str | None, *, architecture: str) -> WeightSource:
    """Opens a local Hugging Face folder; reads its config.json and the headers of its tensors, not the data.

    Args:
        load_format: `auto`, `safetensors` or `pt`; None is `auto`.
        architecture: the one that the engine runs; the folder's config.json has to name it.

    Raises `RequestRejected` (400) for a folder that is missing, incomplete, damaged or of another model.
    """
    path = Path(model_path)
    _check_architecture(path, architecture)
    return _CheckpointSource(path, load_format if load_format is not None else "auto")


class _CheckpointSource:
    direct = False

    def __init__(self, path: Path, load_format: str) -> None:
        try:
            self._checkpoint = Checkpoint(path, load_format)
        except ConfigurationError as error:
            raise RequestRejected(str(error)) from error
        entries = self._checkpoint.entries
        self.entries = tuple(TensorHeader(name, item.shape, item.dtype) for name, item in entries.items())

    def open(self) -> Iterator[None]:
        """The files are read when the tensors are."""
        yield from ()

    def __iter__(self) -> Iterator[tuple[str, StoredTensor]]:
        return self._checkpoint.tensors()

    def drop(self) -> Iterator[None]:
        """Nothing is on a device."""
        yield from ()

    def close(self) -> None:
        """Nothing is held open between iterations."""


def _check_architecture(path: Path, architecture: str) -> None:
    if not path.is_dir():
        raise RequestRejected(f"{path} is not a folder; expected a Hugging Face checkpoint folder")
    file = path / "config.json"
    if not file.is_file():
        raise RequestRejected(f"{file} cannot be read: there is no such file")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestRejected(f"{file} cannot be read: {error}") from error
    found = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(found, list) or architecture not in found:
        raise RequestRejected(
            f"{file} names the architectures {found!r:.200}, the engine runs {architecture}"
        )
