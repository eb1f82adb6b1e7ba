"""A trainer sharded over two processes (FSDP2, gloo) beside an engine that sleeps while it trains.

    python examples/colocated_fsdp2.py [--steps 3] [--model-path FOLDER]

Every process gathers each parameter in turn; the first one has the engine, and hands it what was gathered,
bucket by bucket, within one weight update: none of it serves before all of it is there.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tiny_rl
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ebbtide import Engine

NUM_RANKS = 2


def sharded_model(model_path: Path) -> Any:
    """The model of which each rank holds a part."""
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    model = tiny_rl.load_model(model_path)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gathered(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The whole parameters, one by one. All ranks run through it at the same pace."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        sharded: Any = parameter.detach()
        yield name, sharded.full_tensor()


def roll_out(engine: Engine | None, step: int) -> list[list[int]]:
    """The outputs of the engine, on every rank."""
    box: list[Any] = [None]
    if engine is not None:
        seeds = range(step * tiny_rl.NUM_ROLLOUTS, (step + 1) * tiny_rl.NUM_ROLLOUTS)
        outputs = engine.generate(
            input_ids=[tiny_rl.PROMPT] * len(seeds),
            sampling_params=[{**tiny_rl.SAMPLING, "sampling_seed": seed} for seed in seeds],
        )
        assert {output["meta_info"]["weight_version"] for output in outputs} == {str(step)}
        box = [[output["output_ids"] for output in outputs]]
    dist.broadcast_object_list(box, src=0)
    outputs_of_step: list[list[int]] = box[0]
    return outputs_of_step


def update(engine: Engine | None, model: torch.nn.Module, version: int) -> None:
    if engine is None:
        for _ in gathered(model):
            pass
        return
    with engine.weight_update(weight_version=str(version)):
        for bucket in tiny_rl.buckets(gathered(model)):
            engine.update_weights_from_tensor(bucket)


def train(rank: int, init_method: str, model_path: Path, num_steps: int) -> None:
    """One rank of the trainer."""
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=NUM_RANKS)
    try:
        run_steps(rank, model_path, num_steps)
    finally:
        # Gloo's threads end with the last that refers to their group, and must not outlive the interpreter.
        gc.collect()
        dist.destroy_process_group()


def run_steps(rank: int, model_path: Path, num_steps: int) -> None:
    """Roll out and train; the first rank has the engine."""
    model = sharded_model(model_path)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    engine = None
    if rank == 0:
        engine = Engine(model_path=str(model_path), weight_version="0", **tiny_rl.SERVER_ARGUMENTS)
    try:
        for step in range(num_steps):
            outputs = roll_out(engine, step)
            if engine is not None:
                engine.release_memory_occupation()
            loss, reward = tiny_rl.policy_loss(model, outputs[rank::NUM_RANKS])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if engine is not None:
                engine.resume_memory_occupation(["weights"])
            update(engine, model, step + 1)
            if engine is not None:
                engine.resume_memory_occupation()
                print(
                    f"step {step}: mean reward {reward:.3f} on rank 0, then weights {engine.weight_version}"
                )
        check(engine, model, model_path)
    finally:
        if engine is not None:
            engine.shutdown()


def check(engine: Engine | None, model: torch.nn.Module, model_path: Path) -> None:
    """Compare the engine with a whole copy of the trainer's weights."""
    weights = dict(gathered(model))
    if engine is not None:
        whole = tiny_rl.Trainer(model_path)
        whole.model.load_state_dict(weights)
        answer = engine.generate(input_ids=tiny_rl.PROMPT, sampling_params=tiny_rl.GREEDY)
        print("engine and trainer agree:", answer["output_ids"] == whole.greedy())


def run(model_path: Path, num_steps: int) -> None:
    init_method = f"tcp://127.0.0.1:{tiny_rl.free_port()}"
    torch.multiprocessing.spawn(  # type: ignore[no-untyped-call, attr-defined]
        train, args=(init_method, model_path, num_steps), nprocs=NUM_RANKS
    )


if __name__ == "__main__":
    tiny_rl.main(__doc__, run)
