"""The model runner against transformers, and against itself under every way of cutting up the work."""

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.checkpoints import GEMMA2, GEMMA3, LLAMA3_ROPE, make_checkpoint
from fixtures.line_faults import raised_at_line
from fixtures.logprobs import PositionLogprobs
from fixtures.model_runs import Run, RunnerDriver
from fixtures.references import Reference

from ebbtide.srt.device import CpuDevice
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import EngineError
from ebbtide.srt.model_executor import model_runner, pass_room
from ebbtide.srt.model_executor.batch_plan import (
    SAMPLED_BEFORE,
    BatchPlan,
    LogprobSpec,
    PassOutOfMemory,
    PendingStep,
)
from ebbtide.srt.model_executor.pass_room import PassRoom
from ebbtide.srt.model_executor.sampling.sampler import LISTED_BYTES
from ebbtide.srt.sampling_params import SamplingParams

SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
LINEAR_ROPE = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 32}
YARN |= {"beta_fast": 8, "mscale": 0.9, "mscale_all_dim": 0.6}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-sharded": ("LlamaForCausalLM", {"tied": True, "shards": 3}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": ("LlamaForCausalLM", {"rope_parameters": LINEAR_ROPE}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-wide-heads": ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}),
    "qwen3-windows": ("Qwen3ForCausalLM", SLIDING),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3-tied-capped": ("Gemma3ForCausalLM", {"tied": True, **GEMMA3, "final_logit_softcapping": 4.0}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3-moe-plain-weights": ("Qwen3MoeForCausalLM", {"norm_topk_prob": False}),
    "qwen3-moe-dense-layers": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3-moe-every-second": ("Qwen3MoeForCausalLM", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "mixtral": ("MixtralForCausalLM", {}),
    "mistral-windows": ("MistralForCausalLM", {"sliding_window": 9}),
    "phi3": ("Phi3ForCausalLM", {}),
    "phi3-windows-partial": ("Phi3ForCausalLM", {"sliding_window": 9, "partial_rotary_factor": 0.5}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {}),
    "qwen2-moe-dense-layers": (
        "Qwen2MoeForCausalLM",
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True, "qkv_bias": False},
    ),
    "gpt-oss": ("GptOssForCausalLM", {"num_hidden_layers": 3}),
    "glm4-moe": ("Glm4MoeForCausalLM", {}),
    "glm4-moe-lite": ("Glm4MoeLiteForCausalLM", {"num_hidden_layers": 3, "rope_interleave": False}),
    "deepseek-v2": ("DeepseekV2ForCausalLM", {"q_lora_rank": None}),
    "deepseek-v2-groups-yarn": (
        "DeepseekV2ForCausalLM",
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "rope_parameters": YARN},
    ),
    "deepseek-v3": ("DeepseekV3ForCausalLM", {"num_hidden_layers": 3}),
    "deepseek-v3-yarn": (
        "DeepseekV3ForCausalLM",
        {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": YARN},
    ),
    "glm4-moe-groups": (
        "Glm4MoeForCausalLM",
        {
            "num_hidden_layers": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "attention_bias": True,
            "use_qk_norm": False,
            "partial_rotary_factor": 0.25,
        },
    ),
    "nemotron-h": ("NemotronHForCausalLM", {}),
    "nemotron-h-latents": (
        "NemotronHForCausalLM",
        {
            "moe_latent_size": 32,
            "n_group": 2,
            "topk_group": 1,
            "n_groups": 4,
            "num_key_value_heads": 1,
            "layers_block_type": ["moe", "full_attention", "linear_attention", "moe"],
        },
    ),
}
# Served by transformers' code.
BORROWED: dict[str, tuple[str, dict[str, Any]]] = {
    "olmo3": (
        "Olmo3ForCausalLM",
        {"sliding_window": 9, "num_hidden_layers": 3, "layer_types": GEMMA3["layer_types"]},
    ),
    "granite": (
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "logits_scaling": 0.7,
            "residual_multiplier": 0.8,
            "attention_multiplier": 0.4,
        },
    ),
    "cohere-tied": ("CohereForCausalLM", {"tied": True, "logit_scale": 0.5, "use_qk_norm": True}),
    "starcoder2-windows": ("Starcoder2ForCausalLM", {"sliding_window": 9}),
    "phi-biases": ("PhiForCausalLM", {"partial_rotary_factor": 0.5}),
    "gpt2-tied": ("GPT2LMHeadModel", {"tied": True}),
}
# A state adds up what all tokens before have left, in another order than transformers does in whole prompts.
STATES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3NextForCausalLM", {}),
    "qwen3.5": ("Qwen3_5ForCausalLM", {}),
    "qwen3.5-tied-biases": ("Qwen3_5ForCausalLM", {"tied": True, "attention_bias": True}),
    "qwen3.5-one-key-head": (
        "Qwen3_5ForCausalLM",
        {"linear_num_key_heads": 1, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 16},
    ),
    "qwen3.5-moe": ("Qwen3_5MoeForCausalLM", {}),
    "qwen3.5-with-vision": ("Qwen3_5ForConditionalGeneration", {}),
    "qwen3.5-moe-with-vision-tied": ("Qwen3_5MoeForConditionalGeneration", {"tied": True}),
}
CHECKPOINTS |= STATES
PROMPT = list(b"Ebb and flow: the tide goes out, and the tide comes in again.")
OTHER_PROMPTS = [list(b"a"), list(b"Harbour at low water"), list(bytes(range(100, 200)))]

