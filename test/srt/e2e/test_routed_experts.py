"""Routed experts are those of transformers' router, whatever becomes of a request on its way."""

import asyncio
import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.application import Client
from fixtures.checkpoints import make_checkpoint
from fixtures.gpu_device import ON_CPU_AND_GPUS
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from ebbtide import Engine
from ebbtide.srt.managers.api.array_forms import encoded
from ebbtide.srt.managers.io_struct import RoutedExperts

PROMPT = [(7 * place) % 250 for place in range(45)]


# Experts by softmax; and by sigmoids and a bias, behind layers with states, in two layers of five.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {},
    "NemotronHForCausalLM": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "linear_attention"],
    },
}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"max_position_embeddings": 512, **MODELS[request.param]}
    return make_checkpoint(tmp_path_factory.mktemp("moe"), request.param, **config)


@pytest.fixture(scope="module", params=ON_CPU_AND_GPUS)
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    # Pages of 8 tokens: prompts share whole ones.
    fixed = {"enable_return_routed_experts": True, "max_total_tokens": 1024, "page_size": 8}
    fixed["skip_tokenizer_init"] = True
    given = dict(request.param)
    if given and hasattr(AutoConfig.from_pretrained(checkpoint), "kv_lora_rank"):
        # In float32 nothing else takes latents.
        given["attention_backend"] = "torch_native"
    with Engine(model_path=str(checkpoint), **fixed, **given) as engine:
        yield engine


class Routers:
    """transformers' choice of experts."""

    def __init__(self, path: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        blocks = [getattr(layer, "mlp", None) or layer.mixer for layer in self._model.model.layers]
        self._gates = {place: block.gate for place, block in enumerate(blocks) if hasattr(block, "gate")}
        self.num_layers, self.sparse_layers = len(blocks), list(self._gates)

    @torch.inference_mode()
    def rows(self, token_ids: list[int]) -> NDArray[Any]:
        """[T, L, K], each row sorted: equals may stand in any order; zeros where there are no experts."""
        chosen: list[torch.Tensor] = []
        hooks = [
            gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
            for gate in self._gates.values()
        ]
        self._model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return self.spread(np.sort(torch.stack(chosen, dim=1).numpy(), axis=-1))

    def spread(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Rows of the layers with experts among those of all layers."""
        spread = np.zeros((len(rows), self.num_layers, rows.shape[2]), dtype=rows.dtype)
        spread[:, self.sparse_layers] = rows
        return spread

    @torch.inference_mode()
    def logprobs(self, token_ids: list[int], given_TLK: NDArray[Any]) -> torch.Tensor:
        """[T, V], where the first tokens take the given experts in place of the routers' choice."""

        def chosen(layer: int, output: Any) -> Any:
            logits, weights, experts = output
            given = torch.from_numpy(given_TLK[:, layer]).long()
            config = self._model.config
            scores = logits.sigmoid() if config.model_type == "nemotron_h" else logits.softmax(-1)
            own = scores[: len(given)].gather(1, given)
            scale = getattr(config, "routed_scaling_factor", 1.0)
            weights[: len(given)], experts[: len(given)] = scale * own / own.sum(-1, keepdim=True), given
            return logits, weights, experts

        hooks = [
            gate.register_forward_hook(lambda _, __, output, place=place: chosen(place, output))
            for place, gate in self._gates.items()
        ]
        logits: torch.Tensor = self._model(torch.tensor([token_ids])).logits[0]
        for hook in hooks:
            hook.remove()
        return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def routers(checkpoint: Path) -> Routers:
    return Routers(checkpoint)


def check(answer: Any, prompt: list[int], routers: Routers, start: int = 0) -> None:
    tokens = [*prompt, *answer["output_ids"]][:-1]
    expected = routers.rows(tokens)[start:]
    told = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), dtype=np.int32)
    assert (np.sort(told.reshape(expected.shape), axis=-1) == expected).all()
    assert answer["meta_info"].get("routed_experts_start_len", 0) == start


def params(num_tokens: int, seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": num_tokens, "ignore_eos": True, "sampling_seed": seed, **more}


def test_they_are_the_routers_for_samples_of_a_group_and_for_cached_prefixes(
    engine: Engine, routers: Routers
) -> None:
    wanted = {"return_routed_experts": True}
    group = engine.generate(input_ids=PROMPT, sampling_params=params(12, n=4), **wanted)
    for answer in group:
        check(answer, PROMPT, routers)
    assert [answer["meta_info"]["cached_tokens"] for answer in group] == [0, 40, 40, 40]
    # What was computed for somebody who did not ask is told too.
    engine.generate(input_ids=PROMPT[::-1], sampling_params=params(3))
    late = engine.generate(input_ids=PROMPT[::-1], sampling_params=params(3), **wanted)
    assert late["meta_info"]["cached_tokens"] == 40
    check(late, PROMPT[::-1], routers)
    plain = engine.generate(input_ids=PROMPT, sampling_params=params(12))
    assert "routed_experts" not in plain["meta_info"]
    assert plain["output_ids"] == group[0]["output_ids"]
    turn = [*PROMPT, *plain["output_ids"], 5, 6, 7]
    start = len(turn) - 4
    check(
        engine.generate(input_ids=turn, sampling_params=params(4), routed_experts_start_len=start, **wanted),
        turn,
        routers,
        start,
    )


def test_retraction_parking_and_updates_leave_the_rows_of_the_first_pass(
    engine: Engine, routers: Routers, checkpoint: Path
) -> None:
    async def run() -> None:
        tasks = []
        for seed in range(3):
            given = {"input_ids": PROMPT[seed:], "sampling_params": params(150, seed)}
            stream = await engine.async_generate(**given, return_routed_experts=True, stream=True)
            await anext(stream)
            tasks.append(asyncio.create_task(_last(stream)))
        await engine.async_pause_generation("retract")
        await engine.async_continue_generation()
        await engine.async_release_memory_occupation(["kv_cache"], preserve="live")
        await engine.async_resume_memory_occupation(["kv_cache"])
        await engine.async_update_weights_from_disk(str(checkpoint), pause_mode="in_place", flush_cache=False)
        answers = [await task for task in tasks]
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) >= 1
        for seed, answer in enumerate(answers):
            assert len(answer["output_ids"]) == 150
            check(answer, PROMPT[seed:], routers)

    asyncio.run(run())


