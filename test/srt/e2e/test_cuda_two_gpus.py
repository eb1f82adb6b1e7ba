"""One model on two GPUs: what each of them holds, and weights that trainers on both of them bring.

What the driver says of a GPU's memory is said of all its processes: nothing else may run beside these tests.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_pair
from fixtures.deadlines import HANG_S
from fixtures.gpu_checkpoint_engine import NUM_BUCKETS, CheckpointEngine
from fixtures.gpu_device import all_taken, device_memory_exhausted, used_bytes_of
from fixtures.trainer_process import TrainerProcess
from safetensors.torch import load_file

from ebbtide import Engine
from ebbtide.srt.entrypoints.engine import Engine as EngineClass
from ebbtide.srt.errors import RequestRejected

NUM_GPUS = 2
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.cuda.device_count() < NUM_GPUS, reason="needs two CUDA GPUs"),
]

MIB = 1 << 20
# In bfloat16, on each GPU: about 100 MiB of weights, 512 MiB of KV.
WIDE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 16_384, "head_dim": 128}
KV_TOKENS = 1 << 19
# In what steps a process takes memory from the driver, and what torch keeps for activations.
NOISE_BYTES = 40 * MIB
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPT = [3, 1, 4, 1, 5]
FIRST_ROWS = 3
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("two-gpus"), dtype="bfloat16", **WIDE)


@pytest.fixture(scope="module")
def shared_engine(checkpoints: tuple[Path, Path]) -> Iterator[EngineClass]:
    with Engine(
        model_path=str(checkpoints[0]),
        device="cuda",
        tp_size=NUM_GPUS,
        max_total_tokens=KV_TOKENS,
        skip_tokenizer_init=True,
        log_level="warning",
    ) as engine:
        # With the first one goes what the start has left in torch's allocator.
        engine.release_memory_occupation(["kv_cache"])
        yield engine


@pytest.fixture
def engine(shared_engine: EngineClass, checkpoints: tuple[Path, Path]) -> EngineClass:
    """The shared engine with the first checkpoint's weights, whatever the test before left."""
    shared_engine.resume_memory_occupation()
    shared_engine.update_weights_from_disk(str(checkpoints[0]), weight_version="a")
    return shared_engine


@pytest.fixture(scope="module")
def trainers() -> Iterator[list[TrainerProcess]]:
    """By the rank that each has an entry for: its tensors are on the other rank's GPU."""
    if not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs GPUs that read each other's memory")
    with TrainerProcess("cuda:1") as first, TrainerProcess("cuda:0") as second:
        yield [first, second]


def assert_holds(engine: EngineClass, checkpoint: Path) -> None:
    """The first rows of every weight, of vectors everything, bit for bit; and the last matrix whole."""
    for name, tensor in load_file(checkpoint / WEIGHTS).items():
        num_rows = len(tensor) if tensor.ndim == 1 or name == "lm_head.weight" else FIRST_ROWS
        held = torch.tensor(engine.get_weights_by_name(name, num_rows))
        assert torch.equal(held, tensor[:num_rows].float()), name


def output_ids(engine: EngineClass) -> list[int]:
    output: dict[str, Any] = engine.generate(input_ids=PROMPT, sampling_params=GREEDY)
    return list(output["output_ids"])


def used_bytes() -> list[int]:
    """Of each GPU."""
    return [used_bytes_of(index) for index in range(NUM_GPUS)]


# --------------------------------------------------------------------------------------------------- memory


def test_each_gpu_gets_its_own_share_back_and_gives_it_again(
    engine: EngineClass, checkpoints: tuple[Path, Path]
) -> None:
    old, tags = output_ids(engine), ["weights", "kv_cache"]
    ranks = engine.memory_occupation()["ranks"]
    shares = [sum(rank["tags"][tag]["virtual_bytes"] for tag in tags) for rank in ranks]
    assert all(share > 2 * NOISE_BYTES for share in shares)
    resident = used_bytes()
    freed = engine.release_memory_occupation(tags)
    assert [sum(rank["freed_bytes"].values()) for rank in freed["ranks"]] == shares
    for before, after, share in zip(resident, used_bytes(), shares, strict=True):
        assert before - after == pytest.approx(share, abs=NOISE_BYTES)
    mapped = engine.resume_memory_occupation(tags)
    assert [sum(rank["mapped_bytes"].values()) for rank in mapped["ranks"]] == shares
    for before, after in zip(resident, used_bytes(), strict=True):
        assert after == pytest.approx(before, abs=NOISE_BYTES)
    engine.update_weights_from_disk(str(checkpoints[0]))
    assert output_ids(engine) == old


