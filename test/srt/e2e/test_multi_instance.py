"""Engines side by side on one host: one sleeps while the other serves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fixtures.gpu_device import DEVICE
from fixtures.references import Reference

from ebbtide import Engine

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40))]


def resident_bytes(engine: Engine) -> int:
    return sum(tag["resident_bytes"] for tag in engine.memory_occupation()["tags"].values())


def assert_serves(engine: Engine, reference: Reference) -> None:
    for output, prompt in zip(
        engine.generate(input_ids=PROMPTS, sampling_params=GREEDY), PROMPTS, strict=True
    ):
        assert reference.accepts(prompt, output["output_ids"])


def test_one_sleeps_while_the_other_serves(
    checkpoint_a: Path, checkpoint_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    # What the second one finds free does not count what the first one will want back.
    arguments: dict[str, Any] = {"max_total_tokens": 4096, "skip_tokenizer_init": True}
    arguments |= {"enable_weights_cpu_backup": True, **DEVICE.server_args}
    with Engine(model_path=str(checkpoint_a), **arguments) as one:
        assert_serves(one, reference_a)
        one.release_memory_occupation()
        assert resident_bytes(one) == 0
        with Engine(model_path=str(checkpoint_b), **arguments) as other:
            pairs = ((one, reference_a), (other, reference_b))
            assert_serves(other, reference_b)
            assert resident_bytes(one) == 0
            for (asleep, _), (awake, reference) in (pairs, pairs[::-1]):
                asleep.release_memory_occupation()
                awake.resume_memory_occupation()
                assert_serves(awake, reference)
                assert (resident_bytes(asleep), asleep.memory_occupation()["can_run"]) == (0, False)
            other.resume_memory_occupation()
            for engine, reference in pairs:
                assert_serves(engine, reference)
        # The end of one is not the end of the other.
        assert_serves(one, reference_a)
