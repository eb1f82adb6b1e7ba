"""The model runner against transformers, and against itself under every way of cutting up the work."""

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import GEMMA2, GEMMA3, LLAMA3_ROPE, edit_config, make_checkpoint
from fixtures.model_runs import RunnerDriver
from transformers import AutoModelForCausalLM

from ebbtide.srt.model_executor import model_runner
from ebbtide.srt.model_executor.batch_plan import SAMPLED_BEFORE, LogprobSpec, PositionLogprobs
from ebbtide.srt.sampling_params import SamplingParams

SLIDING = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-tied-sharded": ("LlamaForCausalLM", {"tied": True, "shards": 3}),
    "llama-biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama-rope-llama3": ("LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        "LlamaForCausalLM",
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "llama-one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama-no-gqa": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-tied-sharded": ("Qwen2ForCausalLM", {"tied": True, "shards": 2}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3-tied-sharded": ("Qwen3ForCausalLM", {"tied": True, "shards": 3}),
    "qwen3-wide-heads": ("Qwen3ForCausalLM", {"head_dim": 32, "attention_bias": True}),
    "qwen2-windows": ("Qwen2ForCausalLM", SLIDING),
    "qwen3-windows": ("Qwen3ForCausalLM", SLIDING),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma2-tied-biases": ("Gemma2ForCausalLM", {"tied": True, "attention_bias": True, **GEMMA2}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3-tied-capped": ("Gemma3ForCausalLM", {"tied": True, **GEMMA3, "final_logit_softcapping": 4.0}),
}
WINDOWED = {name: case for name, case in CHECKPOINTS.items() if name in ("qwen3-windows", "gemma2", "gemma3")}
PROMPT = list(b"Ebb and flow: the tide goes out, and the tide comes in again.")
OTHER_PROMPTS = [list(b"a"), list(b"Harbour at low water"), list(bytes(range(100, 200)))]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM")


def reference_logprobs(path: Path, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        scores: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return scores.log_softmax(-1)


def reference_output(path: Path, prompt: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(path)
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None
    )
    token_ids: list[int] = output[0, len(prompt) :].tolist()
    return token_ids


def alone(path: Path, prompt: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    driver = RunnerDriver(path)
    run = driver.start(prompt, logprobs=LogprobSpec())
    driver.generate([run], num_tokens)
    return run.output_ids, [entry.token for entry in run.logprobs]


def tokens(entries: list[PositionLogprobs]) -> list[float]:
    return [entry.token for entry in entries]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_greedy_output_and_logprobs_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, options = CHECKPOINTS[name]
    path = make_checkpoint(tmp_path, architecture, **options)
    driver = RunnerDriver(path)
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))

    driver.generate([run], 24)

    assert run.output_ids == reference_output(path, PROMPT, 24)
    expected = reference_logprobs(path, run.token_ids)
    predicted = [expected[position, token].item() for position, token in enumerate(run.token_ids[1:])]
    assert tokens(run.prompt_logprobs) == pytest.approx(predicted[: len(PROMPT) - 1], abs=1e-4)
    assert tokens(run.logprobs) == pytest.approx(predicted[len(PROMPT) - 1 :], abs=1e-4)


