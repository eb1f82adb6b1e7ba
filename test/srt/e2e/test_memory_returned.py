"""What the operating system says of an engine's memory: given back, taken again, never leaked.

Real processes, and tags large enough to stand out. Measured on a CPU is the memory that is the scheduler's
alone (anonymous, and shared as far as it maps it): pages of libraries count for less when another process
starts. On a GPU it is what the device has in use, which must be this test's alone.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.gpu_device import DEVICE, device_memory_exhausted
from fixtures.rollouts import buckets
from fixtures.servers import memory_of_process_exhausted
from safetensors.torch import load_file

from ebbtide import Engine
from ebbtide.srt.device import host_memory_info
from ebbtide.srt.entrypoints.engine import Engine as EngineClass
from ebbtide.srt.errors import RequestRejected

MIB = 1 << 20
# On a GPU a tag is to stand out from the steps in which a process takes memory there.
# On a GPU the weights nearly fill chunks of 256 MiB, and the KV cache has more of those than the weights.
INTERMEDIATE_SIZE = 42_656 if DEVICE.is_cuda else 3072
WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": INTERMEDIATE_SIZE}
KV_TOKENS = 1 << (22 if DEVICE.is_cuda else 19)
HEAD_DIM = DEVICE.shape.get("head_dim", 16)
NUM_WEIGHTS = 2 * 1024 * (258 + 2 * 6 * HEAD_DIM + 3 * INTERMEDIATE_SIZE)  # but for the norms
# 2 layers, keys and values of 2 heads. In float32, by heads of 16: 512 bytes per token, 76 MiB of weights.
TAG_BYTES = {
    "weights": NUM_WEIGHTS * DEVICE.dtype.itemsize,
    "kv_cache": KV_TOKENS * 2 * 2 * 2 * HEAD_DIM * DEVICE.dtype.itemsize,
}
# Tags are rounded up to whole chunks.
SIZE_MARGIN = 0.03 if DEVICE.is_cuda else 0.01
# What a cycle may leave behind in a heap that grows in steps, far below the least that a tag would leak.
NOISE_BYTES = (40 if DEVICE.is_cuda else 3) * MIB
# What torch keeps of an update or of the start, on a GPU, until the next release.
CACHE_BYTES = (100 if DEVICE.is_cuda else 0) * MIB
# What is left where there is no room for a tag.
SCANT_BYTES = (64 if DEVICE.is_cuda else 16) * MIB
PROMPTS = [list(range(start, start + 40)) for start in (3, 60, 150)]
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("wide"), "Qwen3ForCausalLM", seed=3, **WIDE, **DEVICE.checkpoint
    )


@pytest.fixture(scope="module")
def trained(wide_checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of the checkpoint after a training step."""
    weights = load_file(wide_checkpoint / "model.safetensors")
    return {name: tensor + 0.05 * torch.ones_like(tensor) for name, tensor in weights.items()}


@pytest.fixture(scope="module")
def shared_engine(wide_checkpoint: Path) -> Iterator[EngineClass]:
    with Engine(
        model_path=str(wide_checkpoint),
        max_total_tokens=KV_TOKENS,
        skip_tokenizer_init=True,
        **DEVICE.server_args,
    ) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: EngineClass, wide_checkpoint: Path) -> EngineClass:
    """The shared engine as it was started, whatever the test before has done."""
    shared_engine.resume_memory_occupation()
    shared_engine.update_weights_from_disk(wide_checkpoint, weight_version="default")
    return shared_engine


def scheduler_of(engine: EngineClass) -> psutil.Process:
    [rank] = engine.memory_occupation()["ranks"]
    return psutil.Process(rank["pid"])


def held_bytes(engine: EngineClass) -> int:
    """Memory of the scheduler and whatever it has started; on a GPU all memory in use there."""
    if DEVICE.is_cuda:
        return DEVICE.used_bytes()
    scheduler = scheduler_of(engine)
    processes = scheduler, *scheduler.children(recursive=True)
    return sum(host_memory_info(process.pid).process_bytes for process in processes)


def handles_held(engine: EngineClass) -> dict[str, Any]:
    """What a leak would add to, other than memory."""
    scheduler = scheduler_of(engine)
    return {
        "descriptors": scheduler.num_fds(),
        "threads": scheduler.num_threads(),
        "processes": len(scheduler.children(recursive=True)),
        "shared memory": sorted(file.name for file in Path("/dev/shm").iterdir() if _is_ours(file.name)),
    }


