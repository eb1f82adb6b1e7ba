"""Tensors that a table lists in a device's memory: planned all at once, and written as one by one."""

import ctypes
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.gpu_memory import UUID, Counters, Gpu
from fixtures.payloads import open_payload
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig

from ebbtide.formats.bucket import FlattenedTensorBucket
from ebbtide.formats.tensor_list import DeviceStorage, Listing
from ebbtide.srt.device import CpuDevice
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.managers.scheduling.write_plan import TensorPlan, WeightStaging, make_plan
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.weight_copies import EXPONENTS, WeightCopies
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.source import PlanCache

Named = list[tuple[str, torch.Tensor]]
NORM = "model.norm.weight"
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"
ROTARY = "model.layers.0.self_attn.rotary_emb.inv_freq"


@pytest.fixture
def named(tmp_path: Path) -> Named:
    """A mixture of experts, each tensor by itself."""
    folder = make_checkpoint(tmp_path / "a", "Qwen3MoeForCausalLM")
    return sorted(load_file(folder / "model.safetensors").items())


class HostCopies:
    """Stands in for the kernel."""

    def __init__(self, spans_S7: NDArray[np.int64], device: torch.device) -> None:
        self.found_S = torch.zeros(len(spans_S7), dtype=torch.int32)
        self._spans = spans_S7.tolist()

    def move(self, source_bytes: int, destination_bytes: int) -> None:
        self.found_S = torch.zeros_like(self.found_S)
        for span in self._spans:
            span[:2] = span[0] + source_bytes, span[1] + destination_bytes

    def launch(self, launch_bytes: int) -> Iterator[int]:
        for number, (source, destination, num_bytes, line_bytes, step_bytes, *looked_for) in enumerate(
            self._spans
        ):
            assert tuple(looked_for) == EXPONENTS[torch.float32]
            line_bytes = line_bytes or num_bytes
            for line in range(num_bytes // line_bytes):
                ctypes.memmove(destination + line * line_bytes, source + line * step_bytes, line_bytes)
            copied = np.frombuffer((ctypes.c_char * num_bytes).from_address(destination), np.float32)
            self.found_S[number] = int(not np.isfinite(copied).all())
            yield num_bytes


@pytest.fixture
def store(
    request: pytest.FixtureRequest, named: Named, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightStore]:
    kernels = "ebbtide.srt.layers.kernels"
    monkeypatch.setitem(sys.modules, f"{kernels}.copy_spans", SimpleNamespace(SpanCopies=HostCopies))
    monkeypatch.setitem(sys.modules, f"{kernels}.fp8.quantize", SimpleNamespace(QuantizedSpans=None))
    config = AutoConfig.from_pretrained(tmp_path / "a")
    model = build_model(config.architectures[0], config, torch.float32, torch.device("cpu"))
    opened = WeightStore(
        model, VirtualMemorySaver(HostVirtualMemory()), group=getattr(request, "param", None)
    )
    yield opened
    opened.arena.close()


def lend(named: Named, gpu: Gpu, counters: Counters) -> bytes:
    """A payload of all of them, by turns in two allocations, behind some bytes of others."""
    rooms, ends, offset_T = [torch.zeros(4 << 20, dtype=torch.uint8) for _ in range(2)], [64, 64], []
    for number, (_, tensor) in enumerate(named):
        at = ends[number % 2]
        place = torch.empty(0, dtype=tensor.dtype)
        place.set_(
            rooms[number % 2].untyped_storage(), at // tensor.itemsize, tensor.shape, tensor.stride()
        ).copy_(tensor)
        offset_T.append(at // tensor.itemsize)
        ends[number % 2] += -(-tensor.nbytes // 64) * 64
    storages = [
        DeviceStorage(
            UUID, gpu.handle(room.untyped_storage()), room.nbytes, 0, counters.name, counters.take()
        )
        for room in rooms
    ]
    storage_T = np.arange(len(named)) % 2
    [data] = Listing(named).encode([storages], storage_T, np.array(offset_T))
    return data


def write(
    store: WeightStore, data: bytes, gpu: Gpu, cache: PlanCache, load_format: str | None = None
) -> tuple[TensorPlan, list[str]]:
    """One update as a GPU's is planned; the names of what was copied in some other way."""
    device = CpuDevice()
    source = open_payload([data], load_format, cuda=gpu, cache=cache)
    incoming = finish(make_plan(source, store, device, cache))
    incoming._is_planned = True
    incoming._copies = WeightCopies(torch.device("cpu"))
    assert incoming.problems == []
    staging = WeightStaging(store, device)
    finish(incoming.open(staging))
    others = list(incoming._others)
    finish(incoming.write(staging))
    incoming.close()
    return incoming, others


def holds(store: WeightStore, name: str, tensor: torch.Tensor) -> bool:
    """Whether this rank holds its part of a tensor."""
    place = store.destination(name, None)
    assert place is not None
    return torch.equal(place.region, place.part_of(tensor).view_as(place.region))


@pytest.mark.parametrize(
    "store", [ParallelGroup(), ParallelGroup(2, 1)], indirect=True, ids=["one rank", "of two"]
)
def test_every_byte_arrives_time_after_time_wherever_the_tensors_lie(
    store: WeightStore, named: Named, gpu: Gpu, counters: Counters
) -> None:
    cache = PlanCache()
    for sign in (1, -1):
        sent = [(name, tensor * sign) for name, tensor in named]
        incoming, others = write(store, lend(sent, gpu, counters), gpu, cache)
        assert (others, incoming.names, incoming.nonfinite()) == ([], store.names, [])
        assert all(holds(store, name, tensor) for name, tensor in sent)
    assert not any(counters.values)


def test_what_is_not_copied_as_it_is_is_written_one_by_one(
    store: WeightStore, named: Named, gpu: Gpu, counters: Counters
) -> None:
    given = dict(named)
    given[EXPERT] = given[EXPERT].t().contiguous().t()
    given[NORM] = given[NORM].double()
    sent = [*given.items(), (ROTARY, torch.zeros(4))]
    cache = PlanCache()
    for _ in range(2):
        incoming, others = write(store, lend(sent, gpu, counters), gpu, cache)
        assert sorted(others) == sorted([EXPERT, NORM, ROTARY])
        assert (incoming.num_tensors, incoming.num_ignored) == (len(named), 1)
        assert all(holds(store, name, tensor) for name, tensor in named)


def test_of_two_tensors_of_one_name_the_later_one_counts(
    store: WeightStore, named: Named, gpu: Gpu, counters: Counters
) -> None:
    later = (NORM, dict(named)[NORM] + 1)
    sent = [*named, later]
    incoming, _ = write(store, lend(sent, gpu, counters), gpu, PlanCache())
    assert holds(store, NORM, later[1])
    assert incoming.names == store.names


def bucket_of(named: Named, gpu: Gpu, num_before: int = 0) -> bytes:
    """A bucket behind so many bytes of its memory."""
    bucket = FlattenedTensorBucket(named)
    room = torch.cat([torch.zeros(num_before, dtype=torch.uint8), bucket.get_flattened_tensor()])
    flat = gpu.share(room[num_before:])
    return pickle.dumps({"flattened_tensor": flat, "metadata": bucket.get_metadata()}, 4)


def test_what_a_bucket_holds_is_planned_at_once_behind_its_event_and_checked_once(
    store: WeightStore, named: Named, gpu: Gpu, counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    check = store.check
    monkeypatch.setattr(store, "check", lambda name, *rest: checked.append(name) or check(name, *rest))
    cache = PlanCache()
    for factor, num_before in ((1, 0), (-1, 0), (2, 48)):
        sent = [(name, tensor * factor) for name, tensor in named]
        data = bucket_of(sent, gpu, num_before)
        incoming, others = write(store, data, gpu, cache, "flattened_bucket")
        assert (others, incoming.names, incoming.nonfinite()) == ([], store.names, [])
        assert all(holds(store, name, tensor) for name, tensor in sent)
    assert gpu.log == [f"{done} {number}" for number in range(3) for done in ("open", "wait", "free")]
    assert checked == [name for name, _ in named]
    assert not any(counters.values)


def test_a_bucket_that_lies_where_nothing_can_be_planned_arrives_too(
    store: WeightStore, named: Named, gpu: Gpu
) -> None:
    cache = PlanCache()
    for factor, num_before in ((1, 0), (-1, 4), (2, 0)):
        sent = [(name, tensor * factor) for name, tensor in named]
        data = bucket_of(sent, gpu, num_before)
        _, others = write(store, data, gpu, cache, "flattened_bucket")
        assert len(others) == (len(named) if num_before else 0)
        assert all(holds(store, name, tensor) for name, tensor in sent)


def test_so_it_arrives_where_a_tensor_begins_between_two_elements(
    store: WeightStore, named: Named, gpu: Gpu
) -> None:
    sent = [(ROTARY, torch.zeros(3, dtype=torch.uint8)), *named]
    write(store, bucket_of(sent, gpu), gpu, PlanCache(), "flattened_bucket")
    assert all(holds(store, name, tensor) for name, tensor in named)


def test_what_was_kept_of_the_engines_own_names_says_nothing_of_a_checkpoints(
    store: WeightStore, gpu: Gpu, counters: Counters
) -> None:
    cache = PlanCache()
    own = [(name, tensor.clone()) for name, tensor in store.parameters()]
    incoming, _ = write(store, lend(own, gpu, counters), gpu, cache, "direct")
    assert incoming.names == store.names
    source = open_payload([lend(own, gpu, counters)], None, cuda=gpu, cache=cache)
    refused = finish(make_plan(source, store, CpuDevice(), cache))
    assert any("no parameter of this name" in problem["reason"] for problem in refused.problems)
    refused.close()


def test_nan_is_told_by_name(store: WeightStore, named: Named, gpu: Gpu, counters: Counters) -> None:
    dict(named)[EXPERT][1, 1] = torch.nan
    incoming, _ = write(store, lend(named, gpu, counters), gpu, PlanCache())
    assert incoming.nonfinite() == [EXPERT]
