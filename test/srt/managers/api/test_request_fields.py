"""Numbers that neither JSON nor the messages between processes have room for, and texts of refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api.request_fields import build_request
from ebbtide.srt.managers.io_struct import (
    ControlRequest,
    FlushCacheReqInput,
    GetWeightsByNameReqInput,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)


@pytest.mark.parametrize(
    ("kind", "fields", "path"),
    [
        (GetWeightsByNameReqInput, {"name": "a", "truncate_size": 2**63}, "$.truncate_size"),
        (UpdateWeightsFromDistributedReqInput, {"shapes": [[1], [2, -(2**63) - 1]]}, "$.shapes[1][1]"),
        (UpdateWeightFromDiskReqInput, {"model_path": "a", "manifest": {"b": [10**30]}}, "$.manifest.b[0]"),
        (UpdateWeightFromDiskReqInput, {"model_path": "a", "weight_version": 10**30}, "$.weight_version"),
        (FlushCacheReqInput, {"timeout_s": float("inf")}, "$.timeout_s"),
        (FlushCacheReqInput, {"timeout_s": float("nan")}, "$.timeout_s"),
    ],
)
def test_numbers_that_do_not_fit_are_refused_with_their_path(
    kind: type[ControlRequest], fields: dict[str, Any], path: str
) -> None:
    with pytest.raises(RequestRejected) as caught:
        build_request(kind, fields)
    assert caught.value.status == 400
    assert caught.value.message.endswith(f"at `{path}`")


def test_the_largest_integers_fit() -> None:
    fields = {"name": "a", "truncate_size": 2**63 - 1}
    assert build_request(GetWeightsByNameReqInput, fields)[0].truncate_size == 2**63 - 1


def test_what_is_ignored_is_not_looked_at() -> None:
    request, ignored = build_request(FlushCacheReqInput, {"zeal": 10**30})
    assert (request, ignored) == (FlushCacheReqInput(), ["zeal"])
    fields = {"model_path": "a", "is_async": "maybe", "token_step": "seven", "keep_pause": 3}
    assert build_request(UpdateWeightFromDiskReqInput, fields)[1] == []


def test_a_dtype_of_torch_stands_for_its_name() -> None:
    many = {"names": ["a", "b"], "dtypes": [torch.bfloat16, "float32"], "shapes": [[1], [2]]}
    assert build_request(UpdateWeightsFromDistributedReqInput, many)[0].dtypes == [
        "torch.bfloat16",
        "float32",
    ]
    one = {"name": "a", "dtype": torch.bfloat16, "shape": [1]}
    assert build_request(UpdateWeightsFromDistributedReqInput, one)[0].dtype == "torch.bfloat16"


def test_endless_lists_are_refused() -> None:
    names = ["a"] * (2**18 + 1)
    with pytest.raises(RequestRejected, match=r"at most 262144 entries, got 262145 - at `\$\.names`"):
        build_request(UpdateWeightsFromDistributedReqInput, {"names": names})
    assert build_request(UpdateWeightsFromDistributedReqInput, {"names": names[:-1]})[1] == []


def test_what_is_ignored_is_not_said_again_at_any_length() -> None:
    _, ignored = build_request(FlushCacheReqInput, {"a" * 10**6: 1, **{f"b{i}": 1 for i in range(1000)}})
    assert len(ignored) == 100
    assert ignored[0] == "a" * 200


def test_a_field_nested_too_deeply_is_refused() -> None:
    manifest: list[Any] = []
    for _ in range(100_000):
        manifest = [manifest]
    with pytest.raises(RequestRejected, match="nested too deeply"):
        build_request(UpdateWeightFromDiskReqInput, {"model_path": "a", "manifest": manifest})


def test_text_that_is_not_base64_says_what_was_expected() -> None:
    with pytest.raises(RequestRejected, match=r"base64.*\[0\].*expected the standard alphabet, with padding"):
        build_request(UpdateWeightsFromTensorReqInput, {"serialized_named_tensors": ["gAR"]})


def test_a_choice_that_is_none_of_them_names_them() -> None:
    fields = {"master_address": "a", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "mpi"}
    with pytest.raises(RequestRejected, match="expected one of nccl, gloo"):
        build_request(InitWeightsUpdateGroupReqInput, fields)
