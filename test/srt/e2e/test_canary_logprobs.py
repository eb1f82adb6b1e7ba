"""New weights are tried out ahead of their commit, against the logprobs of another implementation."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.gpu_device import DEVICE
from fixtures.references import Reference

from ebbtide import Engine
from ebbtide.srt.errors import RequestRejected

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
PROMPTS = [[3, 1, 4, 1, 5], list(range(40)), [200]]
ALL_ROWS = 10**6


def assert_serves(engine: Engine, reference: Reference) -> None:
    """Every weight bit for bit, and what comes of them."""
    for name, tensor in reference.weights().items():
        assert engine.get_weights_by_name(name, ALL_ROWS) == tensor.tolist(), name
    outputs = [output["output_ids"] for output in engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)]
    assert outputs == [reference.greedy(prompt, GREEDY["max_new_tokens"]) for prompt in PROMPTS]


def test_a_canary_lets_only_the_weights_through_that_it_is_of(
    engine_a: Engine, checkpoint_b: Path, reference_a: Reference, reference_b: Reference
) -> None:
    engine = engine_a
    ids = PROMPTS[1]
    [of_a, of_b] = [
        [float(row[ids[1 + at]]) for at, row in enumerate(reference.logprobs(ids)[:-1])]
        for reference in (reference_a, reference_b)
    ]
    with pytest.raises(RequestRejected, match=r"the canary was missed.* at token \d+ -") as refused:
        engine.update_weights_from_disk(str(checkpoint_b), canary={"input_ids": ids, "logprobs": of_a})
    assert_serves(engine, reference_a)
    assert refused.value.body["canary"]["logprobs"][1:] == pytest.approx(of_b, abs=DEVICE.tie + 1e-3)
    reply = engine.update_weights_from_disk(str(checkpoint_b), canary={"input_ids": ids, "logprobs": of_b})
    assert (reply["committed"], reply["staged"]) == (True, True)
    assert_serves(engine, reference_b)