def test_where_one_gpu_has_no_room_neither_resumes(
    engine: EngineClass, checkpoints: tuple[Path, Path]
) -> None:
    old = output_ids(engine)
    engine.release_memory_occupation()
    # Not the whole of the other's memory is needed: what the pool takes is enough.
    free_bytes, _ = torch.cuda.mem_get_info(1)
    hog = torch.empty(free_bytes - 256 * MIB, dtype=torch.uint8, device="cuda:1")
    asleep = used_bytes()
    with pytest.raises(RequestRejected, match=r"^rank 1: .*Nothing was resumed") as refused:
        engine.resume_memory_occupation()
    assert refused.value.status == 409
    for before, after in zip(asleep, used_bytes(), strict=True):
        assert after == pytest.approx(before, abs=NOISE_BYTES)
    del hog
    torch.cuda.empty_cache()
    engine.resume_memory_occupation()
    engine.update_weights_from_disk(str(checkpoints[0]))
    assert output_ids(engine) == old


def test_while_one_gpu_is_full_requests_wait_and_then_have_their_tokens(engine: EngineClass) -> None:
    old = output_ids(engine)
    # What passes have left in torch's allocator goes back with the cache.
    engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation(["kv_cache"])
    with ThreadPoolExecutor(1) as thread:
        with device_memory_exhausted(64 * MIB, "cuda:1"), all_taken(MIB, "cuda:1"):
            answer = thread.submit(output_ids, engine)
            with pytest.raises(TimeoutError):
                answer.result(2)
        # In bfloat16 a prompt that comes in smaller pieces may go on otherwise.
        assert len(answer.result(HANG_S)) == len(old)
    assert output_ids(engine) == old


# ------------------------------------------------------------------------------------------- from their GPUs


def test_each_rank_reads_its_entry_on_the_other_gpu(
    engine: EngineClass, trainers: list[TrainerProcess], checkpoints: tuple[Path, Path]
) -> None:
    entries = [trainer.send("named", checkpoints[1] / WEIGHTS) for trainer in trainers]
    reply = engine.update_weights_from_tensor(entries, weight_version="b")
    for trainer in trainers:
        trainer.overwrite()
    assert (reply["staged"], reply["committed"], reply["weight_version"]) == (False, True, "b")
    assert_holds(engine, checkpoints[1])
    for trainer in trainers:
        trainer.drop()
        assert trainer.allocated_bytes() == 0


def test_an_entry_that_one_rank_cannot_read_is_read_by_none(
    engine: EngineClass, trainers: list[TrainerProcess], checkpoints: tuple[Path, Path]
) -> None:
    old = output_ids(engine)
    entries = [
        trainer.send(kind, checkpoints[1] / WEIGHTS)
        for trainer, kind in zip(trainers, ("named", "lying"), strict=True)
    ]
    with pytest.raises(RequestRejected, match=r"^rank 1: .*do not lie in the sender's allocation"):
        engine.update_weights_from_tensor(entries, weight_version="bad")
    assert engine.weight_version == "a"
    assert_holds(engine, checkpoints[0])
    assert output_ids(engine) == old
    for trainer in trainers:
        trainer.drop()
        assert trainer.allocated_bytes() == 0, "the references were given back on both"


def test_each_rank_hears_its_own_checkpoint_engine(
    engine: EngineClass, checkpoints: tuple[Path, Path]
) -> None:
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(NUM_GPUS)]
    with TemporaryDirectory(prefix="eb-") as folder:
        first, second = (
            CheckpointEngine(f"cuda:{index}", f"ipc://{folder}/{index}", checkpoints[1] / WEIGHTS)
            for index in range(NUM_GPUS)
        )
        with first, second:
            handles = {f"GPU-{uuid}": each.address for uuid, each in zip(uuids, (first, second), strict=True)}
            reply = engine.update_weights_from_ipc(handles, weight_version="ipc")
            for each in (first, second):
                # To the buffer, to each of its fillings, and twice to the end.
                assert each.answers() == ["taken"] * (NUM_BUCKETS + 3)
    assert (reply["committed"], reply["weight_version"]) == (True, "ipc")
    assert_holds(engine, checkpoints[1])
