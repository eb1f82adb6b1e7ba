"""Requests built from loose fields: what is refused, and how; what is ignored; what stands for what."""

from typing import Any

import pytest
import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.control_client import build_request
from ebbtide.srt.managers.io_struct import (
    ControlRequest,
    FlushCacheReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
    PauseMode,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput as FromDisk,
    UpdateWeightsFromDistributedReqInput as FromDistributed,
    UpdateWeightsFromTensorReqInput as FromTensor,
)
from ebbtide.srt.memory_saver import MemoryTag

GROUP = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2}
MOST_NAMES = ["a"] * 2**18


def nested() -> list[Any]:
    entry: list[Any] = []
    for _ in range(100_000):
        entry = [entry]
    return entry


@pytest.mark.parametrize(
    ("kind", "fields", "parts"),
    [
        (ReleaseMemoryOccupationReqInput, {"tags": ["kv"]}, ["'kv'", "$.tags[0]", *MemoryTag]),
        (PauseGenerationReqInput, {"mode": "hard"}, ["'hard'", "$.mode", *PauseMode]),
        (PauseGenerationReqInput, {"timeout_s": "soon"}, ["float", "str", "$.timeout_s"]),
        (FlushCacheReqInput, {"timeout_s": [1]}, ["float", "array", "$.timeout_s"]),
        (FlushCacheReqInput, {"timeout_s": -1}, ["`float` >= 0.0", "$.timeout_s"]),
        (InitWeightsUpdateGroupReqInput, {**GROUP, "timeout_s": 0}, ["`float` > 0.0", "$.timeout_s"]),
        (FromDisk, {"model_path": "a", "canary": {"input_ids": [1]}}, ["length >= 2", "$.canary"]),
        (FromTensor, {}, ["serialized_named_tensors"]),
        (FromTensor, {"serialized_named_tensors": ["!"]}, ["base64"]),
        (
            FromTensor,
            {"serialized_named_tensors": ["gAR"]},
            ["base64", "[0]", "expected the standard alphabet, with padding"],
        ),
        (
            FromTensor,
            {"serialized_named_tensors": [], "selector": "half"},
            ["'half'", "target", "all"],
        ),
        (InitWeightsUpdateGroupReqInput, {**GROUP, "backend": "mpi"}, ["expected one of nccl, gloo"]),
        # Numbers that neither JSON nor the messages between processes have room for.
        (GetWeightsByNameReqInput, {"name": "a", "truncate_size": 2**63}, ["at `$.truncate_size`"]),
        (FromDistributed, {"shapes": [[1], [2, -(2**63) - 1]]}, ["at `$.shapes[1][1]`"]),
        (FromDisk, {"model_path": "a", "manifest": {"b": [10**30]}}, ["at `$.manifest.b[0]`"]),
        (FromDisk, {"model_path": "a", "weight_version": 10**30}, ["at `$.weight_version`"]),
        (FlushCacheReqInput, {"timeout_s": float("inf")}, ["at `$.timeout_s`"]),
        (FlushCacheReqInput, {"timeout_s": float("nan")}, ["at `$.timeout_s`"]),
        (
            FromDistributed,
            {"names": [*MOST_NAMES, "a"]},
            ["at most 262144 entries, got 262145", "$.names"],
        ),
        (FromDisk, {"model_path": "a", "manifest": nested()}, ["nested too deeply"]),
    ],
    ids=range(20),
)
def test_what_does_not_fit_says_what_was_expected(
    kind: type[ControlRequest], fields: dict[str, Any], parts: list[str]
) -> None:
    with pytest.raises(RequestRejected) as caught:
        build_request(kind, fields)
    assert caught.value.status == 400
    assert all(part in caught.value.message for part in parts), caught.value.message


def test_the_largest_fit_and_base64_becomes_bytes() -> None:
    fields = {"name": "a", "truncate_size": 2**63 - 1}
    assert build_request(GetWeightsByNameReqInput, fields)[0].truncate_size == 2**63 - 1
    assert len(build_request(FromDistributed, {"names": MOST_NAMES})[0].names) == 2**18
    request, _ = build_request(FromTensor, {"serialized_named_tensors": ["gAQ="]})
    assert request.serialized_named_tensors == [b"\x80\x04"]


def test_null_means_not_given_and_unknown_fields_are_named_and_not_looked_at() -> None:
    request, ignored = build_request(PauseGenerationReqInput, {"mode": None, "zeal": 10**30, "about": 2})
    assert (request, ignored) == (PauseGenerationReqInput(), ["about", "zeal"])
    fields = {"model_path": "a", "is_async": "maybe", "token_step": "seven", "keep_pause": 3}
    assert build_request(FromDisk, fields)[1] == [], "these mean something to others"
    _, ignored = build_request(FlushCacheReqInput, {"a" * 10**6: 1, **{f"b{i}": 1 for i in range(1000)}})
    assert (len(ignored), ignored[0]) == (100, "a" * 200)


@pytest.mark.parametrize(
    ("kind", "fields", "meant"),
    [
        (ReleaseMemoryOccupationReqInput, {"tag": ["kv_cache"]}, "tags"),
        (ReleaseMemoryOccupationReqInput, {"Tags": ["kv_cache"], "tags": None}, "tags"),
        (ResumeMemoryOccupationReqInput, {"tgas": ["kv_cache"]}, "tags"),
        (ReleaseMemoryOccupationReqInput, {"presrve": "live"}, "preserve"),
        (FromDisk, {"modelpath": "a"}, "model_path"),
    ],
)
def test_a_request_about_everything_with_a_misspelt_field_is_refused(
    kind: Any, fields: dict[str, Any], meant: str
) -> None:
    with pytest.raises(RequestRejected, match=f"did you mean {meant}") as raised:
        build_request(kind, fields)
    assert raised.value.status == 400


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (ReleaseMemoryOccupationReqInput, {"tags": ["kv_cache"], "tag": 1}),
        (ReleaseMemoryOccupationReqInput, {"rid": "1", "level": 1, "ranks": 2, "x" * 10**6: 1}),
        # AReaL sends this.
        (FromDisk, {"model_path": "a", "abort_all_request": True}),
    ],
)
def test_other_fields_that_nobody_knows_are_ignored(kind: Any, fields: dict[str, Any]) -> None:
    build_request(kind, fields)


def test_a_dtype_of_torch_stands_for_its_name() -> None:
    many = {"names": ["a", "b"], "dtypes": [torch.bfloat16, "float32"], "shapes": [[1], [2]]}
    assert build_request(FromDistributed, many)[0].dtypes == ["torch.bfloat16", "float32"]
    one = {"name": "a", "dtype": torch.bfloat16, "shape": [1]}
    assert build_request(FromDistributed, one)[0].dtype == "torch.bfloat16"
