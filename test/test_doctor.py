"""The doctor: a bearing for this machine, and the right words for machines that lack something."""

from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from ebbtide import doctor
from ebbtide.doctor import Bearing
from ebbtide.srt import kernel_cache
from ebbtide.srt.device import CpuDevice
from ebbtide.srt.errors import ConfigurationError


def test_a_machine_that_runs_these_tests_is_good_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main([]) == 0
    report = capsys.readouterr().out
    assert "Ebbtide can run here." in report
    assert all(subject in report for subject in ("Python", "packages", "CPU", "memory saver", "GPU"))


def test_missing_or_small_shared_memory_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._shared_memory(tmp_path / "shm").bearing is Bearing.NOTE
    monkeypatch.setattr(doctor, "SMALL_SHM_BYTES", 1 << 62)
    assert "--shm-size" in doctor._shared_memory(tmp_path).meaning
    monkeypatch.setattr(doctor, "SMALL_SHM_BYTES", 0)
    assert doctor._shared_memory(tmp_path).bearing is Bearing.GOOD


def make_nvml(*names: str) -> SimpleNamespace:
    return SimpleNamespace(
        NVMLError=RuntimeError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: names[index],
        nvmlDeviceGetName=lambda name: name,
        nvmlDeviceGetMemoryInfo=lambda name: SimpleNamespace(total=80 << 30),
    )


def test_gpus_are_named_as_far_as_they_are_usable(tmp_path: Path) -> None:
    assert doctor._gpus(0, tmp_path).meaning == "the CPU is used"
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()

    unusable = doctor._gpus(0, tmp_path)
    assert (unusable.found, unusable.bearing) == ("2 NVIDIA", Bearing.NOTE)
    assert "torch sees no CUDA device" in unusable.meaning

    usable = doctor._gpus(2, tmp_path, make_nvml("Some GPU", "Some GPU"))
    assert (usable.found, usable.bearing) == ("2, Some GPU (80 GiB)", Bearing.GOOD)

    def fail() -> None:
        raise RuntimeError("no driver")

    silent = SimpleNamespace(NVMLError=RuntimeError, nvmlInit=fail)
    assert doctor._gpus(2, tmp_path, silent).found == "2"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine with a GPU, on which nothing stands in FlashInfer's way; the versions of what it has."""
    versions = {"cuda-bindings": "13.0.3", "flashinfer-python": "0.6.12"}
    present = metadata.version

    def version(name: str) -> str:
        if name in (*doctor._GPU_PACKAGES, "flashinfer-python"):
            if name not in versions:
                raise metadata.PackageNotFoundError(name)
            return versions[name]
        return present(name)

    requires = ["flashinfer-python==0.6.12; extra == 'cuda'", "cuda-bindings<14,>=13.0; extra == 'cuda'"]
    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    monkeypatch.setattr(kernel_cache, "flashinfer_problem", lambda: None)
    monkeypatch.setattr(doctor, "_visible_gpus", lambda: 1)
    return versions


def test_on_a_gpu_only_what_the_engine_starts_with_is_required(
    gpu: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([]) == 0
    report = capsys.readouterr().out
    assert all(name in report for name in ("FlashInfer", "cuda-bindings", "torch_memory_saver"))

    del gpu["cuda-bindings"]
    assert doctor.main([]) == 1
    assert "Ebbtide cannot run here: cuda-bindings." in capsys.readouterr().out


@pytest.mark.parametrize("num_gpus", [0, 1])
def test_it_fails_where_memory_cannot_be_released_unless_a_gpu_has_its_own(
    num_gpus: int, gpu: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: CpuDevice) -> None:
        raise ConfigurationError("arenas need a newer kernel")

    monkeypatch.setattr(doctor, "_visible_gpus", lambda: num_gpus)
    monkeypatch.setattr(CpuDevice, "__init__", refuse)
    assert doctor.main([]) == 1 - num_gpus
    report = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert ("Ebbtide cannot run here: memory saver." in report) == (num_gpus == 0)
    assert "newer kernel" in report


def test_flashinfer_is_judged_by_its_tools_and_its_version(
    gpu: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good = doctor._flashinfer()
    assert (good.found, good.bearing) == ("0.6.12", Bearing.GOOD)

    gpu["flashinfer-python"] = "0.7.0"
    other = doctor._flashinfer()
    assert (other.found, other.bearing) == ("0.7.0, needs ==0.6.12", Bearing.NOTE)

    monkeypatch.setattr(kernel_cache, "flashinfer_problem", lambda: "there is no nvcc")
    unusable = doctor._flashinfer()
    assert (unusable.found, unusable.bearing) == ("not usable: there is no nvcc", Bearing.NOTE)
    assert "slow" in unusable.meaning
