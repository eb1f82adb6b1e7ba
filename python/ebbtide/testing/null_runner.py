"""A runner without a model that asserts its correct use, and the configuration of an engine around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from ebbtide.srt.argument_checks import settled
from ebbtide.srt.config import ANY_NAME, EngineConfig, ModelConfig, resolve_for
from ebbtide.srt.managers.wire.generation import LOWEST_LOGPROB
from ebbtide.srt.model_executor.batch_plan import (
    SAMPLED_BEFORE,
    BatchPlan,
    BeforeMasks,
    LogprobArrays,
    LogprobSpec,
    PassOutOfMemory,
    SampleSpec,
    StepResult,
)
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_kv import NullKV, NullMemory

CONTEXT_LEN = 4096
POOL_TOKENS = 65_536


class NullRunner:
    """A runner without a model: the next token is a function of the weights, the seed and the position.

    So an output shows which weights sampled each token, and does not depend on how requests are batched.

    A forward pass asserts that its memory is resident, its weights are complete, and its tokens are those of
    the requests.

    Attributes:
        value: of the weights, see `NullWeights`; None: they are incomplete.
        needed: memory that forward passes read.
        kv: the KV cache to check; None: no checks.
        adapters: value of each slot; None: incomplete.
        num_steps: number of forward passes so far.
        follows_passes: whether copies run after the passes under way, as on their stream.
        under_way: passes whose results were not asked for yet.
        faults: exceptions that the next passes raise, one each, after all their changes are made.
    """

    VOCAB_SIZE = 1000

    def __init__(self) -> None:
        self.value: int | None = 0
        self.needed: list[NullMemory] = []
        self.kv: NullKV | None = None
        self.adapters: list[int | None] = []
        self.num_steps = 0
        self.follows_passes = False
        self.under_way: list[NullStep] = []
        self.faults: list[PassOutOfMemory] = []
        self._sampled_by_row: dict[int, int] = {}

    def change(self, value: int | None) -> None:
        """Change the weights. If `follows_passes`, passes under way may still read the old ones."""
        self.value = value
        if self.follows_passes:
            for step in self.under_way:
                step.value = value

    def ended(self, step: NullStep) -> None:
        """Note that the result of a pass was asked for."""
        self.under_way.remove(step)

    def token(self, seed: int, position: int, value: int) -> int:
        """The token that weights of this value sample at this output position."""
        return (seed * 7919 + position * 104729 + value * 31) % (self.VOCAB_SIZE - 1) + 1

    def launch(self, plan: BatchPlan, before_masks: BeforeMasks = None) -> NullStep:
        value = self.value
        assert value is not None, "a forward pass ran on weights that are not whole"
        assert all(memory.resident_bytes for memory in self.needed), "a forward pass ran on released memory"
        values_R = self._values(plan, value)
        if self.kv is not None:
            self.kv.copy(plan.copies_before)
        self._check_tokens(plan, values_R)
        if self.kv is not None:
            self.kv.copy(plan.copies_after)
        self.num_steps += 1
        if before_masks is not None and any(spec.mask is not None for spec in plan.specs):
            before_masks()
        if self.faults:
            raise self.faults.pop()
        tokens = [
            self._choose(spec, num_outputs, value) if samples else -1
            for spec, num_outputs, samples, value in zip(
                plan.specs, plan.num_outputs_R.tolist(), plan.samples_R.tolist(), values_R, strict=True
            )
        ]
        self._sampled_by_row.update(zip(plan.page_rows_R.tolist(), tokens, strict=True))
        wanted = [spec.logprobs for spec in plan.specs if spec.logprobs is not None]
        # Right only for prompts that are computed in one chunk.
        input_logprobs = {
            index: self._logprobs(len(spec.prompt_ids) - 1, [spec.logprobs], values_R[index])
            for index, spec in enumerate(plan.specs)
            if spec.logprobs is not None and spec.logprobs.start is not None
        }
        output_logprobs = self._logprobs(len(tokens), wanted, value) if wanted else None
        slots = set() if plan.adapters_R is None else set(plan.adapters_R.tolist()) - {-1}
        read = {slot: self.adapters[slot] for slot in slots}
        step = NullStep(self, value, StepResult(tokens, output_logprobs, input_logprobs), read)
        self.under_way.append(step)
        return step

    def forget_room(self) -> None: ...
    def _values(self, plan: BatchPlan, value: int) -> list[int]:
        """For each request the value of the weights with its adapter."""
        if plan.adapters_R is None:
            return [value] * len(plan.specs)
        values_R = []
        for slot in plan.adapters_R.tolist():
            adapter = self.adapters[slot] if slot >= 0 else 0
            assert adapter is not None, "a forward pass ran on an adapter that is not whole"
            values_R.append(self.adapted(value, adapter))
        return values_R

    @staticmethod
    def adapted(value: int, adapter: int) -> int:
        """The value of weights with an adapter."""
        return value + 101 * adapter

    def _logprobs(self, num_positions: int, wanted: Sequence[LogprobSpec], value: int) -> LogprobArrays:
        """The same logprob for every token; the most likely tokens are those with the lowest ids."""
        num_top, num_chosen = max(spec.top for spec in wanted), max(len(spec.token_ids) for spec in wanted)
        wide_NC = np.full((num_positions, 1 + num_top + num_chosen), self.logprob(value), dtype=np.float32)
        tokens_N1, top_NK, chosen_NC = np.split(wide_NC, [1, 1 + num_top], axis=1)
        ids_NK = np.tile(np.arange(num_top, dtype=np.int32), (num_positions, 1))
        return LogprobArrays(
            tokens_N1[:, 0],
            top_NK if num_top else None,
            ids_NK if num_top else None,
            chosen_NC if num_chosen else None,
        )

    def _choose(self, spec: SampleSpec, num_outputs: int, value: int) -> int:
        """The token that `token` gives; with a mask, the first token that it allows."""
        if spec.mask is None:
            return self.token(spec.seed, num_outputs, value)
        words_W = np.empty(-(-self.VOCAB_SIZE // 32), dtype=np.int32)
        spec.mask.fill([], words_W[np.newaxis])
        return int(np.flatnonzero(np.unpackbits(words_W.view(np.uint8), bitorder="little"))[0])

    def logprob(self, value: int) -> float:
        """Logprob of any token: -value / 1024, or `LOWEST_LOGPROB`, as for NaN, if value // 100 is odd."""
        return LOWEST_LOGPROB if value // 100 % 2 else -value / 1024

    def _check_tokens(self, plan: BatchPlan, values_R: list[int]) -> None:
        """Assert that each request gets its own next tokens, and samples only after its last one."""
        input_ids = plan.input_ids_T.tolist()
        first = 0
        rows = zip(
            plan.specs,
            plan.page_rows_R.tolist(),
            plan.starts_R.tolist(),
            plan.num_new_R.tolist(),
            plan.samples_R.tolist(),
            plan.num_outputs_R.tolist(),
            values_R,
            strict=True,
        )
        for spec, row, start, num_new, samples, num_outputs, value in rows:
            tokens = [*spec.prompt_ids, *spec.output_ids]
            given = input_ids[first : first + num_new]
            if num_outputs > len(spec.output_ids):
                # The scheduler does not know the last sampled token yet, only that there is one.
                assert num_outputs == len(spec.output_ids) + 1
                assert given == [SAMPLED_BEFORE]
                assert not spec.needs_output_ids, "a penalty was computed without the last token"
                given = [self._sampled_by_row[row]]
                # With a mask, the token differs from what `token` gives.
                tokens += given if spec.mask is not None else [self.token(spec.seed, num_outputs - 1, value)]
            end = start + num_new
            assert given == tokens[start:end]
            assert samples == (end == len(tokens) and spec.params.max_new_tokens != 0)
            if self.kv is not None:
                self.kv.compute(row, tokens, start, end)
            first += num_new
        assert first == len(input_ids)


