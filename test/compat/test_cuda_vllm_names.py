"""OpenRLHF's updates on GPUs: by handles of the trainer's memory, and by NCCL between two GPUs."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from fixtures.checkpoints import make_checkpoint
from safetensors.torch import load_file
from torch.multiprocessing.reductions import reduce_tensor
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.utils import StatelessProcessGroup
from vllm.utils import get_open_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


SHAPE = {"head_dim": 128, "vocab_size": 1000, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    first, second = (
        make_checkpoint(folder / name, "Qwen3ForCausalLM", seed=ord(name), **SHAPE) for name in "ab"
    )
    return first, second


@pytest.fixture(scope="module")
def llm(folders: tuple[Path, Path]) -> Iterator[vllm.AsyncLLMEngine]:
    own = {"skip_tokenizer_init": True, "max_total_tokens": 8192, "device": "cuda"}
    args = vllm.AsyncEngineArgs(model=str(folders[0]), enforce_eager=True, additional_config={"ebbtide": own})
    llm = vllm.AsyncLLMEngine.from_engine_args(args)
    yield llm
    llm.shutdown()


async def tokens(llm: vllm.AsyncLLMEngine) -> list[int]:
    await llm.reset_prefix_cache()
    params = vllm.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    [output] = [one async for one in llm.generate([5, 6, 7], params, "a")]
    return output.outputs[0].token_ids


def on_gpu(folder: Path, index: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors", device=f"cuda:{index}")


async def send_handles(llm: vllm.AsyncLLMEngine, folder: Path) -> None:
    weights = on_gpu(folder, 0)
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    torch.cuda.synchronize()
    for count, (name, weight) in enumerate(weights.items(), 1):
        handles = {uuid: reduce_tensor(weight)}
        args = (name, weight.dtype, weight.shape, handles, count == len(weights))
        await llm.collective_rpc("update_weight_cuda_ipc", args=args)


def test_weights_by_handles(
    llm: vllm.AsyncLLMEngine, loop: Callable[..., Any], folders: tuple[Path, Path]
) -> None:
    before = loop(tokens(llm))
    loop(send_handles(llm, folders[1]))
    assert loop(tokens(llm)) != before
    loop(send_handles(llm, folders[0]))
    assert loop(tokens(llm)) == before


@pytest.mark.multi_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_weights_by_nccl(
    llm: vllm.AsyncLLMEngine, loop: Callable[..., Any], folders: tuple[Path, Path]
) -> None:
    async def join() -> PyNcclCommunicator:
        port = get_open_port()
        args = ("127.0.0.1", port, 1, 2, "openrlhf", "nccl", False)
        joining = asyncio.create_task(llm.collective_rpc("init_process_group", args=args))

        def meet() -> PyNcclCommunicator:
            return PyNcclCommunicator(StatelessProcessGroup.create("127.0.0.1", port, 0, 2), device=1)

        group = await asyncio.to_thread(meet)
        await joining
        return group

    async def send(group: PyNcclCommunicator, folder: Path) -> None:
        weights = on_gpu(folder, 1)
        for count, (name, weight) in enumerate(weights.items(), 1):
            args = (name, weight.dtype, weight.shape, count == len(weights))
            taking = asyncio.create_task(llm.collective_rpc("update_weight", args=args))
            await asyncio.to_thread(group.broadcast, weight, 0)
            await taking

    before = loop(tokens(llm))
    group = loop(join())
    loop(send(group, folders[1]))
    assert loop(tokens(llm)) != before
    loop(send(group, folders[0]))
    assert loop(tokens(llm)) == before