def test_head_dim_is_derived_and_old_rope_fields_are_read(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", rope_parameters=LLAMA3_ROPE)
    expected = reference_output(path, PROMPT, 12)

    edit_config(path, head_dim=None, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)

    assert alone(path, PROMPT, 12)[0] == expected


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_hold_across_chunks_shared_prefixes_and_retracts(name: str, tmp_path: Path) -> None:
    architecture, options = WINDOWED[name]
    path = make_checkpoint(tmp_path, architecture, **options)
    driver = RunnerDriver(path, page_size=4)
    owner = driver.start(PROMPT, logprobs=LogprobSpec())
    driver.generate([owner], 6, chunk=7)
    # The pages of the owner's prompt, and then all that a retracted request computes anew at once.
    guest_prompt = PROMPT[:48] + list(b" But another ending.")
    guest = driver.start(guest_prompt, shares=owner, num_shared=48)
    again = driver.start(owner.token_ids, logprobs=LogprobSpec())

    driver.generate([owner, guest], 20, chunk=5)
    driver.generate([again], 14, chunk=13)

    assert owner.output_ids == reference_output(path, PROMPT, 20)
    assert guest.output_ids == reference_output(path, guest_prompt, 20)
    assert again.output_ids == owner.output_ids[6:]
    assert tokens(again.logprobs) == pytest.approx(tokens(owner.logprobs)[6:], abs=1e-4)


@pytest.mark.parametrize("chunk", [1, 7, 16, 60])
def test_prefill_in_chunks_equals_prefill_at_once(qwen3: Path, chunk: int) -> None:
    expected_ids, expected_logprobs = alone(qwen3, PROMPT, 12)
    driver = RunnerDriver(qwen3)
    run = driver.start(PROMPT, logprobs=LogprobSpec())

    driver.generate([run], 12, chunk=chunk)

    assert run.output_ids == expected_ids
    assert tokens(run.logprobs) == pytest.approx(expected_logprobs, abs=1e-5)


def test_chunks_that_do_not_reach_the_end_sample_nothing(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3)
    first, second = driver.start(PROMPT), driver.start(PROMPT)

    result = driver.step((first, 10), (second, len(PROMPT)))

    assert result.token_ids == [-1, alone(qwen3, PROMPT, 1)[0][0]]
    assert driver.step((first, 10)).token_ids == [-1]


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_mixed_prefill_and_decode_give_what_each_gives_alone(qwen3: Path, page_size: int) -> None:
    driver = RunnerDriver(qwen3, page_size=page_size)
    early = driver.start(PROMPT, logprobs=LogprobSpec())
    driver.generate([early], 5)
    late = [driver.start(prompt, logprobs=LogprobSpec()) for prompt in OTHER_PROMPTS]
    # `early` decodes while the others are prefilled, whole and in parts.
    driver.step((late[0], 1), (early, 1), (late[1], 5), (late[2], 100))
    driver.step((late[1], 15), (early, 1), (late[2], 1))

    driver.generate([early, *late], 16)

    for run in [early, *late]:
        expected_ids, expected_logprobs = alone(qwen3, run.spec.prompt_ids, 16)
        assert run.output_ids == expected_ids
        assert tokens(run.logprobs) == pytest.approx(expected_logprobs, abs=1e-5)


def test_pages_of_a_shared_prefix_are_read_and_not_written(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3, page_size=16)
    owner = driver.start(PROMPT)
    driver.generate([owner], 1)
    pool = driver.runner.kv_pool
    before = [pool.k(1)[page].clone() for page in owner.pages[:3]]
    prompt = PROMPT[:48] + list(b" But another ending.")
    guest = driver.start(prompt, shares=owner, num_shared=48)

    driver.generate([guest], 12)

    assert guest.output_ids == alone(qwen3, prompt, 12)[0]
    assert all(torch.equal(pool.k(1)[page], old) for page, old in zip(owner.pages[:3], before, strict=True))


def test_stale_and_undefined_pages_do_not_leak_into_results(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3)
    for layer in range(2):
        driver.runner.kv_pool.k(layer).fill_(float("nan"))
        driver.runner.kv_pool.v(layer).fill_(float("nan"))
    runs = [driver.start(prompt) for prompt in OTHER_PROMPTS]

    driver.generate(runs, 8, chunk=9)

    assert [run.output_ids for run in runs] == [alone(qwen3, prompt, 8)[0] for prompt in OTHER_PROMPTS]


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("start", [0, 5, 20, len(PROMPT) - 1, len(PROMPT)])
def test_prompt_logprobs_begin_after_the_asked_position(qwen3: Path, start: int, chunk: int | None) -> None:
    driver = RunnerDriver(qwen3)
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=start, top=3, token_ids=(7, 200, 7)))

    driver.generate([run], 2, chunk=chunk)

    expected = reference_logprobs(qwen3, PROMPT)
    assert len(run.prompt_logprobs) == max(0, len(PROMPT) - 1 - start)
    for position, entry in enumerate(run.prompt_logprobs, start=start + 1):
        row = expected[position - 1]
        values, ids = row.topk(3)
        assert entry.token == pytest.approx(row[PROMPT[position]].item(), abs=1e-4)
        assert [token for _, token in entry.top] == ids.tolist()
        assert [value for value, _ in entry.top] == pytest.approx(values.tolist(), abs=1e-4)
        assert entry.chosen == pytest.approx(row[torch.tensor([7, 200, 7])].tolist(), abs=1e-4)


def test_prompt_logprobs_do_not_depend_on_the_piece_size(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for num_bytes in (model_runner.PROMPT_LOGITS_BYTES, 5 * 4 * 258):
        monkeypatch.setattr(model_runner, "PROMPT_LOGITS_BYTES", num_bytes)
        driver = RunnerDriver(qwen3)
        run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))
        driver.step((run, len(PROMPT)))
        results.append(tokens(run.prompt_logprobs))

    assert results[1] == pytest.approx(results[0], abs=1e-5)