Alone = Callable[[list[int], int], Run]


def make(folder: Path, name: str, **more: Any) -> Path:
    architecture, options = (CHECKPOINTS | BORROWED)[name]
    return make_checkpoint(folder, architecture, **{**options, **more})


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def alone(qwen3: Path) -> Alone:
    """What a prompt gives by itself, all of it at once."""
    known: dict[tuple[int, ...], Run] = {}

    def run(prompt: list[int], num_tokens: int) -> Run:
        if (key := (*prompt, num_tokens)) not in known:
            driver = RunnerDriver(qwen3)
            known[key] = driver.start(prompt, logprobs=LogprobSpec())
            driver.generate([known[key]], num_tokens)
        return known[key]

    return run


def tokens(entries: list[PositionLogprobs]) -> list[float | None]:
    return [entry.token for entry in entries]


def expected_logprobs(reference: Reference, run: Run) -> list[float]:
    """Of its tokens after the first."""
    expected = reference.logprobs(run.token_ids)
    return [expected[position, token].item() for position, token in enumerate(run.token_ids[1:])]


def assert_same(run: Run, expected: Run) -> None:
    assert run.output_ids == expected.output_ids
    assert tokens(run.logprobs) == pytest.approx(tokens(expected.logprobs), abs=1e-5)


BY_TRANSFORMERS = ["llama-rope-llama3", "qwen3-windows", "gemma2", "phi3-windows-partial"]


@pytest.mark.parametrize(
    ("name", "model_impl"),
    [
        *((name, "auto") for name in CHECKPOINTS | BORROWED),
        *((name, "transformers") for name in BY_TRANSFORMERS),
    ],
)
def test_greedy_output_and_logprobs_equal_transformers(name: str, model_impl: str, tmp_path: Path) -> None:
    reference, driver = Reference(make(tmp_path, name)), RunnerDriver(tmp_path, model_impl=model_impl)
    assert driver.runner.model.is_native == (name in CHECKPOINTS and model_impl == "auto")
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))

    driver.generate([run], 24, chunk=17)

    assert run.output_ids == reference.greedy(PROMPT, 24)
    predicted = expected_logprobs(reference, run)
    atol = 1e-4 if name in STATES else 1e-5
    assert tokens(run.prompt_logprobs + run.logprobs) == pytest.approx(predicted, abs=atol)


