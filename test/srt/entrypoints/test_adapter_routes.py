"""Adapters through every door: SGLang's, vLLM's, OpenAI's and Python's words for them."""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures.adapters import Adapter, make_adapter
from fixtures.checkpoints import make_checkpoint
from fixtures.references import Reference
from fixtures.servers import Server, running_server, url_of

from ebbtide import Client
from ebbtide.srt.errors import RequestRejected
from ebbtide.trainer import WeightSender

PROMPT = list(b"Ebb and flow: the tide goes out.")
GREEDY = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
COMPLETION = {
    "prompt": PROMPT,
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model, folder / str(seed), seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def expected(model: Path, adapters: list[Adapter]) -> list[list[int]]:
    """What each adapter says behind the prompt; the base comes last."""
    references = [*(adapter.reference for adapter in adapters), Reference(model)]
    found = [reference.greedy(PROMPT, 6) for reference in references]
    assert len(set(map(tuple, found))) == len(found), "they differ"
    return found


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder from which requests have adapters loaded."""
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def server(model: Path, adapters: list[Adapter], shelf: Path) -> Iterator[Server]:
    arguments = ["--lora-paths", f"first={adapters[0].folder}", "--max-lora-rank", "8"]
    names = ["--served-model-name", "tide", "--enable-metrics", "--max-loras-per-batch", "2"]
    with running_server(model, *arguments, *names, "--lora-folder", str(shelf)) as running:
        yield running


def generate(server: Server, **fields: Any) -> Any:
    answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def load(server: Server, name: str, adapter: Adapter, status: int = 200, **fields: Any) -> Any:
    body = {"lora_name": name, "lora_path": str(adapter.folder), **fields}
    answer = server.post("/load_lora_adapter", body)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_a_batch_asks_for_several_and_for_none(
    server: Server, adapters: list[Adapter], expected: list[list[int]]
) -> None:
    version = load(server, "second", adapters[1])["lora_version"]
    answers = generate(server, input_ids=[PROMPT] * 3, lora_path=["first", None, "second"])
    assert [one["output_ids"] for one in answers] == [expected[0], expected[3], expected[1]]
    meta = answers[2]["meta_info"]
    assert (meta["lora_name"], meta["lora_version"]) == ("second", version)
    assert meta["lora_versions"] == [{"version": version, "start": 0, "end": 6}]
    assert "lora_name" not in answers[1]["meta_info"]
    assert 'ebbtide:adapter_generation_tokens_total{adapter="second"} 6.0' in server.get("/metrics").text


def test_openais_clients_name_an_adapter_as_their_model(server: Server, expected: list[list[int]]) -> None:
    for name in ("first", "tide:first", "first@1", "tide:first@1"):
        answer = server.post("/v1/completions", {**COMPLETION, "model": name}).json()
        assert answer["model"] == name
        assert answer["choices"][0]["token_ids"] == expected[0], name
    base = server.post("/v1/completions", {**COMPLETION, "model": "tide"}).json()
    assert base["choices"][0]["token_ids"] == expected[3]
    tokens = {"token_ids": PROMPT, "model": "first", "sampling_params": {"max_tokens": 6, "temperature": 0}}
    answer = server.post("/inference/v1/generate", tokens).json()
    assert answer["choices"][0]["token_ids"] == expected[0]
    clash = server.post("/v1/completions", {**COMPLETION, "model": "first", "lora_path": "second"})
    assert clash.status_code == 400


def test_an_unknown_adapter_is_404_everywhere(server: Server) -> None:
    asked = {"input_ids": PROMPT, "sampling_params": GREEDY, "lora_path": "nobody"}
    refused = [server.post("/generate", {**asked, "stream": stream}) for stream in (False, True)]
    for name in ("nobody", "tide:nobody", "first@99"):
        refused.append(server.post("/v1/completions", {"prompt": PROMPT, "model": name, "stream": True}))
    refused.append(server.get("/v1/models/nobody"))
    refused.append(server.post("/unload_lora_adapter", {"lora_name": "nobody"}))
    refused.append(server.post("/v1/unload_lora_adapter", {"lora_name": "nobody"}))
    assert {answer.status_code for answer in refused} == {404}, [answer.text for answer in refused]


def test_models_list_adapters_with_their_parent(server: Server, adapters: list[Adapter]) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards["tide"]["parent"] is None
    assert (cards["first"]["parent"], cards["first"]["root"]) == ("tide", str(adapters[0].folder))
    assert server.get("/v1/models/first").json() == cards["first"]


def test_vllms_clients_load_and_replace(
    server: Server, adapters: list[Adapter], expected: list[list[int]]
) -> None:
    body = {"lora_name": "theirs", "lora_path": str(adapters[1].folder)}
    answer = server.post("/v1/load_lora_adapter", body)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'theirs' added successfully.")
    assert generate(server, lora_path="theirs")["output_ids"] == expected[1]
    body["lora_path"] = str(adapters[2].folder)
    again = server.post("/v1/load_lora_adapter", body).json()["error"]
    assert (again["code"], again["type"]) == (400, "InvalidUserInput")
    assert generate(server, lora_path="theirs")["output_ids"] == expected[1]
    assert server.post("/v1/load_lora_adapter", {**body, "load_inplace": True}).status_code == 200
    again = generate(server, lora_path="theirs")
    assert again["output_ids"] == expected[2]
    assert again["meta_info"]["cached_tokens"] == 0, "the KV of the adapter before was reused"
    gone = server.post("/v1/unload_lora_adapter", {"lora_name": "theirs"})
    assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'theirs' removed successfully.")
    assert server.post("/generate", {"input_ids": PROMPT, "lora_path": "theirs"}).status_code == 404


def test_a_request_has_its_adapter_loaded_from_the_folder(
    server: Server, adapters: list[Adapter], shelf: Path, expected: list[list[int]]
) -> None:
    body, url = {**COMPLETION, "model": "run_0001"}, "/v1/completions"
    assert server.post(url, body).status_code == 404
    folder = Path(shutil.copytree(adapters[1].folder, shelf / "run_0001"))
    with ThreadPoolExecutor(4) as pool:
        answers = [answer.json() for answer in pool.map(lambda _: server.post(url, body), range(4))]
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [expected[1]] * 4
    loaded = [card for card in server.get("/v1/models").json()["data"] if card["id"] == "run_0001"]
    assert [card["root"] for card in loaded] == [str(folder)]
    tokens = {
        "token_ids": PROMPT,
        "model": "run_0001@1",
        "sampling_params": {"max_tokens": 6, "temperature": 0},
    }
    assert server.post("/inference/v1/generate", tokens).json()["choices"][0]["token_ids"] == expected[1]
    # Whatever comes to lie under the name: it means what it meant.
    server.post("/v1/unload_lora_adapter", {"lora_name": "run_0001"})
    for file in adapters[2].folder.iterdir():
        shutil.copy(file, folder)
    refused = server.post(url, body)
    assert (refused.status_code, "never changes" in refused.text) == (409, True)


@pytest.mark.parametrize("name", ["..", "../shelf", "/etc", "a\0b", "", "x" * 5000])
def test_what_lies_beside_the_folder_is_no_model(
    server: Server, adapters: list[Adapter], shelf: Path, name: str
) -> None:
    shutil.copytree(adapters[1].folder, shelf.parent, dirs_exist_ok=True)
    refused = server.post("/v1/completions", {"prompt": PROMPT, "model": name})
    assert refused.status_code == 404, refused.text


def test_a_client_loads_tensors_and_asks_for_a_version(
    server: Server, adapters: list[Adapter], expected: list[list[int]]
) -> None:
    client = Client(url_of(server))
    for step in (1, 2):
        adapter = adapters[step]
        for _ in range(2):  # A lost answer is asked for again.
            reply = client.load_lora_adapter_from_tensors(
                "policy", adapter.tensors, adapter.fields, lora_version=f"step-{step}"
            )
            assert reply["loaded_adapters"]["policy"] == f"step-{step}"
        assert reply["changed"] is False
    with pytest.raises(RequestRejected) as refused:
        client.load_lora_adapter_from_tensors(
            "policy", adapters[0].tensors, adapters[0].fields, lora_version="step-2"
        )
    assert refused.value.status == 409
    for step in (1, 2):
        answer = client.generate(input_ids=PROMPT, sampling_params=GREEDY, lora_path=f"policy@step-{step}")
        assert answer["output_ids"] == expected[step]
    client.release_memory_occupation(["weights"], backup=True)
    client.resume_memory_occupation(["weights"])
    assert generate(server, lora_path="policy")["output_ids"] == expected[2]
    client.unload_lora_adapter("policy")


def test_a_trainer_sends_versions(server: Server, adapters: list[Adapter], expected: list[list[int]]) -> None:
    sender = WeightSender(url_of(server))
    for step in (1, 2):
        # As PEFT's `to_dict` has it.
        config = {**adapters[step].fields, "target_modules": {"q_proj", "v_proj"}}
        sent = sender.send_adapter("sent", adapters[step].tensors.items(), config, version=step)
        assert sent.num_tensors == len(adapters[step].tensors)
        assert generate(server, lora_path="sent")["output_ids"] == expected[step]


def test_an_output_goes_on_with_the_version_that_it_ended_with(
    server: Server, adapters: list[Adapter], expected: list[list[int]]
) -> None:
    load(server, "going", adapters[1])
    short = generate(
        server, lora_path="going", rid="going-on", sampling_params={**GREEDY, "max_new_tokens": 3}
    )
    load(server, "going", adapters[2])
    rest = generate(
        server, input_ids=None, continue_from="going-on", sampling_params={**GREEDY, "max_new_tokens": 3}
    )
    assert short["output_ids"] + rest["output_ids"] == expected[1]


def test_bad_loads_are_refused_in_the_one_shape(
    server: Server, adapters: list[Adapter], tmp_path: Path
) -> None:
    for path in ("/load_lora_adapter", "/v1/load_lora_adapter"):
        for missing in (tmp_path, "/not/an/adapter"):
            answer = server.post(path, {"lora_name": "bad", "lora_path": str(missing)})
            assert (answer.status_code, "adapter_config.json" in answer.json()["message"]) == (404, True)
    for name in ("a b", "tide"):
        assert load(server, name, adapters[0], status=400)["success"] is False
    assert server.post("/load_lora_adapter", {"lora_name": "bad"}).status_code == 400
    fields = {"lora_name": "bad", "config_dict": adapters[0].fields, "serialized_named_tensors": ["AAAA"]}
    assert server.post("/load_lora_adapter_from_tensors", fields).status_code == 400
    assert "bad" not in server.get("/v1/models").text


def test_the_information_tells_of_adapters(server: Server) -> None:
    info = server.get("/server_info?config_format=json").json()
    assert info["vllm_config"]["lora_config"] == {"max_lora_rank": 8, "max_loras": 2}
    assert json.loads(server.get("/server_info").text)["max_loras_per_batch"] == 2
