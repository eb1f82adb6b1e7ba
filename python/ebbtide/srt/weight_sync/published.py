"""Versions of a checkpoint that a trainer publishes in a shared folder, each as changes since the last one.

The folder of a version is ready when its index exists, which is written last. Its files hold one zstd frame
per changed tensor, by checkpoint name, with the changes of its bytes. Source: wire_vllm section 5.2.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.hf_folder import read_json

if TYPE_CHECKING:
    from ebbtide.srt.model_executor.loader import CheckpointFile

INDEX: Final = "model.safetensors.index.json"
# The file in a local folder that says which version an update from that folder brings.
STATE: Final = Path(".weight_sync", "state.json")
ENCODINGS: Final = ("xor", "overwrite")
_CHECKSUMS: Final[Mapping[str, Callable[[memoryview], str]]] = {
    "xxh3-128": lambda data: str(_library("xxhash").xxh3_128_hexdigest(data)),
    "blake3": lambda data: str(_library("blake3").blake3(data).hexdigest()),
    "sha256": lambda data: hashlib.sha256(data).hexdigest(),
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


@dataclass(frozen=True)
class PublishedDelta:
    """One published version.

    Attributes:
        base: the version that it is a change of.
        encoding: "xor" or "overwrite".
        checksum_format: of the checksums in the headers of its files.
        weight_map: the file of each tensor that changes.
        checksums: of tensors, if the index has them instead of the files.
    """

    folder: Path
    version: int
    base: int
    encoding: str
    checksum_format: str
    weight_map: Mapping[str, str]
    checksums: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class PulledState:
    """The published versions that were pulled into a local folder.

    Attributes:
        base_version: the version that the engine must serve, by the engine's name.
        base, target: the trainer's numbers of the version before and after.
    """

    source_dir: Path
    base_version: str
    base: int
    target: int


def version_folder(source_dir: Path, version: int) -> Path:
    return source_dir / f"weight_v{version:06d}"


def manifest_of(source_dir: Path, version: int) -> Path:
    """The file that SkyRL's trainer writes last."""
    return source_dir / f"delta-{version:08d}" / "manifest.json"


def read_chain(source_dir: Path, base: int, target: int) -> list[PublishedDelta]:
    """The deltas from one version to another, in order. RequestRejected: one is missing or malformed."""
    versions = range(base + 1, target + 1)
    # There may be any number of versions: the first and the last tell which format they have.
    if any(os.path.isfile(manifest_of(source_dir, version)) for version in (*versions[:1], *versions[-1:])):
        return [_read_manifest(manifest_of(source_dir, version), version) for version in versions]
    return [_read_index(source_dir, version) for version in versions]


def names_of(chain: Sequence[PublishedDelta]) -> list[str]:
    return sorted({name for delta in chain for name in delta.weight_map})


