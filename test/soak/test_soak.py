"""A soak sees what is lost and what is wrong. The soak itself is `make soak`."""

from argparse import Namespace
from pathlib import Path

import pytest

from soak.doors import HttpDoor
from soak.storm import Soak
from soak.tally import Tally


@pytest.mark.parametrize(
    ("tokens", "logprobs", "finish", "span_end", "column"),
    [
        ([7, 8, 9], [-1.0, -1.0, -1.0], "length", 3, "wrong"),
        ([1, 2], [-1.0, -1.0], "length", 2, "lost"),
        ([1, 2, 3], [-1.0, -1.0, -1.0], "length", 2, "wrong"),
        ([1, 2, 3], [-1.0, -1.5, -1.0], "length", 3, "wrong"),
        ([1, 2, 3], [-1.0, -1.0], "length", 3, "wrong"),
    ],
    ids=[
        "other tokens",
        "too few tokens",
        "spans that do not cover them",
        "other logprobs",
        "too few logprobs",
    ],
)
def test_what_is_wrong_is_seen(
    tmp_path: Path, tokens: list[int], logprobs: list[float], finish: str, span_end: int, column: str
) -> None:
    tally = Tally()
    soak = Soak(Namespace(seed=0), HttpDoor("http://127.0.0.1:1", 0), tmp_path, tally)
    soak._expected = [([1, 2, 3, 4], [-1.0] * 4)]
    spans = [{"version": "v1", "start": 0, "end": span_end}]
    meta = {"finish_reason": {"type": finish}, "weight_versions": spans}
    meta["output_token_logprobs"] = [[*pair, None] for pair in zip(logprobs, tokens, strict=False)]
    soak._check({"output_ids": tokens, "meta_info": meta}, 0, 3, may_be_aborted=False)
    assert getattr(tally, column) == 1
