"""Weight sources over folders, for `update_weights_from_disk`: a checkpoint, or versions that were published.

Source: wire_api section 3.3, wire_vllm section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from ebbtide.formats.delta import BITS
from ebbtide.formats.tensor_refs import TensorHeader
from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.hf_folder import folder_of, read_config
from ebbtide.srt.model_executor.loader import Checkpoint
from ebbtide.srt.slices import Slices
from ebbtide.srt.weight_sync.patch import Patch, PatchKind
from ebbtide.srt.weight_sync.published import (
    STATE,
    PublishedDelta,
    PulledState,
    decompress,
    names_of,
    open_files,
    read_chain,
    read_state,
)
from ebbtide.srt.weight_sync.source import WeightSource
from ebbtide.srt.weight_sync.sparse_source import DeltaSource, PlacedPatches, Placing

# A name → shape and dtype of the parameter; None for one that the model does not have.
Describe: TypeAlias = Callable[[str], tuple[tuple[int, ...], torch.dtype] | None]

_COUNT_BYTES = 4


def open_folder(
    model_path: str,
    load_format: str | None,
    *,
    architecture: str,
    describe: Describe,
    device: torch.device,
) -> WeightSource:
    """The source of a folder: the published versions that were pulled into it, else its checkpoint.

    RequestRejected (400): as `open_checkpoint`; or the path is invalid, such as a name that is too long.
    """
    path = Path(model_path)
    try:
        if (path / STATE).is_file() and (pulled := read_state(path)) is not None:
            return open_published(pulled, describe, device)
        return open_checkpoint(model_path, load_format, architecture=architecture)
    except OSError as error:
        raise RequestRejected(f"{model_path[:200]!r} cannot be read: {error.strerror}") from error


def open_checkpoint(model_path: str, load_format: str | None, *, architecture: str) -> WeightSource:
    """Open a local Hugging Face folder: read its config.json and the headers of its tensors, not the data.

    RequestRejected (400): it is missing, incomplete, damaged, or of another architecture.
    """
    path = folder_of(model_path)
    try:
        _check_architecture(path, architecture)
        checkpoint = Checkpoint(path, load_format if load_format is not None else "auto")
    except ConfigurationError as error:
        raise RequestRejected(str(error)) from error
    return WeightSource(list(checkpoint.entries.values()), checkpoint.tensors)


def _check_architecture(path: Path, architecture: str) -> None:
    if not path.is_dir():
        raise RequestRejected(f"{path} is not a folder; expected a Hugging Face checkpoint folder")
    found = read_config(path).get("architectures")
    if not isinstance(found, list) or architecture not in found:
        raise RequestRejected(
            f"{path}/config.json names the architectures {found!r:.200}, the engine runs {architecture}"
        )


@dataclass
class _Changes:
    """Changes of a tensor's bytes: `values` where `mask` is true; without a mask, by exclusive or."""

    values: Tensor
    mask: Tensor | None
    digest: tuple[str, str] | None = None

    def follow(self, later: _Changes) -> None:
        """Add later changes to these."""
        if self.mask is None or later.mask is None:
            self.values ^= later.values
        else:
            self.mask |= later.mask
            self.values = torch.where(later.mask, later.values, self.values)
        self.digest = later.digest if later.digest is not None else self.digest

    def patch(self, entry: TensorHeader, device: torch.device) -> Patch:
        if self.mask is None:
            elements = self.values.view(BITS[entry.dtype.itemsize])
            positions = elements.nonzero()[:, 0]
            values, kind = elements[positions].view(entry.dtype), PatchKind.XOR
        else:
            positions = self.mask.nonzero()[:, 0]
            values, kind = self.values[positions], PatchKind.BYTES
        where, what = positions.to(device), values.to(device)
        return Patch(entry.name, entry.shape, where, what, kind, self.digest)


def open_published(state: PulledState, describe: Describe, device: torch.device) -> DeltaSource:
    """Combine several published versions into one delta. RequestRejected (400): one is missing or damaged."""
    chain = read_chain(state.source_dir, state.base, state.target)
    if len({delta.encoding for delta in chain}) > 1:
        raise RequestRejected("these versions are encoded in several ways: pull one at a time")
    files = [open_files(delta) for delta in chain]
    described = {name: describe(name) for name in names_of(chain)}
    # Tensors that the model does not have get a header too: the check refuses them, unless they are ignored.
    entries = [
        TensorHeader(name, *(found if found is not None else ((), torch.uint8)))
        for name, found in described.items()
    ]
    known = {entry.name: entry for entry in entries if described[entry.name] is not None}

    def decode() -> Slices[Placing]:
        changes = {name: _Changes(torch.empty(0, dtype=torch.uint8), None) for name in described}
        is_new = set(known)
        for delta, opened in zip(chain, files, strict=True):
            for file in opened.values():
                with file.open():
                    for name, stored in file.tensors.items():
                        if name not in known:
                            continue
                        found = _decoded(delta, name, stored.read().numpy().tobytes(), known[name].num_bytes)
                        checksum = delta.checksums.get(name, file.metadata.get(name))
                        if checksum is not None:
                            found.digest = delta.checksum_format, checksum
                        if name in is_new:
                            is_new.remove(name)
                            changes[name] = found
                        else:
                            changes[name].follow(found)
                        yield known[name].num_bytes
        patches = [changes[entry.name].patch(entry, device) for entry in entries]
        return lambda weights: PlacedPatches(patches, weights)

    return DeltaSource(entries, WeightSource((), tuple), decode, base_version=state.base_version)


def _decoded(delta: PublishedDelta, name: str, frame: bytes, num_bytes: int) -> _Changes:
    if delta.encoding == "xor":
        data = bytearray(decompress(frame, num_bytes, name))
        if len(data) != num_bytes:
            raise RequestRejected(
                f"{name[:200]}: the delta is of {len(data)} bytes, the parameter has {num_bytes}: a delta "
                "is of a checkpoint whose dtype is the engine's"
            )
        return _Changes(
            torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8), None
        )
    data = bytearray(decompress(frame, _COUNT_BYTES + 5 * num_bytes, name))
    count = int.from_bytes(data[:_COUNT_BYTES], "little")
    if len(data) != _COUNT_BYTES + 5 * count:
        raise RequestRejected(f"{name[:200]}: {count} positions do not make a delta of {len(data)} bytes")
    mask, values = (torch.zeros(num_bytes, dtype=kind) for kind in (torch.bool, torch.uint8))
    if count:
        end = _COUNT_BYTES * (1 + count)
        positions = torch.frombuffer(data[_COUNT_BYTES:end], dtype=torch.int32).to(torch.int64) & 0xFFFFFFFF
        if int(positions.max()) >= num_bytes:
            raise RequestRejected(
                f"{name[:200]}: byte {int(positions.max())} of a tensor of {num_bytes} bytes"
            )
        mask[positions] = True
        values[positions] = torch.frombuffer(data[end:], dtype=torch.uint8)
    return _Changes(values, mask)
