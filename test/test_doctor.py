"""The doctor: a verdict for this machine, and the right words for machines that lack something."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ebbtide import doctor
from ebbtide.doctor import Verdict
from ebbtide.srt.device.cpu import CpuDevice
from ebbtide.srt.errors import ConfigurationError


def test_a_machine_that_runs_these_tests_is_good_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    report = capsys.readouterr().out
    assert "Ebbtide can run here." in report
    assert all(subject in report for subject in ("Python", "packages", "CPU", "memory saver", "GPU"))


def test_it_fails_where_memory_cannot_be_released(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: CpuDevice) -> None:
        raise ConfigurationError("arenas need a newer kernel")

    monkeypatch.setattr(CpuDevice, "__init__", refuse)
    assert doctor.main([]) == 1
    report = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Ebbtide cannot run here: memory saver." in report
    assert "newer kernel" in report


@pytest.mark.parametrize(
    ("requirement", "fault"),
    [
        ("packaging>=1", None),
        ("packaging<1", "needs <1"),
        ("no-such-distribution>=2", "not installed, needs >=2"),
    ],
)
def test_a_requirement_is_met_or_the_fault_is_named(requirement: str, fault: str | None) -> None:
    found = doctor._fault(Requirement(requirement))
    assert found is None if fault is None else found is not None and found.endswith(fault)


@pytest.mark.parametrize(
    ("setting", "chosen", "verdict"),
    [
        ("always [madvise] never", "madvise", Verdict.GOOD),
        ("[always] madvise never", "always", Verdict.GOOD),
        ("always madvise [never]", "never", Verdict.NOTE),
        (None, "unknown", Verdict.NOTE),
    ],
)
def test_huge_pages(tmp_path: Path, setting: str | None, chosen: str, verdict: Verdict) -> None:
    path = tmp_path / "enabled"
    if setting is not None:
        path.write_text(setting)
    finding = doctor._huge_pages(path)
    assert (finding.found, finding.verdict) == (chosen, verdict)


def test_missing_or_small_shared_memory_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._shared_memory(tmp_path / "shm").verdict is Verdict.NOTE
    monkeypatch.setattr(doctor, "SMALL_SHM_BYTES", 1 << 62)
    assert "--shm-size" in doctor._shared_memory(tmp_path).meaning
    monkeypatch.setattr(doctor, "SMALL_SHM_BYTES", 0)
    assert doctor._shared_memory(tmp_path).verdict is Verdict.GOOD


def test_gpus_are_counted_and_said_to_be_unused(tmp_path: Path) -> None:
    assert doctor._gpus(tmp_path).verdict is Verdict.GOOD
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    finding = doctor._gpus(tmp_path)
    assert (finding.found, finding.verdict) == ("2 NVIDIA", Verdict.NOTE)
