"""Two GPUs that divide a model, over NCCL: eager, in CUDA graphs, and after their memory was given back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.model_runs import RunnerDriver
from fixtures.rank_processes import Output, Ranks, generate, outputs_of
from fixtures.references import Reference

from ebbtide.srt.distributed.parallel_group import ParallelGroup

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(torch.accelerator.device_count() < 2, reason="needs two CUDA GPUs"),
]

NUM_TOKENS = 32
PROMPTS = [list(b"The tide turns twice a day, and the marsh knows."), list(b"Ebb"), [7]]
# Random logits of these models lie about 1.5 apart; those of bfloat16 and float32 differ by hundredths.
BFLOAT16_TIE = 0.25
SERVED = {"dtype": "bfloat16", "cuda_graph_max_bs": 4}


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("gpus"), "cuda") as ranks:
        yield ranks


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a KV head for each rank, and a vocabulary that is not a multiple of two."""
    folder = tmp_path_factory.mktemp("qwen3")
    return make_checkpoint(folder, "Qwen3ForCausalLM", seed=5, vocab_size=259, head_dim=128)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("moe")
    return make_checkpoint(folder, "Qwen3MoeForCausalLM", seed=5, head_dim=128, moe_intermediate_size=64)


@pytest.fixture(params=["qwen3", "qwen3_moe"])
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


def on_gpu(group: ParallelGroup, path: Path, **server_args: Any) -> Output:
    return generate(group, path, PROMPTS, NUM_TOKENS, device="cuda", base_gpu_id=group.rank, **server_args)


@pytest.mark.parametrize("options", [{}, {"disable_cuda_graph": True}], ids=["graphs", "eager"])
def test_as_served_tokens_are_greedy_and_alike_on_both(
    options: dict[str, Any], path: Path, two_gpus: Ranks
) -> None:
    first, second = two_gpus.run(on_gpu, path, **SERVED, **options)

    assert (first.ids, first.logprobs) == (second.ids, second.logprobs)
    reference = Reference(path)
    for prompt, ids in zip(PROMPTS, first.ids, strict=True):
        rows = reference.logprobs([*prompt, *ids])[len(prompt) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(ids)[:, None]).flatten()
        assert (chosen >= rows.max(-1).values - BFLOAT16_TIE).all()


def test_graphs_add_up_in_memory_that_was_given_back_and_taken_again(qwen3: Path, two_gpus: Ranks) -> None:
    """NCCL must not hold on to the physical memory of the buffers that it met during the capture."""
    for before, after in two_gpus.run(generate_twice, qwen3):
        assert after == before


def generate_twice(group: ParallelGroup, path: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Output ids, and those after scratch memory and KV pool were released and resumed."""
    driver = RunnerDriver(path, group=group, device="cuda", base_gpu_id=group.rank, **SERVED)
    before = outputs_of(driver, PROMPTS, NUM_TOKENS)
    graphs = driver.runner.graphs
    assert graphs is not None
    arenas = [graphs.arena, driver.runner.kv_pool.arena]
    sizes = [arena.release() for arena in arenas]
    # What was given back belongs to somebody else when it is taken again.
    others = torch.full((sum(sizes),), 0x7F, dtype=torch.uint8, device=f"cuda:{group.rank}")
    for arena in arenas:
        arena.resume()
    after = outputs_of(driver, PROMPTS, NUM_TOKENS)
    assert bool((others == 0x7F).all())
    return before.ids, after.ids