def test_given_experts_stand_in_for_the_routers_choice(engine: Engine, routers: Routers) -> None:
    given = np.random.default_rng(1).random((40, 2, 6)).argsort(axis=-1)[..., :3].astype(np.uint8)
    given = routers.spread(given)
    wanted = {"return_routed_experts": True, "return_logprob": True}
    replayed = {"replay_routed_experts": packed(given), "logprob_start_len": 0}
    first = engine.generate(input_ids=PROMPT, sampling_params=params(6), **wanted, **replayed)
    # KV of given experts is shared by those who give the same.
    again = engine.generate(
        input_ids=PROMPT, sampling_params=params(6), replay_routed_experts=packed(given), **wanted
    )
    plain = engine.generate(input_ids=PROMPT, sampling_params=params(6), **wanted)
    assert (first["meta_info"]["cached_tokens"], again["meta_info"]["cached_tokens"]) == (0, 40)
    check(plain, PROMPT, routers)
    for answer in (first, again):
        meta, tokens = answer["meta_info"], [*PROMPT, *answer["output_ids"]]
        expected = routers.logprobs(tokens, given)
        rows = np.frombuffer(base64.b64decode(meta["routed_experts"]), dtype=np.int32)
        rows = rows.reshape(-1, routers.num_layers, 3)
        assert (rows[:40] == given).all()
        told = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        assert len(told) == (50 if answer is first else 6)
        for place, (logprob, token_id, _) in enumerate(told, len(tokens) - len(told) - 1):
            assert logprob == pytest.approx(float(expected[place, token_id]), abs=1e-4)
    # What the routers chose, given back, changes nothing.
    own = np.frombuffer(base64.b64decode(plain["meta_info"]["routed_experts"]), dtype=np.int32)
    turn = [*PROMPT, *plain["output_ids"][:-1]]
    given_back = {"replay_routed_experts": base64.b64encode(own).decode(), "logprob_start_len": 0}
    rest = engine.generate(input_ids=turn, sampling_params=params(3), **wanted, **given_back)
    check(rest, turn, routers)


def packed(rows_TLK: NDArray[Any]) -> dict[str, Any]:
    data = base64.b64encode(rows_TLK.tobytes()).decode()
    return {"data": data, "shape": list(rows_TLK.shape), "dtype": str(rows_TLK.dtype)}


async def _last(stream: Any) -> Any:
    last = None
    async for chunk in stream:
        last = chunk
    return last


def test_other_dialects_tell_them_in_their_own_forms(engine: Engine, routers: Routers) -> None:
    client = Client(engine)
    body = {"prompt": PROMPT, "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}
    [choice] = client.post("/v1/completions", {**body, "routed_experts_prompt_start": 2})["choices"]
    [whole] = client.post("/v1/completions", body)["choices"]
    [none] = client.post("/v1/completions", {**body, "return_routed_experts": False})["choices"]
    assert none["routed_experts"] is None
    tokens = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    [other] = client.post("/inference/v1/generate", tokens)["choices"]
    for told, start in ((choice, 2), (whole, 0), (other, 0)):
        rows = np.load(io.BytesIO(base64.b64decode(told["routed_experts"])), allow_pickle=False)
        expected = routers.rows([*PROMPT, *told["token_ids"]][:-1])[start:]
        assert rows.dtype == np.uint8
        assert (np.sort(rows, axis=-1) == expected).all()
    [sky] = client.post("/skyrl/v1/generate", tokens)["choices"]
    data, shape, dtype = sky["routed_experts"].items()
    assert (data[0], shape, dtype) == ("data", ("shape", list(rows.shape)), ("dtype", "uint8"))
    kept = RoutedExperts(rows[2:].tobytes(), rows[2:].shape, "uint8")
    assert encoded(kept, "packed", 2) == packed(rows[2:]) | {"start": 2}
    again = {**tokens, "replay_routed_experts": other["routed_experts"]}
    refused = client.post("/inference/v1/generate", again, status=400)
    assert "expected at most the 45 tokens of the prompt, got 48" in refused["error"]["message"]
    again["token_ids"] = [*PROMPT, *other["token_ids"]]
    [longer] = client.post("/inference/v1/generate", again)["choices"]
    assert np.load(io.BytesIO(base64.b64decode(longer["routed_experts"])))[:48].tolist() == rows.tolist()