@pytest.mark.parametrize("chunk", [7, 1000])
def test_with_keys_and_values_in_fp8_it_is_transformers_with_rounded_ones(qwen3: Path, chunk: int) -> None:
    reference = Reference(qwen3, kv_cache_dtype="fp8_e4m3")
    driver = RunnerDriver(qwen3, kv_cache_dtype="fp8_e4m3", page_size=4)
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))

    driver.generate([run], 24, chunk=chunk)

    assert reference.accepts(PROMPT, run.output_ids)
    predicted = expected_logprobs(reference, run)
    assert tokens(run.prompt_logprobs + run.logprobs) == pytest.approx(predicted, abs=reference.tie)
    exact = expected_logprobs(Reference(qwen3), run)
    assert tokens(run.prompt_logprobs + run.logprobs) != pytest.approx(exact, abs=reference.tie)


@pytest.mark.parametrize(
    "name", ["qwen3-windows", "gemma2", "gemma3", "gpt-oss", "deepseek-v3", "olmo3", "granite"]
)
def test_windows_and_latents_hold_across_chunks_shared_prefixes_and_retracts(
    name: str, tmp_path: Path
) -> None:
    reference, driver = Reference(make(tmp_path, name)), RunnerDriver(tmp_path, page_size=4)
    owner = driver.start(PROMPT, logprobs=LogprobSpec())
    driver.generate([owner], 6, chunk=7)
    # The pages of the owner's prompt, and then all that a retracted request computes anew at once.
    guest_prompt = PROMPT[:48] + list(b" But another ending.")
    guest = driver.start(guest_prompt, shares=owner, num_shared=48)
    again = driver.start(owner.token_ids, logprobs=LogprobSpec())

    driver.generate([owner, guest], 20, chunk=5)
    driver.generate([again], 14, chunk=13)

    assert owner.output_ids == reference.greedy(PROMPT, 20)
    assert guest.output_ids == reference.greedy(guest_prompt, 20)
    assert again.output_ids == owner.output_ids[6:]
    assert tokens(again.logprobs) == pytest.approx(tokens(owner.logprobs)[6:], abs=1e-4)


def test_chunks_that_do_not_reach_the_end_sample_nothing(qwen3: Path, alone: Alone) -> None:
    driver = RunnerDriver(qwen3)
    first, second = driver.start(PROMPT), driver.start(PROMPT)

    result = driver.step((first, 10), (second, len(PROMPT)))

    assert result.token_ids == [-1, alone(PROMPT, 12).output_ids[0]]
    assert driver.step((first, 10)).token_ids == [-1]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_mixed_prefill_and_decode_give_what_each_gives_alone(
    qwen3: Path, alone: Alone, page_size: int
) -> None:
    driver = RunnerDriver(qwen3, page_size=page_size)
    # Pages that are stale or undefined do not leak into results.
    for layer in range(2):
        driver.runner.kv_pool.k(layer).fill_(float("nan"))
        driver.runner.kv_pool.v(layer).fill_(float("nan"))
    early = driver.start(PROMPT, logprobs=LogprobSpec())
    driver.generate([early], 5)
    late = [driver.start(prompt, logprobs=LogprobSpec()) for prompt in OTHER_PROMPTS]
    # `early` decodes while the others are prefilled, whole and in parts.
    driver.step((late[0], 1), (early, 1), (late[1], 5), (late[2], 100))
    driver.step((late[1], 15), (early, 1), (late[2], 1))

    driver.generate([early, *late], 12)

    for run in [early, *late]:
        assert_same(run, alone(run.spec.prompt_ids, 12))