def _is_ours(name: str) -> bool:
    """Whether torch has made this block in this process: other test runs use the folder too."""
    return name.startswith(f"torch_{psutil.Process().pid}_")


def memory_exhausted(engine: EngineClass) -> AbstractContextManager[None]:
    """Within, the scheduler gets no more than a few MiB."""
    if DEVICE.is_cuda:
        return device_memory_exhausted(SCANT_BYTES)
    return memory_of_process_exhausted(scheduler_of(engine).pid, SCANT_BYTES)


def generate(engine: EngineClass) -> list[list[int]]:
    """One by one: how requests are batched together is chance, and each size of batch takes memory."""
    return [engine.generate(input_ids=prompt, sampling_params=GREEDY)["output_ids"] for prompt in PROMPTS]


def read_all(engine: EngineClass, weights: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Of every weight the first rows, of vectors everything, as the engine has them."""
    return {name: engine.get_weights_by_name(name, _num_rows(tensor)) for name, tensor in weights.items()}


def rows_of(weights: dict[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: tensor[: _num_rows(tensor)].tolist() for name, tensor in weights.items()}


def _num_rows(weight: torch.Tensor) -> int:
    return 3 if weight.ndim > 1 else len(weight)


# ------------------------------------------------------------------------------------------ tag by tag


@pytest.mark.parametrize("tags", [["weights"], ["kv_cache"]], ids="+".join)
def test_a_release_gives_the_memory_of_its_tags_back_and_a_resume_takes_it(
    engine: EngineClass, tags: list[str]
) -> None:
    expected = sum(TAG_BYTES[tag] for tag in tags)
    resident = held_bytes(engine)
    freed = engine.release_memory_occupation(tags)["freed_bytes"]
    assert all(freed[tag] == pytest.approx(TAG_BYTES[tag], rel=SIZE_MARGIN) for tag in tags)
    released = held_bytes(engine)
    # On a GPU torch's cache goes too.
    assert 0.95 * expected <= resident - released <= 1.05 * expected + CACHE_BYTES
    mapped = engine.resume_memory_occupation(tags)["mapped_bytes"]
    assert mapped == freed
    # Before anything touches it: what a resume says is there is there.
    assert -0.05 * expected - CACHE_BYTES <= held_bytes(engine) - resident <= 0.05 * expected


def test_a_sleeping_engine_wakes_in_stages_and_serves_the_new_weights(
    engine: EngineClass, trained: dict[str, torch.Tensor]
) -> None:
    old = generate(engine)
    resident = held_bytes(engine)
    engine.release_memory_occupation()
    asleep = held_bytes(engine)
    engine.resume_memory_occupation(["weights"])
    assert held_bytes(engine) - asleep == pytest.approx(TAG_BYTES["weights"], rel=0.05)
    for bucket in buckets(trained, 4):
        engine.update_weights_from_tensor(list(bucket.items()))
    # Written in place, into memory that was there: the update itself takes none.
    assert held_bytes(engine) - asleep == pytest.approx(TAG_BYTES["weights"], rel=0.05)
    engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
    assert -CACHE_BYTES - NOISE_BYTES <= held_bytes(engine) - resident <= NOISE_BYTES
    assert read_all(engine, trained) == rows_of(trained)
    assert generate(engine) != old


# -------------------------------------------------------------------------------------------- no leaks


def test_ten_cycles_leak_nothing(engine: EngineClass, trained: dict[str, torch.Tensor]) -> None:
    part = buckets(trained, 4)[0]

    def cycle(number: int) -> None:
        engine.release_memory_occupation()
        engine.resume_memory_occupation(["weights"])
        engine.update_weights_from_tensor(list(trained.items()), weight_version=number)
        engine.resume_memory_occupation(["kv_cache", "cuda_graph"])
        # Awake: in a copy, of which the engine fills the rest from the weights that it has.
        assert engine.update_weights_from_tensor(list(part.items()), weight_version=number)["staged"]

    for number in range(2):
        cycle(number)
    expected = generate(engine)
    memory, handles = held_bytes(engine), handles_held(engine)
    address_space = scheduler_of(engine).memory_info().vms
    for number in range(10):
        cycle(number)
    # Before anything is generated: a batch of a new size makes the linear layers compile one product more.
    assert -CACHE_BYTES - NOISE_BYTES <= held_bytes(engine) - memory <= NOISE_BYTES
    assert handles_held(engine) == handles
    if not DEVICE.is_cuda:  # there the driver reserves addresses as it likes
        assert abs(scheduler_of(engine).memory_info().vms - address_space) <= 16 * MIB
    assert generate(engine) == expected


def test_refused_updates_leave_no_memory_behind(
    engine: EngineClass, trained: dict[str, torch.Tensor]
) -> None:
    wrong = {**trained, "model.norm.weight": torch.zeros(3)}
    with pytest.raises(RequestRejected, match=r"model\.norm\.weight"):
        engine.update_weights_from_tensor(list(wrong.items()))
    memory, handles = held_bytes(engine), handles_held(engine)
    for _ in range(5):
        with pytest.raises(RequestRejected, match=r"model\.norm\.weight"):
            engine.update_weights_from_tensor(list(wrong.items()))
    assert abs(held_bytes(engine) - memory) <= NOISE_BYTES
    assert handles_held(engine) == handles


# ------------------------------------------------------------------------------------ no memory to be had


def test_a_resume_without_room_is_refused_with_the_bytes_and_can_be_retried(
    engine: EngineClass, wide_checkpoint: Path
) -> None:
    old = generate(engine)
    engine.release_memory_occupation()
    with memory_exhausted(engine):
        released = held_bytes(engine)
        with pytest.raises(RequestRejected, match="Nothing was resumed") as raised:
            engine.resume_memory_occupation()
        assert raised.value.status == 409
        assert raised.value.fields["needed_bytes"] >= sum(TAG_BYTES.values())
        assert abs(held_bytes(engine) - released) <= NOISE_BYTES
        assert engine.memory_occupation()["tags"]["weights"]["state"] == "released"
    assert engine.resume_memory_occupation()["changed"] is True
    engine.update_weights_from_disk(wide_checkpoint)
    assert generate(engine) == old


def test_an_update_is_staged_though_no_memory_is_free(
    engine: EngineClass, trained: dict[str, torch.Tensor]
) -> None:
    before = held_bytes(engine)
    with memory_exhausted(engine):
        # By buckets that the scheduler can map.
        for bucket in buckets(trained, 25):
            reply = engine.update_weights_from_tensor(list(bucket.items()))
            assert (reply["staged"], reply["content"]) == (True, "valid")
    assert read_all(engine, trained) == rows_of(trained)
    assert abs(held_bytes(engine) - before) <= NOISE_BYTES


# ------------------------------------------------------------------------------------------ what survives


# The last one: the copy in host memory stays.
def test_kept_weights_come_back_bit_for_bit(
    engine: EngineClass, wide_checkpoint: Path, trained: dict[str, torch.Tensor]
) -> None:
    weights = load_file(wide_checkpoint / "model.safetensors")
    old = generate(engine)
    assert engine.memory_occupation()["tags"]["weights"]["backup_bytes"] == 0
    resident = held_bytes(engine)

    engine.release_memory_occupation(backup=True)
    tag = engine.memory_occupation()["tags"]["weights"]
    assert (tag["state"], tag["resident_bytes"], tag["content"]) == ("released", 0, "valid")
    assert tag["backup_bytes"] == pytest.approx(TAG_BYTES["weights"], rel=SIZE_MARGIN)
    engine.resume_memory_occupation()
    assert read_all(engine, weights) == rows_of(weights)
    assert generate(engine) == old

    # The copy is taken once; it follows an update. The margins are for the heap, which the first requests of
    # a kind make grow by some MiB; a second copy would be 76.
    with_backup = held_bytes(engine)
    if DEVICE.is_cuda:
        # The copy is in the host's memory.
        assert -CACHE_BYTES <= with_backup - resident <= NOISE_BYTES
    else:
        assert 0.95 * TAG_BYTES["weights"] <= with_backup - resident <= 1.25 * TAG_BYTES["weights"]
    engine.update_weights_from_tensor(list(trained.items()))
    new = generate(engine)
    assert new != old
    engine.release_memory_occupation(["weights"], backup=True)
    engine.resume_memory_occupation(["weights"])
    assert read_all(engine, weights) == rows_of(trained)
    assert generate(engine) == new
    assert abs(held_bytes(engine) - with_backup) <= 0.25 * TAG_BYTES["weights"]
