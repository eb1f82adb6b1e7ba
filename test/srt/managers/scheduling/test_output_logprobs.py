"""Logprobs of output tokens on their way out of the scheduler: each request gets its own, once, in order."""

from typing import Any

import numpy as np
import pytest

from ebbtide.srt.managers.io_struct import (
    LogprobList,
    ManagerInput,
    TokenizedGenerateReqInput,
    TokenOutput,
)
from ebbtide.srt.managers.wire.generation import LogprobRows
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks, LogprobArrays
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.testing import SchedulerHarness, default_schedule
from ebbtide.testing.harness import Output

NUM_TOKENS = 40
# With so many most likely tokens a position has more numbers than the scheduler keeps of a running request,
# and with so many some positions fit.
WIDEST, WIDE = 600, 60
NUM_NAMED = 2


def told(seeds: Any, positions: Any) -> tuple[Any, Any, Any, Any]:
    """Numbers that say whose they are: for the token, the most likely ones, their ids, and those named."""
    own = np.asarray(seeds) * 1000 + positions
    ranks, names = np.arange(WIDEST), np.arange(NUM_NAMED)
    return own, own[..., None] + ranks * 8192, own[..., None] * 1000 + ranks, -own[..., None] - names * 0.5


class Harness(SchedulerHarness):
    """Keeps what comes back of logprobs, by rid; those that its runner gives say whose they are."""

    def __init__(self, **options: Any) -> None:
        self.logprobs: dict[str, LogprobList] = {}
        super().__init__(**options)
        self._launch = self.runner.launch
        self.runner.launch = self._launch_telling  # type: ignore[method-assign]

    def _launch_telling(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> Any:
        step = self._launch(plan, before_masks)
        if step.result.output_logprobs is not None:
            own, tops, ids, named = told([spec.seed for spec in plan.specs], plan.num_outputs_R)
            step.result.output_logprobs = LogprobArrays(
                own.astype(np.float32),
                tops.astype(np.float32),
                ids.astype(np.int32),
                named.astype(np.float32),
            )
        return step

    def ask(
        self, seed: int, *, interval: int | None, top: int = 0, num_named: int = 0, logprobs: bool = True
    ) -> None:
        """Queue the request of this rid and seed; its answer comes as a whole if no interval is given."""
        rid = str(seed)
        self.outputs[rid], self.logprobs[rid] = Output(), LogprobList(top, num_named)
        self.deliver(
            TokenizedGenerateReqInput(
                rid=rid,
                input_ids=list(range(10 * seed, 10 * seed + 7)),
                sampling_params=SamplingParams(max_new_tokens=NUM_TOKENS),
                max_new_tokens=NUM_TOKENS,
                seed=seed,
                stream=interval is not None,
                stream_interval=interval or 1,
                return_logprob=logprobs,
                top_logprobs_num=top,
                token_ids_logprob=tuple(range(num_named)),
            )
        )

    def send(self, message: ManagerInput) -> None:
        super().send(message)
        if isinstance(message, TokenOutput):
            for output in message.outputs:
                if output.logprobs is not None:
                    self.logprobs[output.rid].add(output.logprobs)
            for streamed in message.streamed:
                if streamed.logprobs is not None:
                    rows = LogprobRows(streamed.logprobs)
                    for place, rid in enumerate(streamed.rids):
                        self.logprobs[rid].append(rows, place)

    def check(self, seed: int, count: int, *, top: int = 0, num_named: int = 0) -> None:
        """So many tokens of a request have come, with the logprobs of just them."""
        assert len(self.outputs[str(seed)].token_ids) == count
        own, tops, ids, named = told(seed, np.arange(count))
        logprobs = self.logprobs[str(seed)]
        assert logprobs.tokens == own.tolist()
        pairs = zip(tops[:, :top].tolist(), ids[:, :top].tolist(), strict=True)
        assert list(logprobs.tops()) == [list(zip(*pair, strict=True)) for pair in pairs]
        assert list(logprobs.chosen()) == named[:, :num_named].tolist()


@pytest.mark.parametrize("interval", [None, 1, 3])
def test_requests_that_ask_for_different_logprobs_get_their_own_across_retractions(
    interval: int | None,
) -> None:
    harness = Harness(num_pages=40)
    asked: dict[int, dict[str, int]] = {
        1: {},
        2: {"top": 2},
        3: {"num_named": NUM_NAMED},
        4: {"top": 2, "num_named": 1},
        5: {"top": WIDE, "num_named": NUM_NAMED},
        6: {"top": WIDEST},
    }
    for seed, wanted in asked.items():
        harness.ask(seed, interval=interval, **wanted)
    harness.ask(7, interval=interval, logprobs=False)
    harness.run_until_idle()
    assert sum(output.num_retractions for output in harness.outputs.values()) > 0
    for seed, wanted in asked.items():
        harness.check(seed, NUM_TOKENS, **wanted)
    assert len(harness.outputs["7"].token_ids) == NUM_TOKENS
    assert not len(harness.logprobs["7"])


def test_an_aborted_request_has_the_logprobs_so_far_and_leaves_none_to_the_next() -> None:
    harness = Harness(schedule=default_schedule(max_running_requests=1))
    harness.ask(1, interval=None, top=2)
    harness.turn(9)
    harness.abort("1")
    harness.ask(2, interval=None)
    harness.run_until_idle()
    count = len(harness.outputs["1"].token_ids)
    assert 0 < count < NUM_TOKENS
    harness.check(1, count, top=2)
    harness.check(2, NUM_TOKENS)
