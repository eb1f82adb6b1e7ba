"""A request of many prompts as requests of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ebbtide.srt.errors import RequestRejected

# Fields of which a list has an entry for each prompt.
PER_PROMPT: Final = (
    *("sampling_params", "rid", "return_logprob", "logprob_start_len", "top_logprobs_num"),
    *("cache_salt", "extra_key"),
)


def split_batch(given: Mapping[str, Any]) -> tuple[list[dict[str, Any]], bool]:
    """The request of each prompt, and whether they are a batch.

    Raises:
        RequestRejected: a list has not as many entries as there are prompts.
    """
    prompts = given.get("text", given.get("input_ids"))
    is_texts = isinstance(prompts, list) and "text" in given
    if not is_texts and not (isinstance(prompts, list) and prompts and isinstance(prompts[0], list)):
        return [dict(given)], False
    assert isinstance(prompts, list)
    name = "text" if is_texts else "input_ids"
    shared = {key: value for key, value in given.items() if key != name}
    singles: list[dict[str, Any]] = [{**shared, name: prompt} for prompt in prompts]
    columns = {key: shared[key] for key in PER_PROMPT if isinstance(shared.get(key), list)}
    ids = shared.get("token_ids_logprob")
    if ids and not isinstance(ids[0], int):
        columns["token_ids_logprob"] = ids
    if isinstance(shared.get("rid"), str):
        columns["rid"] = [f"{shared['rid']}_{index}" for index in range(len(prompts))]
    for key, values in columns.items():
        if len(values) != len(prompts):
            raise RequestRejected(
                f"{key}: a list must have one entry per prompt, got {len(values)} for {len(prompts)}"
            )
        for single, value in zip(singles, values, strict=True):
            single[key] = value
    return singles, True