@pytest.mark.parametrize(
    ("start", "chunk"), [(0, None), (0, 7), (20, 7), (len(PROMPT) - 1, None), (len(PROMPT), 7)]
)
def test_prompt_logprobs_begin_after_the_asked_position(
    qwen3: Path, start: int, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk is None:
        # In pieces of five positions: one may hold the end of one prompt and the beginning of the next.
        monkeypatch.setattr(model_runner, "PROMPT_LOGITS_ROWS", 5)
    else:
        # Of two positions, where one asks for three tokens and three ids.
        monkeypatch.setattr(model_runner, "PROMPT_ALTERNATIVES", 12)
    driver = RunnerDriver(qwen3)
    other = driver.start(PROMPT, logprobs=LogprobSpec(start=start))
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=start, top=3, token_ids=(7, 200, 7)))

    driver.generate([other, run], 2, chunk=chunk)
    # Where nobody asks for more than the tokens' own.
    first, second = (driver.start(PROMPT, logprobs=LogprobSpec(start=start)) for _ in range(2))
    driver.generate([first, second], 2, chunk=chunk)

    for each in (other, first, second):
        assert tokens(each.prompt_logprobs) == pytest.approx(tokens(run.prompt_logprobs), abs=1e-5)
    expected = Reference(qwen3).logprobs(PROMPT)
    assert len(run.prompt_logprobs) == max(0, len(PROMPT) - 1 - start)
    for position, entry in enumerate(run.prompt_logprobs, start=start + 1):
        row = expected[position - 1]
        values, ids = row.topk(3)
        assert entry.token == pytest.approx(row[PROMPT[position]].item(), abs=1e-4)
        assert [token for _, token in entry.top] == ids.tolist()
        assert [value for value, _ in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.chosen == pytest.approx(row[torch.tensor([7, 200, 7])].tolist(), abs=1e-4)


def test_logprobs_only_for_those_who_ask(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3)
    silent, asking, scoring = (
        driver.start(PROMPT),
        driver.start(PROMPT, logprobs=LogprobSpec(top=1)),
        driver.start(PROMPT, logprobs=LogprobSpec(start=3)),
    )

    result = driver.step((silent, len(PROMPT)), (asking, len(PROMPT)), (scoring, 30))

    assert [len(run.logprobs) for run in (silent, asking, scoring)] == [0, 1, 0]
    assert [len(run.prompt_logprobs) for run in (silent, asking, scoring)] == [0, 0, 30 - 3]
    assert list(result.input_logprobs) == [2]
    assert asking.logprobs[0].top == [(asking.logprobs[0].token, result.token_ids[1])]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3 with bfloat16 KV"])
def test_bfloat16_is_close_to_the_same_weights_in_float32(name: str, tmp_path: Path) -> None:
    name, _, is_kv_alone = name.partition(" ")
    dtype = {"dtype": "float32" if is_kv_alone else "bfloat16"}
    path = make(tmp_path, name, **dtype)
    driver = RunnerDriver(path, kv_cache_dtype="bfloat16", **dtype)
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))

    driver.generate([run], 8, chunk=32)

    assert driver.runner.kv_pool.k(0).dtype == torch.bfloat16
    given = torch.tensor(tokens(run.prompt_logprobs + run.logprobs))
    assert (given - torch.tensor(expected_logprobs(Reference(path), run))).abs().mean() < 0.1


def test_a_step_may_be_launched_before_the_token_it_continues_is_known(qwen3: Path, alone: Alone) -> None:
    prompts = [PROMPT, OTHER_PROMPTS[1]]
    driver = RunnerDriver(qwen3)
    runs = [driver.start(prompt) for prompt in prompts]
    driver.step(*((run, len(run.token_ids)) for run in runs))
    for _ in range(11):
        outputs = [list(run.output_ids) for run in runs]
        # The scheduler knows that there is a token, not which: the runner must take its own.
        for run in runs:
            run.output_ids[-1] = SAMPLED_BEFORE
        driver.step(*((run, 1) for run in runs))
        for run, before in zip(runs, outputs, strict=True):
            run.output_ids[: len(before)] = before

    assert [run.output_ids for run in runs] == [alone(prompt, 12).output_ids for prompt in prompts]


