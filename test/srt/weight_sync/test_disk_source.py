"""Checkpoint folders as weight sources: headers first, and every fault found before a tensor is read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from safetensors.torch import load_file

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.weight_sync.disk_source import open_checkpoint

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
        read = dict(source)
        assert [(entry.name, entry.shape, entry.dtype) for entry in source.entries] == [
            (name, tuple(tensor.shape), tensor.dtype) for name, tensor in read.items()
        ]
        assert read.keys() == expected.keys()
        assert all(torch.equal(read[name], expected[name]) for name in expected)
    source.close()


def test_faults_of_the_folder_are_found_before_anything_is_read(copy: Path) -> None:
    def refusal(path: Path, load_format: str | None = None, architecture: str = ARCHITECTURE) -> str:
        with pytest.raises(RequestRejected) as refused:
            open_checkpoint(str(path), load_format, architecture=architecture)
        assert refused.value.status == 400
        return refused.value.message

    assert "not a folder" in refusal(copy / "nowhere")
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
    assert "names the architectures None" in refusal(copy)
    config.unlink()
    assert "config.json cannot be read" in refusal(copy)


def test_a_shard_that_vanishes_while_reading_is_a_refusal(copy: Path) -> None:
    source = open_checkpoint(str(copy), None, architecture=ARCHITECTURE)
    shards(copy)[1].unlink()
    with pytest.raises(RequestRejected, match="missing"):
        list(source)
