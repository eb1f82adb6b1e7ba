"""vLLM's names as trainers use them: a trainer's end of broadcasts, and OpenRLHF's actor around an engine.

Broadcasts go over gloo, in NCCL's place.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
import vllm
from fixtures.compat import COMPAT, COMPAT_ENVIRONMENT, output_of, run_python
from fixtures.deadlines import HANG_S
from safetensors.torch import load_file
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.inputs import TokensPrompt
from vllm.utils import get_open_port, random_uuid

from ebbtide.srt.errors import RequestRejected

PROMPT = [5, 6, 7]
NAMES_PATH = {"PYTHONPATH": os.pathsep.join([str(COMPAT / "vllm-names"), COMPAT_ENVIRONMENT["PYTHONPATH"]])}

# What TRL, SkyRL, prime-rl, verl and OpenRLHF import to talk to an engine.
IMPORTS = """
import sys
from vllm import LLM, RequestOutput, SamplingParams, AsyncEngineArgs, AsyncLLMEngine
from vllm.sampling_params import StructuredOutputsParams
from vllm.inputs import TokensPrompt
from vllm.utils import random_uuid
from vllm.utils.network_utils import get_ip, get_open_port
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerSendWeightsArgs, NCCLWeightTransferEngine
try:
    import vllm.worker
except ModuleNotFoundError as error:
    print(error)
try:
    LLM("m")
except NotImplementedError as error:
    print(error)
"""


def test_the_names_are_there_and_others_are_refused_in_a_line() -> None:
    other, engine = output_of(IMPORTS, **NAMES_PATH).splitlines()
    assert other.startswith("vllm.worker is not provided")
    assert "ebbtide serve" in engine


def test_a_real_vllm_is_not_hidden(tmp_path: Path) -> None:
    metadata = tmp_path / "vllm-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.28.0\n")
    done = run_python(f"import sys; sys.path.append({str(tmp_path)!r})\nimport vllm", **NAMES_PATH)
    assert "ImportError: vllm 0.28.0 is installed, and Ebbtide's package" in done.stderr


def test_objects_travel_between_the_ranks_of_a_group() -> None:
    port = get_open_port()

    def run(rank: int) -> Any:
        group = StatelessProcessGroup.create("127.0.0.1", port, rank, 2)
        heard = [group.broadcast_obj({"of": rank}, src=1), *group.all_gather_obj(rank)]
        if rank == 0:
            group.send_obj("a", 1)
            group.send_obj("b", 1)
        else:
            heard += [group.recv_obj(0), group.recv_obj(0)]
        # The first rank keeps the store.
        group.barrier()
        return heard

    with ThreadPoolExecutor(2) as ranks:
        first, second = ranks.map(run, range(2))
    assert first == [{"of": 1}, 0, 1]
    assert second == [{"of": 1}, 0, 1, "a", "b"]


class Actor:
    """The calls that OpenRLHF's rollout actor makes."""

    def __init__(self, **kwargs: Any) -> None:
        self.llm = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(**kwargs))

    async def call(self, method: str, *args: Any) -> Any:
        return await self.llm.collective_rpc(method, args=args)

    async def generate(self, params: Any, prompt: list[int] = PROMPT) -> Any:
        output = None
        request = TokensPrompt(prompt_token_ids=prompt)
        async for one in self.llm.generate(request, deepcopy(params), request_id=random_uuid()):
            output = one
        return output

    async def wake_up(self, tags: tuple[str, ...] = ("weights", "kv_cache")) -> None:
        for tag in tags:
            await self.llm.wake_up(tags=[tag])

    def num_unfinished(self) -> int:
        return self.llm.output_processor.get_num_unfinished_requests()


