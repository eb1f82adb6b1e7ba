"""Checkpoint folders as weight sources: headers first, and every fault found before a tensor is read."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from safetensors.torch import load_file

from ebbtide.formats.stored_tensor import StoredTensor, whole
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.model_executor.loader import CheckpointFile
from ebbtide.srt.weight_sync.disk_source import open_checkpoint, open_folder

ARCHITECTURE = "Qwen3ForCausalLM"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoints") / "sharded", ARCHITECTURE, shards=2)


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint, tmp_path / "copy"))


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


@pytest.mark.parametrize("load_format", [None, "auto", "safetensors"])
def test_a_folder_yields_what_its_headers_say(checkpoint: Path, load_format: str | None) -> None:
    source = open_checkpoint(str(checkpoint), load_format, architecture=ARCHITECTURE)
    expected = {name: tensor for shard in shards(checkpoint) for name, tensor in load_file(shard).items()}
    assert len(shards(checkpoint)) > 1
    assert source.direct is False
    for _ in range(2):
        read = {name: whole(tensor) for name, tensor in source}
        assert [(entry.name, entry.shape, entry.dtype) for entry in source.entries] == [
            (name, tuple(tensor.shape), tensor.dtype) for name, tensor in read.items()
        ]
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name]) for name in expected)
    source.close()


def test_no_path_at_all_is_refused() -> None:
    with pytest.raises(RequestRejected, match="cannot be read: File name too long") as refused:
        open_folder(
            "x" * 300, None, architecture=ARCHITECTURE, describe=lambda _: None, device=torch.device("cpu")
        )
    assert len(refused.value.message) < 300


def test_faults_of_the_folder_are_found_before_anything_is_read(copy: Path) -> None:
    def refusal(path: Path, load_format: str | None = None, architecture: str = ARCHITECTURE) -> str:
        with pytest.raises(RequestRejected) as refused:
            open_checkpoint(str(path), load_format, architecture=architecture)
        assert refused.value.status == 400
        return refused.value.message

    assert "not a folder" in refusal(copy / "nowhere")
    assert "not a folder" in refusal(Path("~nobody-of-this-name"))
    assert "not a folder" in refusal(copy / "config.json")
    assert "'Qwen3ForCausalLM'], the engine runs LlamaForCausalLM" in refusal(
        copy, architecture="LlamaForCausalLM"
    )
    assert "auto, safetensors, pt" in refusal(copy, "dummy")
    assert "holds no weights" in refusal(copy, "pt")

    shard = shards(copy)[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    assert shard.name in refusal(copy)
    shard.write_bytes(b"\xff" * 64)
    assert shard.name in refusal(copy)
    shard.unlink()
    assert shard.name in refusal(copy)

    config = copy / "config.json"
    config.write_text("{")
    assert "config.json" in refusal(copy)
    config.write_text(json.dumps({"architectures": None}))
    assert "names the architectures None" in refusal(copy)
    config.write_text("[]")
    assert "config.json: expected a JSON object, got []" in refusal(copy)
    config.write_bytes(b"\xff" * 100_000)
    assert "config.json cannot be read: 'utf-8' codec" in refusal(copy)
    assert len(refusal(copy)) < 1000
    config.unlink()
    assert "expected a Hugging Face checkpoint folder, it has no config.json" in refusal(copy)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def rewrite(file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:-8] + bytes(8))


def replace(file: Path) -> None:
    other = file.with_suffix(".new")
    other.write_bytes(file.read_bytes())
    other.replace(file)


@pytest.mark.parametrize("change", [Path.unlink, cut, rewrite, replace])
@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
def test_a_file_that_changes_before_it_is_read_is_a_refusal(
    copy: Path, change: Callable[[Path], None], load_format: str
) -> None:
    file = last_file(copy, load_format)
    source = open_checkpoint(str(copy), load_format, architecture=ARCHITECTURE)
    change(file)
    with pytest.raises(RequestRejected, match=file.name) as refusal:
        read_all(source)
    assert refusal.value.status == 400


@pytest.mark.parametrize("change", [cut, rewrite])
@pytest.mark.parametrize("load_format", ["safetensors", "pt"])
def test_a_file_that_changes_while_it_is_read_is_a_refusal(
    copy: Path, change: Callable[[Path], None], load_format: str
) -> None:
    """Where the file is mapped, the process ends here: nothing catches SIGBUS."""
    file = last_file(copy, load_format)
    source = open_checkpoint(str(copy), load_format, architecture=ARCHITECTURE)
    tensors = iter(source)
    last = next(iter(CheckpointFile(file).tensors))
    while next(tensors)[0] != last:
        pass
    change(file)
    with pytest.raises(RequestRejected, match=file.name) as refusal:
        read_all(tensors)
    assert refusal.value.status == 400


def read_all(tensors: Iterable[tuple[str, torch.Tensor | StoredTensor]]) -> None:
    for _, tensor in tensors:
        whole(tensor)


def last_file(folder: Path, load_format: str) -> Path:
    """The file that is read last; rewritten by torch where that is asked for."""
    if load_format == "pt":
        for shard in shards(folder):
            torch.save(load_file(shard), shard.with_suffix(".bin"))
    return sorted(folder.glob("*.bin" if load_format == "pt" else "*.safetensors"))[-1]
