"""An engine of several ranks dies as one."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fixtures.gpu_device import DEVICE
from fixtures.layouts import TWO_RANKS, Layout
from fixtures.references import Reference
from fixtures.servers import free_port, is_alive, wait_until

from ebbtide import Engine
from ebbtide.srt.errors import EngineError

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 250, "ignore_eos": True}


@pytest.mark.parametrize("layout", [TWO_RANKS])
def test_a_rank_that_dies_ends_the_engine_in_mid_decode_and_in_mid_update(
    layout: Layout, checkpoint_a: Path, reference_a: Reference
) -> None:
    arguments = {"max_total_tokens": 1 << 16, "log_level": "error", "skip_tokenizer_init": True}
    given = {**arguments, **DEVICE.server_args, **layout.server_args}
    with Engine(model_path=str(checkpoint_a), **given) as engine, ThreadPoolExecutor(2) as pool:
        pids = [rank["pid"] for rank in engine.memory_occupation()["ranks"]]
        engine.begin_weight_update()
        engine.update_weights_from_tensor(list(reference_a.weights().items())[:5])
        chunks = engine.generate(input_ids=[1, 2, 3], sampling_params=GREEDY, stream=True)
        next(chunks)
        # No trainer is there: every rank waits for it.
        joining = pool.submit(
            engine.init_weights_update_group, "127.0.0.1", free_port(), 1, 3, "group", "gloo"
        )
        wait_until(lambda: engine.server_info()["weight_update"]["session_open"], "the session is open")
        # The other rank now waits in a collective.
        os.kill(pids[1], signal.SIGSTOP)
        decoding = pool.submit(list, chunks)
        os.kill(pids[1], signal.SIGKILL)
        for waiting in (joining, decoding):
            error = waiting.exception()
            assert isinstance(error, EngineError)
            assert str(error).startswith("the scheduler-tp1 process was ended by SIGKILL")
        wait_until(lambda: not any(map(is_alive, pids)), "all have gone")
        with pytest.raises(EngineError, match="scheduler-tp1"):
            engine.generate(input_ids=[1], sampling_params=GREEDY)