@dataclass(eq=False, slots=True)
class NullStep:
    """A step that is under way until its result is asked for. What it reads must not change meanwhile.

    Attributes:
        value: the value that the weights must have at its end.
        read: the values of the adapter slots that it reads.
    """

    runner: NullRunner
    value: int | None
    result: StepResult
    read: dict[int, int | None] = field(default_factory=dict)

    def wait(self) -> StepResult:
        self.runner.ended(self)
        assert self.runner.value == self.value, "the weights changed under a forward pass"
        now = {slot: self.runner.adapters[slot] for slot in self.read}
        assert now == self.read, "an adapter changed under a forward pass"
        assert all(memory.resident_bytes for memory in self.runner.needed), "memory went under a forward pass"
        return self.result


def null_args(**fields: Any) -> ServerArgs:
    """`ServerArgs` for an engine without a model."""
    needed = {"model_path": "null", "device": "cpu", "max_total_tokens": POOL_TOKENS}
    needed["skip_tokenizer_init"] = True
    return ServerArgs(**{"log_level": "error", **needed, **fields})


def null_config(args: ServerArgs) -> EngineConfig:
    """The configuration of an engine without a model."""
    return resolve_for(
        settled(args),
        ModelConfig(
            path=args.model_path,
            tokenizer_path=args.model_path,
            tokenizer_mode="auto",
            trust_remote_code=False,
            architecture="NullForCausalLM",
            architectures=["NullForCausalLM"],
            model_type="null",
            hf_config=SimpleNamespace(),
            dtype="float32",
            context_len=args.context_length if args.context_length is not None else CONTEXT_LEN,
            vocab_size=NullRunner.VOCAB_SIZE,
            num_layers=1,
            num_kv_heads=1,
            num_heads=1,
            head_dim=1,
            eos_token_ids=frozenset(),
            load_format="dummy",
            served_model_name="null",
            names_answered=frozenset({ANY_NAME}),
        ),
    )
