"""Payloads that a trainer makes with the package, in a process of its own: their names, and what arrives."""

import base64
import io
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.compat import COMPAT_ENVIRONMENT
from fixtures.forking import run_script
from fixtures.payloads import open_payload
from fixtures.trainer_process import TrainerProcess, sample_tensors

from ebbtide.formats.stored_tensor import whole
from ebbtide.srt.config import ONE_RANK, Place
from ebbtide.trainer.payload_encoding import serialize_tensors

# A trainer that answers each line, a kind of payload, with that payload.
TRAINER = """
import sys
import torch
from sglang.srt.model_executor.model_runner import LocalSerializedTensor
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
sys.path.append(sys.argv[1])
from fixtures.trainer_process import sample_tensors

held = None
for line in sys.stdin:
    tensors = sample_tensors()
    match line.strip():
        case "named":
            held = tensors
        case "patched":
            monkey_patch_torch_reductions()
            monkey_patch_torch_reductions()
            held = tensors
        case "bucket":
            bucket = FlattenedTensorBucket(named_tensors=tensors)
            held = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        case "empty":
            held, bucket = [], None
        case "local":
            held = [tensors, [(name, tensor.detach() + 1) for name, tensor in tensors]]
            serialize = MultiprocessingSerializer.serialize
            values = [[serialize(tensor) for _, tensor in rank] for rank in held]
            named = [
                (name, LocalSerializedTensor(values=[rank[index] for rank in values]))
                for index, (name, _) in enumerate(tensors)
            ]
            print(serialize(named, output_str=True), flush=True)
            continue
    print(MultiprocessingSerializer.serialize(held, output_str=True), flush=True)
"""
DTYPES = {"bfloat16", "float16", "float32", "float64", "int64", "uint8"}
# wire_api section 4.3, to the letter.
CPU_TENSORS = {
    "torch.Tensor",
    "torch.nn.parameter.Parameter",
    "torch.Size",
    "torch.storage.UntypedStorage",
    "torch.multiprocessing.reductions.rebuild_tensor",
    "torch.multiprocessing.reductions.rebuild_typed_storage",
    "torch.multiprocessing.reductions.rebuild_storage_filename",
} | {f"torch.{name}" for name in DTYPES}


@pytest.fixture(scope="module")
def trainer() -> Iterator[TrainerProcess]:
    with TrainerProcess(str(Path(__file__).parents[1] / "srt"), TRAINER, COMPAT_ENVIRONMENT) as trainer:
        yield trainer


class Names(pickle.Unpickler):
    """Notes the globals of a pickle; puts a thing that takes any arguments in their places."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.found: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.found.add(f"{module}.{name}")
        return type(name, (), {"__init__": lambda self, *arguments: None})


def globals_of(payload: str) -> set[str]:
    names = Names(base64.b64decode(payload))
    names.load()
    return names.found


def check_arrives(payload: str, load_format: str | None, add: int = 0, place: Place = ONE_RANK) -> None:
    source = open_payload([payload] * place.tp_size, load_format, place=place)
    received = {name: whole(tensor).clone() for name, tensor in source}
    source.close()
    assert list(received) == [name for name, _ in sample_tensors()]
    for name, tensor in sample_tensors():
        expected = tensor.detach() + add if add else tensor.detach()
        assert received[name].dtype == expected.dtype
        assert torch.equal(received[name], expected), name


@pytest.mark.parametrize("kind", ["named", "patched"])
def test_named_tensors_are_those_of_torch(trainer: TrainerProcess, kind: str) -> None:
    payload = trainer.send(kind)
    assert payload.startswith("gASV")
    assert globals_of(payload) == CPU_TENSORS
    check_arrives(payload, None)


def test_buckets_name_their_index_as_sglang_does(trainer: TrainerProcess) -> None:
    payload = trainer.send("bucket")
    own = {"sglang.srt.weight_sync.tensor_bucket.FlattenedTensorMetadata"}
    assert globals_of(payload) - CPU_TENSORS == own
    check_arrives(payload, "flattened_bucket")


def test_each_rank_finds_its_own_tensor(trainer: TrainerProcess) -> None:
    payload = trainer.send("local")
    assert globals_of(payload) == {
        "sglang.srt.model_executor.model_runner_components.weight_updater.LocalSerializedTensor"
    }
    for tp_rank in (0, 1):
        check_arrives(payload, None, add=tp_rank, place=replace(ONE_RANK, tp_rank=tp_rank, tp_size=2))


def test_nothing_stays_in_shared_memory_and_tensors_outlive_the_senders(trainer: TrainerProcess) -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    trainer.send("empty")
    payload = trainer.send("named")
    assert trainer.shared_objects() != set()
    decoded: Any = MultiprocessingSerializer.deserialize(payload)
    trainer.send("empty")
    assert trainer.shared_objects() == set()
    assert torch.equal(dict(decoded)["plain"], dict(sample_tensors())["plain"])


def test_a_table_of_tensors_is_taken_apart_too() -> None:
    from sglang.srt.utils import MultiprocessingSerializer

    tensors = [("a", torch.arange(6.0).reshape(2, 3)), ("b", torch.arange(3))]
    with serialize_tensors(tensors) as sent:
        decoded = MultiprocessingSerializer.deserialize(sent.payload)
    assert [name for name, _ in decoded] == ["a", "b"]
    assert all(torch.equal(dict(decoded)[name], tensor) for name, tensor in tensors)


FOREIGN = """
import torch
from torch.multiprocessing import reductions

