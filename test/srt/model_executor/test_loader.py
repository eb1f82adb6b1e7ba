"""Checkpoint folders, whole and damaged."""

import json
from pathlib import Path
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
from fixtures.checkpoints import checksum_of, edit_config, make_checkpoint
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ebbtide.srt.config import resolve
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.loader import Checkpoint, load_weights
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.server_args import ServerArgs

NORM = "model.norm.weight"


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "single", "LlamaForCausalLM")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "sharded", "LlamaForCausalLM", shards=3)


def as_torch_files(folder: Path, *, shards: int = 1) -> Path:
    """Rewrite a single-file checkpoint as pytorch_model*.bin."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    weight_map = {name: f"pytorch_model-{i % shards}.bin" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        torch.save({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def open_store(folder: Path) -> WeightStore:
    config = AutoConfig.from_pretrained(folder)
    model = build_model(config.architectures[0], config, torch.float32, torch.device("cpu"))
    return WeightStore(model, VirtualMemorySaver(HostVirtualMemory()))


def rewrite(folder: Path, **changes: torch.Tensor | None) -> Path:
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name: value for name, value in changes.items() if value is not None}
    save_file({name: value for name, value in tensors.items() if changes.get(name, value) is not None}, file)
    return folder


def test_the_index_tells_names_shapes_and_dtypes_without_the_data(sharded: Path, single: Path) -> None:
    expected = load_file(single / "model.safetensors")

    index = Checkpoint(sharded).entries

    assert {name: (entry.shape, entry.dtype) for name, entry in index.items()} == {
        name: (tuple(tensor.shape), tensor.dtype) for name, tensor in expected.items()
    }
    assert len(list(sharded.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("load_format", ["auto", "pt"])
@pytest.mark.parametrize("shards", [1, 2])
def test_torch_files_load_as_safetensors_do(single: Path, load_format: str, shards: int) -> None:
    expected = load_file(single / "model.safetensors")
    as_torch_files(single, shards=shards)

    checkpoint = Checkpoint(single, load_format)
    loaded = {name: tensor.read() for name, tensor in checkpoint.tensors()}

    assert loaded.keys() == checkpoint.entries.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_auto_prefers_safetensors(single: Path) -> None:
    torch.save({NORM: torch.zeros(64)}, single / "pytorch_model.bin")

    assert len(Checkpoint(single).entries) > 1
    assert list(Checkpoint(single, "pt").entries) == [NORM]


def test_dummy_weights_are_small_and_the_same_each_time(single: Path) -> None:
    stores = [open_store(single) for _ in range(2)]
    for store in stores:
        load_weights(store, "no/such/folder", "dummy")

    assert checksum_of(stores[0]) == checksum_of(stores[1])
    assert torch.equal(stores[0].read(NORM, 64)(), torch.ones(64))
    embedding = stores[0].read("model.embed_tokens.weight", 258)()
    assert 0.01 < embedding.std().item() < 0.03


def test_mxfp4_is_widened_as_transformers_does_it(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "GptOssForCausalLM", dtype="bfloat16")
    tensors, scales = load_file(folder / "model.safetensors"), {}
    experts = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    expected = dict(tensors)
    for name in experts:
        num_experts, num_inputs, num_outputs = tensors.pop(name).shape
        packed = (num_experts, num_outputs, num_inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*packed, 16), dtype=torch.uint8)
        scales[f"{name}_scales"] = torch.randint(100, 140, packed, dtype=torch.uint8)
        expected[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], scales[f"{name}_scales"])
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model-1.safetensors")
    save_file(scales, folder / "model-2.safetensors")
    edit_config(folder, dtype=None, quantization_config={"quant_method": "mxfp4"})
    store = open_store(folder)

    load_weights(store, folder, "auto")

    assert resolve(ServerArgs(model_path=str(folder))).model.dtype == "bfloat16"
    assert store.names == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(store.read(name, 10**9)(), tensor.float()), name
    # What ranks take of it.
    for name, stored in Checkpoint(folder).tensors():
        assert stored.shape == tuple(expected[name].shape)
        for dim, size in enumerate(stored.shape):
            part = stored.narrow(dim, size // 4, size // 2)
            assert torch.equal(part.read(), expected[name].narrow(dim, size // 4, size // 2))


def test_a_missing_tensor_is_named(single: Path) -> None:
    rewrite(single, **{NORM: None})

    with pytest.raises(ConfigurationError, match=rf"{single}: 1 tensors are missing: {NORM}"):
        load_weights(open_store(single), single, "auto")


def test_unknown_and_misshapen_tensors_are_named_and_nothing_is_written(single: Path) -> None:
    store = open_store(single)
    load_weights(store, single, "auto")
    checksum = checksum_of(store)
    rewrite(single, **{"model.extra": torch.ones(2), NORM: torch.ones(63)})

    with pytest.raises(ConfigurationError) as refusal:
        load_weights(store, single, "auto")

    assert "model.extra: the model has no parameter of this name" in str(refusal.value)
    assert "model.norm.weight: expected shape [64], got [63]" in str(refusal.value)
    assert checksum_of(store) == checksum


def test_an_index_that_promises_too_much_is_refused(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.ghost"] = next(iter(index["weight_map"].values()))
    file.write_text(json.dumps(index))

    with pytest.raises(ConfigurationError, match=r"lists tensors that the files lack: model\.ghost"):
        Checkpoint(sharded)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "is not an index with a weight_map") for text in ("", "{", "[]", '{"weight_map": 3}')),
        (json.dumps({"weight_map": {NORM: "../single/model.safetensors"}}), "names files outside its folder"),
        (
            json.dumps({"weight_map": {NORM: "no.safetensors"}}),
            "names files that are missing: .*no.safetens",
        ),
    ],
)
def test_a_false_index_is_refused(sharded: Path, text: str, problem: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(text)

    with pytest.raises(ConfigurationError, match=problem):
        Checkpoint(sharded)


def test_a_name_in_two_files_is_refused(single: Path) -> None:
    save_file({NORM: torch.ones(64)}, single / "model-extra.safetensors")

    with pytest.raises(ConfigurationError, match=rf"{NORM} is in both"):
        Checkpoint(single)


@pytest.mark.parametrize("num_bytes", [0, 4, 100, -5])
def test_a_truncated_safetensors_file_is_refused(single: Path, num_bytes: int) -> None:
    file = single / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])

    with pytest.raises(ConfigurationError, match=rf"{file} is not a complete safetensors file"):
        Checkpoint(single)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        *((data, "is not a torch file of tensors") for data in (b"", b"garbage", b"PK\x03\x04 not a zip")),
        ({"weight": Path("/")}, "is not a torch file of tensors"),
        ({"state": {"weight": torch.ones(1)}}, "does not hold a mapping of names to tensors"),
    ],
)
def test_a_torch_file_of_something_else_is_refused_and_runs_no_code(
    single: Path, content: object, problem: str
) -> None:
    file = as_torch_files(single) / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)

    with pytest.raises(ConfigurationError, match=rf"pytorch_model\.bin {problem}"):
        Checkpoint(single)


def test_tensors_of_a_torch_file_may_be_views(single: Path) -> None:
    as_torch_files(single)
    square = torch.arange(12.0).reshape(3, 4)
    views = {"whole": square, "transposed": square.T, "row": square[1], "columns": square[:, 1:3]}
    views |= {"empty": square[3:], "scalar": square[2, 3], "float8": torch.ones(3).to(torch.float8_e4m3fn)}
    torch.save(views, single / "pytorch_model.bin")

    loaded = {name: tensor.read() for name, tensor in Checkpoint(single, "pt").tensors()}

    assert loaded.keys() == views.keys()
    for name, expected in views.items():
        assert loaded[name].dtype == expected.dtype
        assert torch.equal(loaded[name].float(), expected.float()), name


def test_a_compressed_torch_file_is_refused(single: Path) -> None:
    as_torch_files(single)
    file = single / "pytorch_model.bin"
    with ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with ZipFile(file, "w", ZIP_DEFLATED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)

    with pytest.raises(ConfigurationError, match="is compressed"):
        Checkpoint(single, "pt")


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"[]", "not a complete safetensors file"),
        (b'{"w": 3}', "not a complete safetensors file"),
        (b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', "takes 8 bytes, not 4"),
        (b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', "expected natural numbers"),
        (b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}', "no tensor or two begin at byte"),
        (b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}', "end at byte"),
        (b'{"w": {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]}}', "w has the type 'Q4'"),
    ],
)
def test_a_false_safetensors_header_is_refused(tmp_path: Path, header: bytes, problem: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    with pytest.raises(ConfigurationError, match=rf"model\.safetensors.*{problem}"):
        Checkpoint(tmp_path)


def test_folders_without_weights_say_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere is not a folder; expected a Hugging Face"):
        Checkpoint(tmp_path / "nowhere")
    with pytest.raises(ConfigurationError, match=r"expected model\*\.safetensors or pytorch_model\*\.bin"):
        Checkpoint(tmp_path)
    with pytest.raises(ConfigurationError, match=r"holds no weights; expected pytorch_model\*\.bin"):
        Checkpoint(tmp_path, "pt")
    with pytest.raises(ConfigurationError, match="'gguf' is unknown; valid are auto, safetensors, pt"):
        Checkpoint(tmp_path, "gguf")
