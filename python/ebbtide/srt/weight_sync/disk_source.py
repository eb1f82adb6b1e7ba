"""A weight source over a checkpoint folder, for `update_weights_from_disk`. Source: wire_api section 3.3."""

import json
from pathlib import Path

from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.hf_folder import folder_of
from ebbtide.srt.model_executor.loader import Checkpoint
from ebbtide.srt.weight_sync.source import WeightSource


def open_checkpoint(model_path: str, load_format: str | None, *, architecture: str) -> WeightSource:
    """Opens a local Hugging Face folder; reads its config.json and the headers of its tensors, not the data.

    Args:
        load_format: `auto`, `safetensors` or `pt`; None is `auto`.
        architecture: the one that the engine runs; the folder's config.json has to name it.

    Raises `RequestRejected` (400) for a folder that is missing, incomplete, damaged or of another model.
    """
    path = folder_of(model_path)
    _check_architecture(path, architecture)
    try:
        checkpoint = Checkpoint(path, load_format if load_format is not None else "auto")
    except ConfigurationError as error:
        raise RequestRejected(str(error)) from error
    headers = [TensorHeader(name, entry.shape, entry.dtype) for name, entry in checkpoint.entries.items()]
    return WeightSource(headers, checkpoint.tensors)


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
