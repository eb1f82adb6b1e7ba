"""What the demo promises is checked, and the report says what was found."""

import base64
import math
import re
from pathlib import Path

import pytest

from ebbtide.demo.loop import ElasticRecord, LentTime, MemorySample, Results, Stage, StageRecord, StepRecord
from ebbtide.demo.report import write_report
from ebbtide.demo.trainer import DemoFailed, Ratios

ASLEEP = (Stage.RELEASE, Stage.TRAIN, Stage.RESUME_WEIGHTS, Stage.UPDATE)


def memory(time_s: float, *, asleep: bool, kept_bytes: int = 0) -> MemorySample:
    tag_bytes = {"weights": 0, "kv_cache": 0} if asleep else {"weights": 4_000_000, "kv_cache": 96_000_000}
    process_bytes = 50_000_000 + sum(tag_bytes.values()) + (kept_bytes if asleep else 0)
    return MemorySample(time_s, tag_bytes, process_bytes)


def step(number: int, reward: float, kept_bytes: int = 0) -> StepRecord:
    stages = {
        stage: StageRecord(0.5, memory(number + 0.1 * place, asleep=stage in ASLEEP, kept_bytes=kept_bytes))
        for place, stage in enumerate(Stage)
    }
    return StepRecord(number, reward, 1000, 2e-6, stages, Ratios.of([[-1.0, -2.0]], [[-1.1, -3.0]]))


def disturbed() -> ElasticRecord:
    samples = [memory(100 + number, asleep=number in (4, 5)) for number in range(9)]
    spans = [LentTime(101, 102, "some of it"), LentTime(104, 105, "all of it")]
    return ElasticRecord(64, samples, spans, is_equal=True)


def results(*rewards: float, kept_bytes: int = 0) -> Results:
    start = memory(-1.0, asleep=False)
    steps = [step(number, reward, kept_bytes) for number, reward in enumerate(rewards)]
    return Results(7, 3.0, start, before=0.5, after=1.0, steps=steps)


def test_a_reward_that_rises_passes():
    results(0.2, 0.5, 0.95, 0.95, 0.95).check()


@pytest.mark.parametrize("rewards", [(0.2, 0.5, 0.85, 0.9, 0.9), (0.4, 0.95, 0.95, 0.95, 0.95)])
def test_a_reward_that_does_not_rise_as_promised_fails(rewards):
    with pytest.raises(DemoFailed, match="reward"):
        results(*rewards).check()


def test_memory_that_stays_with_the_processes_fails():
    good = (0.2, 0.95, 0.95, 0.95)
    results(*good, kept_bytes=4_000_000).check()
    with pytest.raises(DemoFailed, match="released"):
        results(*good, kept_bytes=6_000_000).check()


def test_requests_that_noticed_fail():
    found = results(0.2, 0.95, 0.95, 0.95)
    found.elastic = disturbed()
    found.check()
    found.elastic.is_equal = False
    with pytest.raises(DemoFailed, match="taken from under them"):
        found.check()


def test_report_is_one_file_with_everything_inside(tmp_path: Path):
    found = results(0.2, 0.6, 0.95, 0.97)
    found.elastic = disturbed()
    html = write_report(tmp_path, found).read_text(encoding="utf-8")
    # Nothing is fetched, neither from other files nor from elsewhere.
    assert all(target.startswith("data:") for target in re.findall(r'(?:src|href)\s*=\s*"([^"]*)', html))
    assert "url(" not in html
    for number in range(4):
        assert re.search(rf"<tr><td>{number}</td>", html)
    assert base64.b64encode((tmp_path / "demo.png").read_bytes()).decode() in html


def test_the_report_of_fp8_says_that_it_is_emulated_and_shows_importance_ratios(tmp_path: Path):
    found = results(0.2, 0.6, 0.95, 0.97)
    found.is_fp8 = True
    html = write_report(tmp_path, found).read_text(encoding="utf-8")
    assert "FP8 (e4m3), emulated on this CPU" in html
    assert "Trainer and engine differ" in html
    # Of two tokens one is e^1 times, and one e^0.1 times, as likely for the trainer.
    ratios = found.steps[0].ratios
    assert (ratios.largest, ratios.truncated) == (pytest.approx(math.e), 0.5)
    assert ratios.divergence == pytest.approx((math.e - 2 + math.exp(0.1) - 1.1) / 2)


def test_report_of_a_single_step_that_was_broken_off(tmp_path: Path):
    found = results(0.2)
    found.after = None
    found.failure = "reward < 0.9 & falling"
    assert "reward &lt; 0.9 &amp; falling" in write_report(tmp_path, found).read_text(encoding="utf-8")
