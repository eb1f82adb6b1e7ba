"""The tokens that could have been sampled, and the logprob among them of the one that was."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest
import torch
from fixtures.references import Reference

from ebbtide import Engine

PROMPT = list(range(20))


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.5, "top_p": 0.8, "min_p": 0.002},
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 40, "regex": "[ab]{12}"},
    ],
)
def test_they_are_the_support_of_the_filters(
    sampling_engine: Engine, reference_a: Reference, params: dict[str, Any]
) -> None:
    engine = sampling_engine
    given = {"max_new_tokens": 12, "sampling_seed": 3, **params}
    plain = engine.generate(input_ids=PROMPT, sampling_params=given)
    answer = engine.generate(input_ids=PROMPT, sampling_params=given, return_sampling_mask=True)
    meta, ids = answer["meta_info"], answer["output_ids"]
    assert ids == plain["output_ids"]
    assert "output_token_sampling_mask" not in plain["meta_info"]
    masks, logprobs = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    assert len(masks) == len(logprobs) == meta["output_token_sampling_mask_length"] == len(ids)
    if params["temperature"] == 0.0:
        assert (masks, logprobs) == ([[token_id] for token_id in ids], [0.0] * len(ids))
        return
    rows = reference_a.logprobs([*PROMPT, *ids])[len(PROMPT) - 1 : -1] / params["temperature"]
    for place, (mask, logprob, token_id) in enumerate(zip(masks, logprobs, ids, strict=True)):
        assert token_id in mask
        own = rows[place][mask].log_softmax(-1)[mask.index(token_id)]
        assert logprob == pytest.approx(float(own), abs=1e-3)
        if "regex" in params:
            assert set(mask) <= {97, 98} or place == 12
        else:
            assert set(mask) == _support(rows[place], params)


def test_slimes_form_is_the_same_in_two_arrays(sampling_engine: Engine) -> None:
    engine = sampling_engine
    params: dict[str, Any] = {"top_p": 0.7, "max_new_tokens": 6, "sampling_seed": 3}
    lists = engine.generate(input_ids=PROMPT, sampling_params=params, return_sampling_mask=True)["meta_info"]
    params["custom_params"] = {"return_top_p_token_ids": True, "of_no_meaning": object()}

    meta = engine.generate(input_ids=PROMPT, sampling_params=params)["meta_info"]
    *_, streamed = engine.generate(input_ids=PROMPT, sampling_params=params, stream=True)

    assert "output_token_sampling_mask" not in meta
    ids, offsets = (
        np.frombuffer(b64decode(meta[name]), dtype=np.int32)
        for name in ("top_p_token_ids", "top_p_token_offsets")
    )
    assert len(offsets) == 6 + 1
    assert [part.tolist() for part in np.split(ids, offsets[1:-1])] == lists["output_token_sampling_mask"]
    assert (offsets[0], offsets[-1]) == (0, len(ids))
    # Its streams tell what there is so far.
    assert streamed["meta_info"]["top_p_token_ids"] == meta["top_p_token_ids"]


def _support(scores_V: torch.Tensor, params: dict[str, Any]) -> set[int]:
    probs = scores_V.softmax(-1)
    if "top_k" in params:
        return set(probs.topk(params["top_k"]).indices.tolist())
    ordered = probs.sort(descending=True)
    before = ordered.values.cumsum(-1) - ordered.values
    kept = (before < params["top_p"]) & (ordered.values >= params["min_p"] * ordered.values[0])
    return set(ordered.indices[kept].tolist())
