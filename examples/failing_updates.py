"""Updates that fail, each in its way: the old weights serve, bit for bit, and the next update works.

    PYTHONPATH=compat:python python examples/failing_updates.py [--url URL --model-path FOLDER]

A bucket with one wrong shape, within a session; one rank that cannot read what it was sent; a trainer that
disappears in the middle of its broadcasts. Source: sequence 7 of the contract. Needs `requests`.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import served_engine
import tiny_rl
import torch
import torch.distributed as dist
from served_engine import POLL_S, Refused, ServedEngine, expect
from sglang.srt.utils import MultiprocessingSerializer
from torch.distributed import distributed_c10d as c10d

ALL_ROWS = 10**6
SHARED_MEMORY = Path("/dev/shm")
GROUP = "trainer"
WEIGHTS = list[tuple[str, torch.Tensor]]


def fingerprint(engine: ServedEngine, names: Sequence[str]) -> str:
    """Of every weight as it serves, to the last bit."""
    digest = hashlib.sha256()
    for name in names:
        weight = engine.post("/get_weights_by_name", {"name": name, "truncate_size": ALL_ROWS})
        digest.update(json.dumps(weight).encode())
    return digest.hexdigest()


def expect_refused(engine: ServedEngine, names: Sequence[str], update: Callable[[], Any], word: str) -> None:
    """The update is refused, with a reason that has this word in it, and has changed nothing."""
    before = fingerprint(engine, names), engine.greedy(), engine.get("/get_weight_version")
    try:
        update()
    except Refused as refused:
        expect(f"refused with {refused}", refused.status == 400 and word in str(refused.body))
    else:
        expect(f"an update is refused because of {word}", False)
    after = fingerprint(engine, names), engine.greedy(), engine.get("/get_weight_version")
    expect("the old weights serve, bit for bit", after == before)


def expect_updated(engine: ServedEngine, reply: Any, trainer: tiny_rl.Trainer, version: str) -> None:
    is_new = reply["weight_version"] == version and engine.greedy() == trainer.greedy()
    expect(f"the next update works: {reply['message']}", is_new)


def wrong_shape(engine: ServedEngine, trainer: tiny_rl.Trainer) -> None:
    print("a bucket with one wrong shape, in a session:", flush=True)
    weights = trainer.next_weights()
    names = [name for name, _ in weights]
    *good, last = tiny_rl.buckets(iter(weights))
    name, tensor = last[0]
    bad = [(name, tensor[:-1].clone()), *last[1:]]
    engine.post("/begin_weight_update")
    for bucket in good:
        engine.update(bucket)
    expect_refused(engine, names, lambda: engine.update(bad), name)
    # The session is open still, with what was right in it: here the same bucket comes again.
    engine.update(last)
    expect_updated(engine, engine.post("/end_weight_update", {"weight_version": "1"}), trainer, "1")


def failing_rank(engine: ServedEngine, trainer: tiny_rl.Trainer) -> None:
    print("a rank that cannot read its entry:", flush=True)
    weights = trainer.next_weights()
    names = [name for name, _ in weights]
    entries = [MultiprocessingSerializer.serialize(weights, output_str=True) for _ in range(engine.num_ranks)]
    body = {"serialized_named_tensors": [*entries[:-1], entry_of_the_dead(weights)], "weight_version": "2"}
    tp_size = engine.get("/server_info")["tp_size"]
    rank = f"rank {tp_size - 1}" if tp_size > 1 else ""
    expect_refused(engine, names, lambda: engine.post("/update_weights_from_tensor", body), rank)
    body["serialized_named_tensors"] = entries
    expect_updated(engine, engine.post("/update_weights_from_tensor", body), trainer, "2")


def entry_of_the_dead(weights: WEIGHTS) -> str:
    """What a rank of the trainer sent before it ended, and its memory with it."""
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Pipe(duplex=False)
    rank = context.Process(target=serialize, args=(outbox, weights))
    rank.start()
    entry: str = inbox.recv()
    rank.join()
    # torch's manager of shared memory takes a moment to notice.
    while any(SHARED_MEMORY.glob(f"torch_{rank.pid}_*")):
        time.sleep(POLL_S)
    return entry


def serialize(outbox: Connection, weights: WEIGHTS) -> None:
    copies = [(name, tensor.clone()) for name, tensor in weights]
    outbox.send(MultiprocessingSerializer.serialize(copies, output_str=True))


def lost_trainer(engine: ServedEngine, trainer: tiny_rl.Trainer) -> None:
    print("a trainer that disappears in the middle of its broadcasts:", flush=True)
    weights = trainer.next_weights()
    names = [name for name, _ in weights]
    expect_refused(engine, names, lambda: broadcast(engine, weights, len(weights) // 2), GROUP)
    expect_updated(engine, broadcast(engine, weights, len(weights)), trainer, "3")


def broadcast(engine: ServedEngine, weights: WEIGHTS, num_sent: int) -> Any:
    """Announce all weights, of which a trainer in a process of its own sends so many; the reply."""
    port = tiny_rl.free_port()
    world_size = 1 + engine.num_ranks
    trainer = multiprocessing.get_context("spawn").Process(
        target=send, args=(port, world_size, [tensor for _, tensor in weights[:num_sent]])
    )
    trainer.start()
    address = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": world_size}
    engine.post("/init_weights_update_group", {**address, "group_name": GROUP, "backend": "gloo"})
    announcement = {
        "names": [name for name, _ in weights],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in weights],
        "shapes": [list(tensor.shape) for _, tensor in weights],
    }
    try:
        return engine.post(
            "/update_weights_from_distributed",
            {**announcement, "group_name": GROUP, "weight_version": "3", "timeout_s": 60},
        )
    finally:
        engine.post("/destroy_weights_update_group", {"group_name": GROUP})
        trainer.join()


def send(port: int, world_size: int, tensors: list[torch.Tensor]) -> None:
    """Rank 0 of a named group, made as frameworks make it; it ends without a word."""
    timeout = timedelta(seconds=60)
    torch_dist: Any = dist  # not all of it is exported
    store, rank, size = next(torch_dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    prefixed = torch_dist.PrefixStore(GROUP, store)
    make_group: Any = c10d._new_process_group_helper
    group, _ = make_group(size, rank, [], dist.Backend("gloo"), prefixed, group_name=GROUP, timeout=timeout)
    c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
    for tensor in tensors:
        dist.broadcast(tensor, 0, group=group)
    os._exit(0)


def run(engine: ServedEngine, model_path: Path) -> None:
    trainer = tiny_rl.Trainer(model_path)
    engine.post("/update_weights_from_disk", {"model_path": str(model_path), "weight_version": "0"})
    for failure in (wrong_shape, failing_rank, lost_trainer):
        failure(engine, trainer)


if __name__ == "__main__":
    served_engine.main(__doc__, run, tp_size=2)
