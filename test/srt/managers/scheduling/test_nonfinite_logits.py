"""Logits with NaN or +Inf in them: their request ends with the tokens before, or goes on and says so."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from fixtures.checkpoints import make_checkpoint
from fixtures.real_rank import RealRank
from safetensors.torch import load_file

from ebbtide.srt.managers.io_struct import (
    FinishReason,
    LogprobList,
    TokenizedGenerateReqInput,
    TokenOutput,
    UpdateWeightsFromTensorReqInput,
)
from ebbtide.srt.model_executor.batch_plan import BatchPlan, BeforeMasks
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.testing import SchedulerHarness, default_schedule

ABORTED = FinishReason("abort", message="logits are not finite")
PROMPT = list(range(1, 20))
SPOILT_SEED = 7


class Harness(SchedulerHarness):
    """The logits of one seed are not finite from some output token on."""

    def __init__(self, first_bad: int, **schedule: Any) -> None:
        super().__init__(schedule=default_schedule(**schedule))
        self._first_bad = first_bad
        self._launch = self.runner.launch
        self.runner.launch = self._launch_spoilt  # type: ignore[method-assign]

    def _launch_spoilt(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> Any:
        step = self._launch(plan, before_masks)
        step.result.num_nonfinite = {
            index: 1
            for index, spec in enumerate(plan.specs)
            if spec.seed == SPOILT_SEED
            and plan.samples_R[index]
            and plan.num_outputs_R[index] >= self._first_bad
        }
        return step


@pytest.mark.parametrize("fields", [{}, {"stream_interval": 3}, {"stream": False}], ids=str)
@pytest.mark.parametrize("first_bad", [0, 5])
def test_a_request_ends_with_the_tokens_before_them_and_others_go_on(
    first_bad: int, fields: dict[str, Any]
) -> None:
    harness = Harness(first_bad)
    spoilt = harness.generate(PROMPT, seed=SPOILT_SEED, **fields)
    other = harness.generate(range(50, 60), seed=3, **fields)
    harness.run_until_idle()
    expected = [harness.runner.token(SPOILT_SEED, place, 0) for place in range(first_bad)]
    assert (harness.outputs[spoilt].token_ids, harness.outputs[spoilt].finish) == (expected, ABORTED)
    assert harness.outputs[other].finish == FinishReason("length", length=16)
    assert len(harness.outputs[other].token_ids) == 16
    # Nobody goes on from KV that such logits came from.
    later = harness.generate(PROMPT, seed=4)
    harness.run_until_idle()
    assert harness.outputs[later].cached_tokens == 0


def test_where_requests_go_on_nobody_shares_their_kv() -> None:
    harness = Harness(5, ends_nonfinite=False)
    spoilt = harness.generate(PROMPT, seed=SPOILT_SEED)
    harness.run_until_idle()
    assert harness.outputs[spoilt].finish == FinishReason("length", length=16)
    assert harness.outputs[spoilt].num_nonfinite == 11
    again = harness.generate(PROMPT, seed=4)
    harness.run_until_idle()
    assert (harness.outputs[again].cached_tokens, harness.outputs[again].num_nonfinite) == (0, 0)


class Rank(RealRank):
    """Keeps what comes back of its one request at a time."""

    def send(self, message: Any) -> None:
        if isinstance(message, TokenOutput):
            self.sent += message.outputs
        else:
            super().send(message)

    def answer(self, **fields: Any) -> Any:
        """The last output of a request that does not stream."""
        self.sent: list[Any] = []
        length = fields.pop("max_new_tokens", 6)
        self._incoming.append(
            TokenizedGenerateReqInput(
                rid="r",
                input_ids=PROMPT,
                sampling_params=SamplingParams(max_new_tokens=length, ignore_eos=True, **fields),
                max_new_tokens=length,
                seed=0,
                stream=False,
                return_logprob=True,
                logprob_start=0 if length == 0 else None,
                top_logprobs_num=2,
            )
        )
        while not self.sent:
            self.scheduler.turn()
        return self.sent[-1]

    def take(self, tensors: Any) -> Any:
        payload = [safetensors.torch.save(tensors)]
        return self.apply(
            UpdateWeightsFromTensorReqInput(serialized_named_tensors=payload, load_format="safetensors")
        )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("a"), "Qwen3ForCausalLM", seed=1)


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        *(("abort", "model.norm.weight"), ("continue", "model.layers.0.input_layernorm.weight")),
        *(("abort", "overflow"), ("continue", "overflow")),
    ],
)
def test_weights_that_give_none_are_told_until_others_serve(checkpoint: Path, rule: str, fault: str) -> None:
    rank = Rank(checkpoint, nonfinite_logits=rule, page_size=8)
    before = rank.answer(temperature=0.0)
    assert (before.finish.kind, before.num_nonfinite) == ("length", 0)
    good = load_file(checkpoint / "model.safetensors")
    bad = dict(good)
    if fault == "overflow":
        bad |= {name: good[name] * 1e25 for name in ("model.norm.weight", "lm_head.weight")}
    else:
        bad[fault] = good[fault].clone()
        bad[fault][3] = float("nan")
    assert rank.take(bad).num_nonfinite == int(fault != "overflow")
    for params in ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"max_new_tokens": 0}):
        output = rank.answer(**params)
        scores = params.get("max_new_tokens") == 0
        if rule == "abort":
            assert (output.finish, output.token_ids) == (ABORTED, [])
        else:
            assert (output.finish.kind, len(output.token_ids)) == ("length", 0 if scores else 6)
            assert output.num_nonfinite == (len(PROMPT) - 1 if scores else 6)
            told = LogprobList(2, 0)
            told.add(output.start.input_logprobs if scores else output.logprobs)
            assert len(told) == (len(PROMPT) if scores else 6)
            assert all(logprob is not None for logprob in told.tokens[scores:])
    rank.take(good)
    assert rank.answer(temperature=0.0).token_ids == before.token_ids
    rank.store.arena.close()