def write_state(local_dir: Path, state: PulledState) -> None:
    """Write which versions were pulled into a folder, for updates from it."""
    file = local_dir / STATE
    fields = {
        "version": f"{state.target:06d}",
        "source_dir": str(state.source_dir),
        "base_version": state.base_version,
        "base": state.base,
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        fresh = file.with_suffix(".new")
        fresh.write_text(json.dumps(fields), encoding="utf-8")
        os.replace(fresh, file)
    except OSError as error:
        raise RequestRejected(f"local_checkpoint_dir: {error}") from error


def read_state(local_dir: Path) -> PulledState | None:
    """The versions that were pulled into a folder; None: it is an ordinary folder."""
    file = local_dir / STATE
    if not file.is_file():
        return None
    with read_json(file) as found:
        if "source_dir" not in found:
            return None  # Another engine wrote it, into a full checkpoint.
        return PulledState(
            Path(found["source_dir"]), found["base_version"], int(found["base"]), int(found["version"])
        )


def open_files(delta: PublishedDelta) -> dict[str, CheckpointFile]:
    """Open a version's files; returns them by name. RequestRejected (400): one is missing or damaged."""
    from ebbtide.srt.model_executor.loader import CheckpointFile  # torch: the API reads only indices

    try:
        files = {name: CheckpointFile(delta.folder / name) for name in sorted(set(delta.weight_map.values()))}
    except ConfigurationError as error:
        raise RequestRejected(str(error)) from error
    found = {name: file for file, opened in files.items() for name in opened.tensors}
    if found != dict(delta.weight_map):
        differing = sorted(found.items() ^ dict(delta.weight_map).items())[:3]
        raise RequestRejected(f"{delta.folder}: its files do not hold what its index says: {differing}")
    return files


def decompress(frame: bytes, max_bytes: int, name: str) -> bytes:
    """Decompress a zstd frame. RequestRejected (400): it is damaged, or holds more than `max_bytes`."""
    zstandard = _library("zstandard")
    try:
        with zstandard.ZstdDecompressor().stream_reader(frame) as reader:
            data: bytes = reader.read(max_bytes + 1)
    except zstandard.ZstdError as error:
        raise RequestRejected(f"{name[:200]}: its zstd frame is damaged: {error}") from error
    if len(data) > max_bytes:
        raise RequestRejected(f"{name[:200]}: its zstd frame holds more than {max_bytes} bytes")
    return data


def checksum_of(data: memoryview, checksum_format: str) -> str:
    """The checksum of the data in this format, in lower-case hexadecimal."""
    return _CHECKSUMS[checksum_format](data)


def _read_index(source_dir: Path, version: int) -> PublishedDelta:
    file = version_folder(source_dir, version) / INDEX
    _require_ready(file, "source_dir", version)
    with read_json(file) as index:
        metadata, weight_map = index["metadata"], index["weight_map"]
        encoding = metadata.get("delta_encoding")
        if encoding is None:
            raise RequestRejected(
                f"{file.parent} is a whole checkpoint: update_weights_from_disk from it, and pull what "
                "follows it"
            )
        found = int(metadata["version"]), int(metadata["base_version"])
        files = list(weight_map.values())
        kinds = encoding, str(metadata["compression_format"]), str(metadata["checksum_format"])
    _check_versions(file, version, found)
    if encoding not in ENCODINGS or kinds[1] != "zstd" or kinds[2] not in _CHECKSUMS:
        raise RequestRejected(
            f"{file}: expected {' or '.join(ENCODINGS)}, zstd, and {', '.join(_CHECKSUMS)}; got {kinds}"
        )
    if not all(isinstance(part, str) and "/" not in part for part in files):
        raise RequestRejected(f"{file}: weight_map: expected names of files of this folder")
    return PublishedDelta(file.parent, version, version - 1, encoding, kinds[2], weight_map)


def _read_manifest(file: Path, version: int) -> PublishedDelta:
    """SkyRL's index. Source: wire_vllm section 5.3."""
    _require_ready(file, "sync_dir", version)
    with read_json(file) as manifest:
        found = int(manifest["version"]), int(manifest["base_version"])
        records = {record["name"]: record for record in manifest["tensors"]}
        kinds = {str(record.get("checksum_algorithm", "sha256")) for record in records.values()}
        checksums = {name: record.get("checksum") or record["sha256"] for name, record in records.items()}
        weight_map = {name: record["payload_file"] for name, record in records.items()}
        is_keyed = all(record["payload_key"] == name for name, record in records.items())
    _check_versions(file, version, found)
    if not is_keyed or not all(isinstance(part, str) and "/" not in part for part in weight_map.values()):
        raise RequestRejected(
            f"{file}: expected files of this folder, and the names of tensors as their keys"
        )
    if len(kinds) > 1 or not kinds <= _CHECKSUMS.keys():
        raise RequestRejected(
            f"{file}: expected one checksum of {', '.join(_CHECKSUMS)}, got {sorted(kinds)}"
        )
    kind = next(iter(kinds), "xxh3-128")
    return PublishedDelta(file.parent, version, version - 1, "xor", kind, weight_map, checksums)


def _require_ready(file: Path, field_name: str, version: int) -> None:
    if not file.is_file():
        raise RequestRejected(f"{field_name}: version {version} is not ready: there is no {file}")


def _check_versions(file: Path, version: int, found: tuple[int, int]) -> None:
    if found != (version, version - 1):
        raise RequestRejected(
            f"{file}: expected version {version} of {version - 1}, got {found[0]} of {found[1]}"
        )


def _library(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise RequestRejected(
            f"published deltas need {name}, which is not installed: pip install 'ebbtide[delta]'", 501
        ) from error