def test_in_the_middle_of_a_pass_of_several_ranks_too_little_memory_is_the_end(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3)
    driver.runner.room = PassRoom(CpuDevice(), ParallelGroup(2), 1, 1)
    with (
        raised_at_line(300, torch.OutOfMemoryError("Tried to allocate 2.00 GiB."), "/srt/model_executor/"),
        pytest.raises(EngineError, match=r"ends in the middle of a forward pass.* 2.00 GiB") as raised,
    ):
        driver.step((driver.start(PROMPT[:30]), 30))
    assert not isinstance(raised.value, PassOutOfMemory)


def test_room_is_for_what_a_pass_computes_and_for_the_logits_that_it_has_at_a_time(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, sizes = RunnerDriver(qwen3), list[tuple[int, ...]]()
    driver.runner.room = room = PassRoom(CpuDevice(), ParallelGroup(2), 1, 1)
    monkeypatch.setattr(room, "make", lambda *size: sizes.append(size))
    monkeypatch.setattr(driver.runner.sampler, "room_bytes", lambda specs: 1000 * len(specs))
    plain, scored = driver.start(PROMPT[:30]), driver.start(PROMPT[:20], logprobs=LogprobSpec(start=0, top=3))
    driver.step((plain, 20))
    driver.step((plain, 10), (scored, 20))
    driver.step((plain, 1), (scored, 1))
    monkeypatch.setattr(driver.runner, "graphs", SimpleNamespace(fits=lambda plan: plan.is_decode))
    assert driver.runner._size(BatchPlan.of_prompt(driver.start([7]).spec)) == (0, 1, 1000)
    assert sizes == [(20, 0, 0), (30, 60, 2000 + 30 * 3 * LISTED_BYTES), (2, 2, 2000)]


def test_what_is_kept_of_requests_keeps_no_smaller_pass_from_having_room(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3)
    device: Any = SimpleNamespace(
        total_bytes=1 << 40,
        make_room=lambda num_bytes: num_bytes <= device.total_bytes,
        trim=lambda: None,
        free_bytes=lambda: 7,
    )
    driver.runner.room = PassRoom(device, ParallelGroup(2), 0, 0)
    runs = [driver.start(PROMPT[:9], SamplingParams(presence_penalty=0.1)) for _ in range(8)]
    driver.step(*((run, 9) for run in runs))
    device.total_bytes = (pass_room.FIXED_BYTES + driver.runner.sampler.room_bytes([]) // 2) * 9 // 8
    driver.runner.forget_room()
    with pytest.raises(PassOutOfMemory, match="; 7 are free"):
        driver.step(*((run, 1) for run in runs))
    driver.step((runs[0], 1))


@pytest.mark.parametrize("first_line", range(2, 55, 9))
def test_a_pass_that_finds_no_memory_wherever_that_is_may_be_launched_again(
    qwen3: Path, first_line: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generated(driver: RunnerDriver) -> list[Run]:
        penalties = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.2)
        some = SamplingParams(logit_bias={7: 2.0}, min_new_tokens=4, top_p=0.9)
        runs = [
            driver.start(PROMPT[:30], penalties, logprobs=LogprobSpec(start=0, top=2)),
            driver.start(PROMPT[:30], some, seed=5, stop_ids=frozenset({9}), logprobs=LogprobSpec()),
        ]
        driver.generate(runs, 12, chunk=11)
        return runs

    driver, places = RunnerDriver(qwen3), itertools.count(first_line, 55)
    launch = driver.runner.launch

    def launch_twice(plan: BatchPlan) -> PendingStep:
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a capacity")
        with (
            raised_at_line(next(places) % 700, error, "/srt/model_executor/", "/srt/layers/"),
            pytest.raises(PassOutOfMemory, match=r"to allocate 2.00 GiB; \d+ bytes are free$") as raised,
        ):
            launch(plan)
        assert raised.value.__context__ is None, "nothing holds its tensors"
        return launch(plan)

    monkeypatch.setattr(driver.runner, "launch", launch_twice)
    disturbed = generated(driver)
    for run, expected in zip(disturbed, generated(RunnerDriver(qwen3)), strict=True):
        assert_same(run, expected)
        assert run.prompt_logprobs == expected.prompt_logprobs