# A framework's own copy of the patch, which knows CUDA tensors only.
def foreign(tensor):
    rebuild, arguments = reductions._reduce_tensor_original(tensor)
    return rebuild, (*arguments[:6], str(arguments[6]), *arguments[7:])

reductions._reduce_tensor_original = reductions.reduce_tensor
reductions._rebuild_cuda_tensor_original = reductions.rebuild_cuda_tensor
reductions.reduce_tensor = foreign
reductions.rebuild_cuda_tensor = lambda *arguments: None
reductions.init_reductions()

from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.patch_torch import _rebuild_cuda_tensor_modified, monkey_patch_torch_reductions
monkey_patch_torch_reductions()
monkey_patch_torch_reductions()
tensor = torch.arange(3.0)
print(MultiprocessingSerializer.deserialize(MultiprocessingSerializer.serialize(tensor)).tolist())

def original(tensor):
    return reductions.rebuild_cuda_tensor, tuple(range(6)) + (0,) + tuple(range(7, 15))

class Properties:
    uuid = "3c1f9e0a-0000-4000-8000-0123456789ab"

reductions._reduce_tensor_original = original
torch.get_device_module("cuda").get_device_properties = lambda index: Properties
rebuild, arguments = reductions.reduce_tensor(tensor)
assert rebuild is _rebuild_cuda_tensor_modified
print(arguments[6], arguments[:6], arguments[7:])
"""


def test_the_patch_takes_over_from_a_frameworks_own() -> None:
    done = run_script(FOREIGN)
    assert done.returncode == 0, done.stderr
    on_cpu, on_gpu = done.stdout.splitlines()
    assert on_cpu == "[0.0, 1.0, 2.0]"
    uuid = "3c1f9e0a-0000-4000-8000-0123456789ab"
    assert on_gpu == f"{uuid} {tuple(range(6))} {tuple(range(7, 15))}"


TWO_RANKS = """
import asyncio, sys
from dataclasses import replace
import torch, torch.multiprocessing
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from ebbtide.srt.config import ONE_RANK
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.tensor_source import PayloadReader
from sglang.srt.weight_sync.utils import update_weights

class Engine:
    async def update_weights_from_tensor(self, request):
        assert (len(request.serialized_named_tensors), request.flush_cache) == (2, False)
        seen = []
        for rank in range(2):
            entries = request.serialized_named_tensors
            place = replace(ONE_RANK, tp_rank=rank, tp_size=2)
            source = finish(PayloadReader(place).open(entries, request.load_format))
            seen.append({name: tensor.read().tolist() for name, tensor in source})
            source.close()
        return seen

def rank_of_trainer(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "infer_tp"))
    whole = torch.arange(4.0)
    sharded = distribute_tensor(whole, mesh["infer_tp"], [Shard(0)])
    batch = [("sharded", torch.nn.Parameter(sharded)), ("own", torch.tensor([float(rank)]))]
    engine = Engine() if rank == 0 else None
    answer = asyncio.run(update_weights(engine, batch, "infer_tp", mesh, flush_cache=False))
    sys.stdout.write(f"{rank} {answer}\\n")  # In one piece: the other rank writes too.
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
"""


def test_a_sharded_trainer_sends_every_ranks_tensors_as_one_update(tmp_path: Path) -> None:
    module = tmp_path / "two_ranks.py"
    module.write_text(TWO_RANKS)
    script = f"import sys; sys.path.append({str(tmp_path)!r})\nimport two_ranks\n"
    # Forked, they need not import again what takes most of the time.
    script += "two_ranks.torch.multiprocessing.start_processes(two_ranks.rank_of_trainer, "
    script += f"args=({str(tmp_path / 'rendezvous')!r},), nprocs=2, start_method='fork')"
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    whole = [0.0, 1.0, 2.0, 3.0]
    assert lines == [f"0 {[{'sharded': whole, 'own': [0.0]}, {'sharded': whole, 'own': [1.0]}]}", "1 None"]
