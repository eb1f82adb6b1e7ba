"""Published versions: which are ready and which cannot be, and the note of what was pulled."""

import json
from pathlib import Path
from typing import Any

import pytest

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.published import (
    INDEX,
    STATE,
    PulledState,
    manifest_of,
    read_chain,
    read_state,
    version_folder,
    write_state,
)


def test_what_was_pulled_is_noted_and_a_whole_copy_of_another_engines_is_a_folder(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    state = PulledState(tmp_path / "source", "default", 0, 7)
    write_state(tmp_path, state)
    assert read_state(tmp_path) == state
    (tmp_path / STATE).write_text('{"version": "000007"}')
    assert read_state(tmp_path) is None
    (tmp_path / STATE).write_text("{")
    with pytest.raises(RequestRejected, match="cannot be read"):
        read_state(tmp_path)


PART = {"weight_map": {"w": "part.safetensors"}}
TOLD = {"version": "1", "base_version": "0", "delta_encoding": "xor"}
TOLD |= {"compression_format": "zstd", "checksum_format": "xxh3-128"}
ENTRY = {"name": "w", "payload_key": "w", "payload_file": "part.safetensors", "checksum": "0"}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"metadata": {**TOLD, "base_version": "7"}, **PART}, "expected version 1 of 0, got 1 of 7"),
        ({"metadata": {**TOLD, "delta_encoding": "gzip"}, **PART}, "expected xor or overwrite"),
        ({"metadata": {**TOLD, "checksum_format": ["md5"]}, **PART}, "expected xor or overwrite, zstd, and "),
        ({"metadata": {**TOLD, "version": None}, **PART}, "cannot be read"),
        ({"metadata": TOLD, "weight_map": ["part.safetensors"]}, "cannot be read"),
        ({"metadata": TOLD, "weight_map": {"w": "../part.safetensors"}}, "names of files of this folder"),
        ({"metadata": {}, **PART}, "is a whole checkpoint"),
        (None, "version 1 is not ready"),
    ],
)
def test_an_index_that_cannot_be_is_refused(tmp_path: Path, index: Any, message: str) -> None:
    folder = version_folder(tmp_path, 1)
    folder.mkdir()
    if index is not None:
        (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(RequestRejected, match=message):
        read_chain(tmp_path, 0, 1)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"version": 2}, "expected version 1 of 0, got 2 of 0"),
        ({"tensors": None}, "cannot be read"),
        ({"tensors": [{**ENTRY, "payload_key": "x"}]}, "the names of tensors as their keys"),
        ({"tensors": [{**ENTRY, "payload_file": "a/b"}]}, "expected files of this folder"),
        (
            {"tensors": [ENTRY, {**ENTRY, "name": "v", "payload_key": "v", "checksum_algorithm": None}]},
            "None",
        ),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(tmp_path: Path, told: Any, message: str) -> None:
    file = manifest_of(tmp_path, 1)
    file.parent.mkdir()
    file.write_text(json.dumps({"version": 1, "base_version": 0, "tensors": [ENTRY], **told}))
    with pytest.raises(RequestRejected, match=message):
        read_chain(tmp_path, 0, 1)


# The manifest of the last one is there, and no number between is tried before the first is missed.
@pytest.mark.parametrize("published", [False, True])
def test_a_chain_without_its_first_link_is_refused_at_once(tmp_path: Path, published: bool) -> None:
    if published:
        manifest_of(tmp_path, 10**15).parent.mkdir()
        manifest_of(tmp_path, 10**15).touch()
    with pytest.raises(RequestRejected, match="delta-00000001" if published else "version 1 is not ready"):
        read_chain(tmp_path, 0, 10**15)