class Trainer:
    """Rank 0 of OpenRLHF's group: a request for each parameter, and its broadcast meanwhile."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._group: Any = None

    async def join(self) -> None:
        port = get_open_port()
        joining = asyncio.create_task(
            self._actor.call("init_process_group", "127.0.0.1", port, 1, 2, "openrlhf", "nccl", False)
        )

        def meet() -> PyNcclCommunicator:
            return PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port, 0, 2), device="cpu")

        self._group = await asyncio.to_thread(meet)
        await joining

    async def send(self, folder: Path, then: Callable[[], Any] | None = None) -> None:
        weights = load_file(folder / "model.safetensors")
        for count, (name, weight) in enumerate(weights.items(), 1):
            is_last = count == len(weights)
            taking = asyncio.create_task(
                self._actor.call("update_weight", name, weight.dtype, weight.shape, is_last)
            )
            await asyncio.to_thread(self._group.broadcast, weight, src=0)
            await taking
            if count == 2 and then is not None:
                await then()


@pytest.fixture(scope="module")
def actor(checkpoints: tuple[Path, Path]) -> Iterator[Actor]:
    own = {"skip_tokenizer_init": True, "max_total_tokens": 8192}
    actor = Actor(
        model=str(checkpoints[0]),
        device="cpu",
        dtype="float32",
        enforce_eager=True,
        worker_extension_cls="openrlhf.trainer.ray.vllm_worker_wrap.WorkerWrap",
        tensor_parallel_size=1,
        seed=1,
        distributed_executor_backend="uni",
        max_model_len=256,
        enable_prefix_caching=True,
        trust_remote_code=True,
        enable_sleep_mode=True,
        additional_config={"ebbtide": own},
    )
    yield actor
    actor.llm.shutdown()


@pytest.fixture(scope="module")
def trainer(actor: Actor, loop: Callable[..., Any]) -> Trainer:
    trainer = Trainer(actor)
    loop(trainer.join())
    return trainer


def greedy(**params: Any) -> Any:
    return vllm.SamplingParams(
        **{"temperature": 0.0, "top_k": -1, "max_tokens": 6, "ignore_eos": True, **params}
    )


def tokens(loop: Callable[..., Any], actor: Actor) -> list[int]:
    return loop(actor.generate(greedy())).outputs[0].token_ids


def test_samples_have_what_openrlhf_reads(loop: Callable[..., Any], actor: Actor) -> None:
    output = loop(actor.generate(greedy(n=2, logprobs=1, prompt_logprobs=0)))
    assert output.prompt_token_ids == PROMPT
    assert [sample.finish_reason for sample in output.outputs] == ["length", "length"]
    [sample, other] = output.outputs
    assert sample.token_ids == other.token_ids
    # Greedily, the likeliest token is the sampled one.
    assert [row[token].rank for token, row in zip(sample.token_ids, sample.logprobs, strict=True)] == [1] * 6
    assert sample.cumulative_logprob == pytest.approx(
        sum(row[token].logprob for token, row in zip(sample.token_ids, sample.logprobs, strict=True))
    )
    assert output.prompt_logprobs[0] is None
    assert [list(row) for row in output.prompt_logprobs[1:]] == [[6], [7]]
    assert loop(actor.generate(greedy())).outputs[0].logprobs is None


def test_a_partial_rollout_goes_on_under_the_new_weights(
    loop: Callable[..., Any], actor: Actor, trainer: Trainer, checkpoints: tuple[Path, Path]
) -> None:
    async def step() -> list[Any]:
        rollout = asyncio.create_task(actor.generate(greedy(n=8, max_tokens=240)))
        while actor.num_unfinished() != 1:
            await asyncio.sleep(0.01)
        await actor.llm.pause_generation(mode="keep")
        await trainer.send(checkpoints[1])
        assert not rollout.done()
        await actor.llm.resume_generation()
        samples: list[Any] = (await rollout).outputs
        return samples

    before = tokens(loop, actor)
    samples = loop(step())
    assert [(one.finish_reason, len(one.token_ids)) for one in samples] == [("length", 240)] * 8
    assert actor.num_unfinished() == 0
    after = tokens(loop, actor)
    assert after != before
    loop(trainer.send(checkpoints[0]))
    assert loop(actor.llm.reset_prefix_cache())
    assert tokens(loop, actor) == before


def test_half_an_update_never_serves(
    loop: Callable[..., Any], actor: Actor, trainer: Trainer, checkpoints: tuple[Path, Path]
) -> None:
    before, seen = tokens(loop, actor), []

    async def sample() -> None:
        seen.append((await actor.generate(greedy())).outputs[0].token_ids)

    loop(trainer.send(checkpoints[1], then=sample))
    assert seen == [before]
    loop(trainer.send(checkpoints[0]))


def test_it_sleeps_takes_weights_while_half_awake_and_serves_them(
    loop: Callable[..., Any], actor: Actor, trainer: Trainer, checkpoints: tuple[Path, Path]
) -> None:
    async def step() -> list[bool]:
        states = [await actor.llm.is_sleeping()]
        await actor.llm.sleep(level=1)
        states.append(await actor.llm.is_sleeping())
        await actor.wake_up(("weights",))
        await trainer.send(checkpoints[1])
        await actor.wake_up()
        return [*states, await actor.llm.is_sleeping()]

    before = tokens(loop, actor)
    assert loop(step()) == [False, True, False]
    assert tokens(loop, actor) != before
    loop(trainer.send(checkpoints[0]))
    loop(actor.llm.reset_prefix_cache())


def test_a_refused_parameter_refuses_the_rest_of_its_update(
    loop: Callable[..., Any], actor: Actor, trainer: Trainer, checkpoints: tuple[Path, Path]
) -> None:
    before = tokens(loop, actor)
    update = ("update_weight", "model.norm.weight", torch.float32)
    with pytest.raises(RequestRejected, match=r"model\.norm\.weight"):
        loop(actor.call(*update, (3,), False))
    with pytest.raises(RequestRejected, match=r"model\.norm\.weight"):
        loop(actor.call("update_weight", "lm_head.weight", torch.float32, (64,), True))
    assert tokens(loop, actor) == before
    loop(trainer.send(checkpoints[1]))
    assert tokens(loop, actor) != before
    loop(trainer.send(checkpoints[0]))


def test_what_is_not_here_is_refused_by_name(loop: Callable[..., Any], actor: Actor) -> None:
    with pytest.raises(NotImplementedError, match="init_process_group, update_weight, update_weight_cuda"):
        loop(actor.call("load_model"))
    with pytest.raises(ValueError, match="vllm_sync_with_ray"):
        loop(actor.call("init_process_group", "127.0.0.1", 1, 1, 2, "g", "nccl", True))
    with pytest.raises(ValueError, match="text alone"):
        loop(
            anext(
                actor.llm.generate({"prompt_token_ids": [1], "multi_modal_data": {"image": 1}}, greedy(), "a")
            )
        )
    with pytest.raises(ValueError, match="limit_mm_per_prompt"):
        vllm.AsyncEngineArgs(model="m", limit_mm_per_prompt={"image": 1})
    with pytest.raises(ValueError, match="tensor_parallel_size=1"):
        vllm.AsyncEngineArgs(model="m", tensor_parallel_size=2, distributed_executor_backend="ray")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="where there is a GPU, it sends from there")
def test_skyrl_sends_all_weights_in_a_request(
    loop: Callable[..., Any], actor: Actor, checkpoints: tuple[Path, Path]
) -> None:
    weights = load_file(checkpoints[1] / "model.safetensors")
    url = actor.llm._core.serve_http()
    port = get_open_port()
    address = {"master_address": "127.0.0.1", "master_port": port, "world_size": 2}
    # Several tensors in each broadcast, and more than one broadcast.
    how = {"packed": True, "packed_buffer_size_bytes": 100_000}
    announced = {
        "names": list(weights),
        "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in weights.values()],
        "shapes": [list(weight.shape) for weight in weights.values()],
        **how,
    }
    before = tokens(loop, actor)
    with httpx.Client(base_url=url, timeout=HANG_S) as client, ThreadPoolExecutor(1) as pool:
        joining = pool.submit(
            client.post, "/init_weight_transfer_engine", json={"init_info": {**address, "rank_offset": 1}}
        )
        group = NCCLWeightTransferEngine.trainer_init(address)
        assert joining.result().status_code == 200
        client.post("/start_weight_update")
        taking = pool.submit(client.post, "/update_weights", json={"update_info": announced})
        NCCLWeightTransferEngine.trainer_send_weights(
            iter(weights.items()), trainer_args={"group": group, **how}
        )
        assert taking.result().status_code == 200, taking.result().text
        client.post("/finish_weight_update")
        client.post("/reset_prefix_cache")
        assert tokens(loop, actor) != before
        again = client.post("/update_weights", json={"weight_dir": str(checkpoints[0])})
        assert again.status_code == 200
        client.post("/reset_prefix_cache")
    assert tokens(loop, actor) == before
