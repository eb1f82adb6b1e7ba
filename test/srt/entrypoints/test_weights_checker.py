"""`/weights_checker`, as trainers ask it: on a server, and on an engine of four ranks."""

from typing import Any

from fixtures.servers import Server

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
    one = {f"{kind}_{what}": int(what == "size") for kind in ("tp", "dp", "pp") for what in ("rank", "size")}
    assert rank["parallelism_info"] == [{"role": "target", **one, "rank": 0, "size": 1}]
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
    assert check(server, "compare", 400)["errors"]
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
