"""`Engine` and tensors of the caller's on the engine's GPU: read where they are, and let go of."""

import gc
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.deadlines import HANG_S, wait_until
from fixtures.gpu_device import all_taken, device_memory_exhausted
from safetensors.torch import load_file

from ebbtide import Engine
from ebbtide.srt.entrypoints.engine import Engine as EngineClass
from ebbtide.srt.errors import RequestRejected

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ALL_ROWS = 10**6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("cuda-engine") / "model", "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def shared_engine(checkpoint: Path) -> Iterator[EngineClass]:
    with Engine(
        model_path=str(checkpoint),
        device="cuda",
        attention_backend="torch_native",
        max_total_tokens=4096,
        skip_tokenizer_init=True,
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: EngineClass, checkpoint: Path) -> EngineClass:
    shared_engine.update_weights_from_disk(str(checkpoint))
    return shared_engine


@pytest.fixture
def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Others than the checkpoint's, on the GPU."""
    tensors = load_file(checkpoint / "model.safetensors", device="cuda")
    return {name: torch.rand_like(tensor) for name, tensor in tensors.items()}


@pytest.fixture
def no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ebbtide.trainer.payload_encoding.serialize_tensors", lambda _: pytest.fail("the tensors were copied")
    )


def assert_holds(engine: EngineClass, weights: dict[str, torch.Tensor]) -> None:
    for name, tensor in weights.items():
        found = torch.tensor(engine.get_weights_by_name(name, ALL_ROWS))
        assert torch.equal(found, tensor.detach().float().cpu()), name


@pytest.mark.usefixtures("no_copies")
@pytest.mark.parametrize("form", ["tensors", "parameters", "computed", "slices"])
def test_pairs_of_the_engines_gpu_are_read_where_they_are(
    engine: EngineClass, weights: dict[str, torch.Tensor], form: str
) -> None:
    sent: dict[str, Any] = weights
    if form == "parameters":
        sent = {name: torch.nn.Parameter(tensor) for name, tensor in weights.items()}
    elif form == "computed":
        sent = {name: tensor.requires_grad_() * 2 for name, tensor in weights.items()}
    elif form == "slices":
        flat = torch.cat([tensor.flatten() for tensor in weights.values()])
        parts = flat.split([tensor.numel() for tensor in weights.values()])
        sent = {
            name: part.view(tensor.shape) for (name, tensor), part in zip(weights.items(), parts, strict=True)
        }
    addresses = [tensor.data_ptr() for tensor in sent.values()]
    body = engine.update_weights_from_tensor(sent.items(), weight_version="new")
    assert (body["weight_version"], body["num_tensors"]) == ("new", len(sent))
    assert_holds(engine, sent)
    assert [tensor.data_ptr() for tensor in sent.values()] == addresses


@pytest.mark.usefixtures("no_copies")
def test_what_another_stream_computes_is_awaited(
    engine: EngineClass, weights: dict[str, torch.Tensor]
) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10**9)  # cycles: half a second
        for tensor in weights.values():
            tensor.fill_(0.5)
        engine.update_weights_from_tensor(weights.items())
    assert_holds(engine, {name: torch.full_like(tensor, 0.5) for name, tensor in weights.items()})


@pytest.mark.usefixtures("no_copies")
def test_the_same_tensors_can_be_sent_for_ever_and_are_freed_at_their_end(
    engine: EngineClass, weights: dict[str, torch.Tensor]
) -> None:
    gc.collect()
    num_files = len(counter_files())
    allocated = torch.cuda.memory_allocated()
    # A file has 10,000 counters: had they been kept, there would be two more.
    for _ in range(20_000 // len(weights) + 1):
        engine.update_weights_from_tensor(weights.items())
    for _ in range(3):
        with pytest.raises(RequestRejected, match="pause_mode"):  # refused before it is sent
            engine.update_weights_from_tensor(weights.items(), pause_mode="later")
        with pytest.raises(RequestRejected, match="do not fit"):
            engine.update_weights_from_tensor([("no.such.weight", weights["model.norm.weight"])])
    assert len(counter_files()) <= num_files + 1
    assert torch.cuda.memory_allocated() == allocated
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    weights.clear()
    gc.collect()
    torch.cuda.ipc_collect()
    assert torch.cuda.memory_allocated() <= allocated - num_bytes


def counter_files() -> set[Path]:
    """Those in which this process counts the references that it has handed out."""
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


def test_expandable_segments_are_copied(
    engine: EngineClass, weights: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    torch.cuda.empty_cache()
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    try:
        # Larger than any block that the allocator may have left.
        block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
        norm = block[:256].view(torch.float32).fill_(0.25)
        with caplog.at_level(logging.WARNING):
            engine.update_weights_from_tensor([("model.norm.weight", norm)])
            engine.update_weights_from_tensor([("model.norm.weight", norm)])
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    assert engine.get_weights_by_name("model.norm.weight", 1) == [0.25]
    assert sum("expandable segment" in record.message for record in caplog.records) == 1


def test_a_long_prompt_is_answered_though_others_have_taken_all_memory_beside_the_engine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # Of 3,000 tokens a layer has 800 MB of activations.
    shape = {"intermediate_size": 32_768, "max_position_embeddings": 4096}
    request: dict[str, Any] = {
        "input_ids": [index * 7 % 250 for index in range(3000)],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True},
    }
    logged = ""

    def has_failed() -> bool:
        nonlocal logged
        logged += capfd.readouterr().err
        return "a forward pass found too little device memory" in logged

    with (
        Engine(
            model_path=str(make_checkpoint(tmp_path / "model", "Qwen3ForCausalLM", **shape)),
            device="cuda",
            attention_backend="torch_native",
            max_total_tokens=8192,
            disable_radix_cache=True,
            skip_tokenizer_init=True,
            log_level="warning",
        ) as engine,
        ThreadPoolExecutor(1) as thread,
    ):
        expected = engine.generate(**request)["output_ids"]
        # What passes have left in torch's allocator goes back with the cache.
        engine.release_memory_occupation(["kv_cache"])
        engine.resume_memory_occupation(["kv_cache"])
        with device_memory_exhausted(64 << 20), all_taken(4 << 20):
            answer = thread.submit(engine.generate, **request)
            wait_until(has_failed)
        assert answer.result(HANG_S)["output_ids"] == expected
        assert engine.generate(**request)["output_ids"] == expected
