"""Weights from a trainer on the engine's own GPU: taken from its memory, and let go of before the reply."""

import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_pair
from fixtures.gpu_checkpoint_engine import NUM_BUCKETS, CheckpointEngine
from fixtures.trainer_process import TrainerProcess
from safetensors.torch import load_file

from ebbtide import Engine
from ebbtide.srt.entrypoints.engine import Engine as EngineClass
from ebbtide.srt.errors import RequestRejected
from ebbtide.trainer.payload_encoding import serialize

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

MIB = 1 << 20
# 200 MiB in float32: what is leaked stands out from the steps in which a process takes memory.
WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 8192, "max_position_embeddings": 4096}
NOISE_BYTES = 40 * MIB
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPT = [3, 1, 4, 1, 5]
ALL_ROWS = 10**6
FORMS = [
    ("named", None),
    ("patched", None),
    ("bucket", "flattened_bucket"),
    ("bucket_of_dicts", "flattened_bucket"),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("cuda-updates"), **WIDE)


@pytest.fixture(scope="module")
def shared_engine(checkpoints: tuple[Path, Path]) -> Iterator[EngineClass]:
    with Engine(
        model_path=str(checkpoints[0]),
        device="cuda",
        attention_backend="torch_native",
        max_total_tokens=16_384,
        skip_tokenizer_init=True,
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: EngineClass, checkpoints: tuple[Path, Path]) -> EngineClass:
    """The shared engine with the first checkpoint's weights, whatever the test before left."""
    shared_engine.update_weights_from_disk(str(checkpoints[0]), weight_version="a")
    return shared_engine


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcess]:
    with TrainerProcess("cuda") as process:
        yield process


def assert_holds(engine: EngineClass, checkpoint: Path) -> None:
    """Every weight bit for bit."""
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        assert torch.equal(torch.tensor(engine.get_weights_by_name(name, ALL_ROWS)), tensor), name


def output_ids(engine: EngineClass) -> list[int]:
    output: dict[str, Any] = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
    return list(output["output_ids"])


def used_bytes() -> int:
    """Memory in use on the device, of all processes."""
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return total_bytes - free_bytes


# ------------------------------------------------------------------------------------------------- accepted


@pytest.mark.parametrize(("kind", "load_format"), FORMS)
def test_a_trainer_on_the_same_gpu_may_reuse_its_memory_after_the_reply(
    engine: EngineClass,
    trainer: TrainerProcess,
    checkpoints: tuple[Path, Path],
    kind: str,
    load_format: str | None,
) -> None:
    old = output_ids(engine)
    entry = trainer.send(kind, checkpoints[1] / "model.safetensors")
    reply = engine.update_weights_from_tensor([entry], load_format, weight_version="b")
    trainer.overwrite()
    assert (reply["staged"], reply["committed"], reply["weight_version"]) == (False, True, "b")
    assert_holds(engine, checkpoints[1])
    assert output_ids(engine) != old
    trainer.drop()
    assert trainer.allocated_bytes() == 0


def test_twenty_updates_leave_the_memory_as_it_was(
    engine: EngineClass, trainer: TrainerProcess, checkpoints: tuple[Path, Path]
) -> None:
    def update(number: int) -> None:
        kind, load_format = FORMS[number % 4]
        entry = trainer.send(kind, checkpoints[number % 2] / "model.safetensors")
        engine.update_weights_from_tensor([entry], load_format)
        trainer.drop()

    for number in range(4):
        update(number)
    before = used_bytes()
    for number in range(20):
        update(number)
    assert abs(used_bytes() - before) <= NOISE_BYTES
    assert trainer.allocated_bytes() == 0
    assert_holds(engine, checkpoints[1])


def test_what_a_checkpoint_engine_brings(engine: EngineClass, checkpoints: tuple[Path, Path]) -> None:
    old = output_ids(engine)
    with TemporaryDirectory(prefix="eb-") as folder:  # the path of a Unix socket must be short
        address = f"ipc://{folder}/weights"
        with CheckpointEngine("cuda:0", address, checkpoints[1] / "model.safetensors") as sender:
            reply = engine.update_weights_from_ipc({own_device(): address}, weight_version="b")
            # To the buffer, to each of its fillings, and twice to the end.
            assert sender.answers() == ["taken"] * (NUM_BUCKETS + 3)
    assert (reply["staged"], reply["committed"], reply["weight_version"]) == (True, True, "b")
    assert_holds(engine, checkpoints[1])
    assert output_ids(engine) != old


def own_device() -> str:
    return f"GPU-{torch.cuda.get_device_properties(0).uuid}"


# -------------------------------------------------------------------------------------------------- refused


def assert_refused(engine: EngineClass, checkpoint: Path, entry: str | bytes, message: str) -> None:
    """With status 400; the old weights serve, and tokens come."""
    old = output_ids(engine)
    with pytest.raises(RequestRejected, match=message) as refused:
        engine.update_weights_from_tensor([entry], weight_version="bad")
    assert refused.value.status == 400
    assert engine.weight_version == "a"
    assert output_ids(engine) == old
    assert_holds(engine, checkpoint)


def test_a_trainer_that_has_ended(engine: EngineClass, checkpoints: tuple[Path, Path]) -> None:
    with TrainerProcess("cuda") as trainer:
        entry = trainer.send("named", checkpoints[1] / "model.safetensors")
        trainer.kill()
    assert_refused(engine, checkpoints[0], entry, "cannot be opened .*until the update is answered")


def test_a_storage_that_is_larger_than_its_memory(
    engine: EngineClass, trainer: TrainerProcess, checkpoints: tuple[Path, Path]
) -> None:
    entry = trainer.send("lying", checkpoints[1] / "model.safetensors")
    assert_refused(engine, checkpoints[0], entry, "do not lie in the sender's allocation")
    trainer.drop()
    assert trainer.allocated_bytes() == 0


def test_a_handle_that_is_none(engine: EngineClass, checkpoints: tuple[Path, Path]) -> None:
    weights = load_file(checkpoints[1] / "model.safetensors", device="cuda")
    named = [("model.norm.weight", weights["model.norm.weight"])]
    payload = serialize(named)
    handle = re.compile(rb"(C\x42[\x01-\x09]c).{64}", re.DOTALL)
    garbage, count = handle.subn(lambda match: match[1] + bytes(range(64)), payload)
    assert count == 1
    assert_refused(engine, checkpoints[0], garbage, "cannot be opened")
