"""`/weights_checker`, as trainers ask it: on a server, and on an engine of four ranks."""

from typing import Any

import pytest
from fixtures.servers import Server

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected

GREEDY = {"temperature": 0.0, "max_new_tokens": 8}


def check(server: Server, action: str, status: int = 200, **fields: object) -> dict[str, object]:
    response = server.post("/weights_checker", {"action": action, **fields})
    assert response.status_code == status, response.text
    body: dict[str, object] = response.json()
    assert body["success"] is (status == 200)
    return body


def update(server: Server, folder: object) -> None:
    assert server.post("/update_weights_from_disk", {"model_path": str(folder)}).is_success


def test_checksums_are_those_of_the_weights_that_serve(server: Server, checkpoints: Any) -> None:
    first = server.get("/weights_checker").json()
    [rank] = first["ranks"]
    assert rank["parallelism_info"] == [
        {
            "role": "target",
            "tp_rank": 0,
            "tp_size": 1,
            "dp_rank": 0,
            "dp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "rank": 0,
            "size": 1,
        }
    ]
    update(server, checkpoints.b)
    second = check(server, "checksum")
    assert second["per_engine_checksum"] != first["per_engine_checksum"]
    update(server, checkpoints.a)
    assert check(server, "checksum") == first
    some = server.get("/weights_checker", params={"skip_tensor_list": ["norm", "embed"]}).json()
    left = some["ranks"][0]["checksums"].items()
    assert left < rank["checksums"].items()
    assert not any("norm" in name or "embed" in name for name, _ in left)


def test_a_trainer_checks_that_its_updates_write_everything(server: Server, checkpoints: Any) -> None:
    ask = {"input_ids": [5, 6, 7], "sampling_params": GREEDY}
    before = server.post("/generate", ask).json()["output_ids"]
    # With the fields that slime and miles send along.
    check(server, "snapshot", allow_quant_error=False, selector="all", skip_tensor_list=None)
    check(server, "reset_tensors", allow_quant_error=False, selector="all", skip_tensor_list=[])
    assert server.get("/memory_occupation").json()["tags"]["weights"]["content"] == "stale"
    assert "stale" in str(check(server, "compare", 409)["message"])
    assert server.post("/release_memory_occupation").is_success
    assert "released" in str(check(server, "compare", 409)["message"])
    assert server.post("/resume_memory_occupation").is_success
    update(server, checkpoints.b)
    refused = check(server, "compare", 400)
    assert refused["num_errors"] == len(check(server, "checksum")["ranks"][0]["checksums"])  # type: ignore[index]
    update(server, checkpoints.a)
    check(server, "compare")
    assert check(server, "compare", 409)["error"]["type"] == "ConflictError"  # type: ignore[index]
    assert server.post("/generate", ask).json()["output_ids"] == before


def test_what_it_does_not_know_is_refused(server: Server) -> None:
    body = check(server, "guess", 400)
    assert all(word in str(body["message"]) for word in ("checksum", "snapshot", "reset_tensors", "compare"))
    assert check(server, "checksum", zeal=1)["ignored_fields"] == ["zeal"]


def test_all_ranks_of_all_replicas_answer(checkpoints: Any) -> None:
    with Engine(
        model_path=str(checkpoints.a), device="cpu", tp_size=2, dp_size=2, max_total_tokens=1024
    ) as engine:
        reply = engine.check_weights()
        places = [rank["parallelism_info"][0] for rank in reply["ranks"]]
        assert [(place["dp_rank"], place["tp_rank"]) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [place["rank"] for place in places] == [0, 1, 2, 3]
        sums = [rank["per_gpu_checksum"] for rank in reply["ranks"]]
        assert sums[:2] == sums[2:]
        assert sums[0] != sums[1]
        assert not reply["per_engine_checksum"].startswith("mixed")
        engine.check_weights("snapshot")
        engine.check_weights("reset_tensors")
        engine.update_weights_from_disk(str(checkpoints.b))
        with pytest.raises(RequestRejected, match="parameters are not those of the snapshot"):
            engine.check_weights("compare")
        engine.update_weights_from_disk(str(checkpoints.a))
        engine.check_weights("compare")
        assert engine.check_weights() == reply