def test_logprobs_only_for_those_who_ask(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3)
    silent, asking, scoring = (
        driver.start(PROMPT),
        driver.start(PROMPT, logprobs=LogprobSpec(top=1)),
        driver.start(PROMPT, logprobs=LogprobSpec(start=3)),
    )

    result = driver.step((silent, len(PROMPT)), (asking, len(PROMPT)), (scoring, 30))

    assert result.output_logprobs is not None
    assert result.input_logprobs is not None
    assert [entry is not None for entry in result.output_logprobs] == [False, True, False]
    assert [entry is not None for entry in result.input_logprobs] == [False, False, True]
    assert result.output_logprobs[1] is not None
    assert result.output_logprobs[1].top == [(result.output_logprobs[1].token, result.token_ids[1])]


def test_sampled_output_does_not_depend_on_the_batch(qwen3: Path) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.95)
    by_itself, in_company = [], []
    for seed, prompt in enumerate(OTHER_PROMPTS):
        driver = RunnerDriver(qwen3)
        run = driver.start(prompt, params, seed=seed)
        driver.generate([run], 10)
        by_itself.append(run.output_ids)
    driver = RunnerDriver(qwen3)
    runs = [driver.start(prompt, params, seed=seed) for seed, prompt in enumerate(OTHER_PROMPTS)]
    driver.generate([driver.start(PROMPT, SamplingParams(top_k=3), seed=9), *runs], 10)
    in_company = [run.output_ids for run in runs]

    assert in_company == by_itself


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_bfloat16_is_close_to_the_same_weights_in_float32(name: str, tmp_path: Path) -> None:
    architecture, options = CHECKPOINTS[name]
    path = make_checkpoint(tmp_path, architecture, dtype="bfloat16", **options)
    driver = RunnerDriver(path, dtype="bfloat16")
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))

    driver.generate([run], 8, chunk=32)

    assert driver.runner.kv_pool.k(0).dtype == torch.bfloat16
    expected = reference_logprobs(path, run.token_ids)
    given = tokens(run.prompt_logprobs) + tokens(run.logprobs)
    differences = [abs(given[i] - expected[i, token].item()) for i, token in enumerate(run.token_ids[1:])]
    assert sum(differences) / len(differences) < 0.1


def test_kv_of_another_dtype_than_the_model(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3, kv_cache_dtype="bfloat16")
    run = driver.start(PROMPT, logprobs=LogprobSpec(start=0))

    driver.generate([run], 4, chunk=16)

    assert driver.runner.kv_pool.k(0).dtype == torch.bfloat16
    expected = reference_logprobs(qwen3, run.token_ids)
    given = tokens(run.prompt_logprobs) + tokens(run.logprobs)
    differences = [abs(given[i] - expected[i, token].item()) for i, token in enumerate(run.token_ids[1:])]
    assert sum(differences) / len(differences) < 0.1


def test_results_survive_release_and_resume_of_the_kv_pool(qwen3: Path) -> None:
    driver = RunnerDriver(qwen3)
    before = driver.start(PROMPT)
    driver.generate([before], 8)
    arena = driver.runner.kv_pool.arena

    arena.release()
    arena.resume()
    after = driver.start(PROMPT)
    driver.generate([after], 8)

    assert after.output_ids == before.output_ids


def test_a_step_may_be_launched_before_the_token_it_continues_is_known(qwen3: Path) -> None:
    sequential, overlapped = RunnerDriver(qwen3), RunnerDriver(qwen3)
    expected = [sequential.start(prompt) for prompt in (PROMPT, OTHER_PROMPTS[1])]
    sequential.generate(expected, 6)

    runs = [overlapped.start(prompt) for prompt in (PROMPT, OTHER_PROMPTS[1])]
    overlapped.step(*((run, len(run.token_ids)) for run in runs))
    for _ in range(5):
        outputs = [list(run.output_ids) for run in runs]
        # The scheduler knows that there is a token, not which: the runner must take its own.
        for run in runs:
            run.output_ids[-1] = SAMPLED_BEFORE
        overlapped.step(*((run, 1) for run in runs))
        for run, before in zip(runs, outputs, strict=True):
            run.output_ids[: len(before)] = before

    assert [run.output_ids for run in runs] == [run.output_ids for run in expected]
