"""A short soak: the storm runs over a real server, and nothing is lost."""

from argparse import Namespace
from pathlib import Path

import pytest

from ebbtide.testing.soak import __main__ as soak
from ebbtide.testing.soak.doors import HttpDoor
from ebbtide.testing.soak.storm import Soak
from ebbtide.testing.soak.tally import Tally


@pytest.mark.parametrize(
    ("door", "flags"), [("http", ["--", "--tp", "2"]), ("engine", [])], ids=["http, two ranks", "engine"]
)
def test_a_short_storm_loses_nothing(door: str, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--minutes", "0.02", "--rehearsals", "1", "--streams", "4", "--calm-s", "0.1", "--door", door]
    options += flags
    try:
        soak.main(options)
    except SystemExit:
        pytest.fail(capsys.readouterr().out)


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
