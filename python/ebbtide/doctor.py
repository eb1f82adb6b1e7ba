"""`ebbtide doctor`: reports what this machine has, and what that means for running Ebbtide on it."""

from __future__ import annotations

import argparse
import enum
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ebbtide.srt.argument_checks import sees_cuda
from ebbtide.version import __version__

GIB = 1 << 30
SMALL_SHM_BYTES = GIB


class Bearing(enum.Enum):
    """How important a finding is for running Ebbtide. The value is its colour."""

    GOOD = "green"
    NOTE = "yellow"
    MISSING = "red"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was examined, what was found, and what it means."""

    subject: str
    found: str
    meaning: str
    bearing: Bearing = Bearing.GOOD


def main(argv: Sequence[str]) -> int:
    """Print the report; returns 1 if the engine cannot run since something is missing, else 0."""
    argparse.ArgumentParser(prog="ebbtide doctor", description=__doc__).parse_args(argv)
    findings = list(examine())
    table = Table(title=f"Ebbtide {__version__}", title_justify="left")
    for heading in ("", "found", "what it means"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, finding.found, finding.meaning, style=finding.bearing.value)
    console = Console()
    console.print(table)
    missing = [finding.subject for finding in findings if finding.bearing is Bearing.MISSING]
    console.print(f"Ebbtide cannot run here: {', '.join(missing)}." if missing else "Ebbtide can run here.")
    return 1 if missing else 0


def examine() -> Iterator[Finding]:
    """Yield all findings, from the interpreter to the GPUs."""
    num_gpus = _visible_gpus()
    has_gpu = num_gpus > 0
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.release()}", "")
    yield from _packages()
    yield _cpu(has_gpu)
    yield from _arenas(has_gpu)
    yield _shared_memory(Path("/dev/shm"))
    yield _gpus(num_gpus, Path("/dev"))
    if has_gpu:
        yield from _gpu_packages()
        yield _flashinfer()


def _packages() -> Iterator[Finding]:
    if not (requirements := _requirements()):
        yield Finding("packages", "ebbtide is not installed", "run: pip install -e python", Bearing.NOTE)
        return
    needed = [one for one in requirements if one.marker is None]
    wrong = {one.name: fault for one in needed if (fault := _fault(one)) is not None}
    for name, fault in wrong.items():
        yield Finding(name, fault, "the engine does not start without it", Bearing.MISSING)
    present = [f"{one.name} {metadata.version(one.name)}" for one in needed if one.name not in wrong]
    yield Finding("packages", ", ".join(present), "in the versions that Ebbtide was built for")
    demo = [one for one in requirements if one.marker and one.marker.evaluate({"extra": "demo"})]
    if any(_fault(one) is not None for one in demo):
        yield Finding("demo", "matplotlib is not installed", "only `ebbtide demo` needs it", Bearing.NOTE)


def _fault(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"not installed, needs {requirement.specifier}"
    is_right = requirement.specifier.contains(version, prereleases=True)
    return None if is_right else f"{version}, needs {requirement.specifier}"


def _cpu(has_gpu: bool) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    found = f"{platform.machine()}, {cores} cores"
    if has_gpu:
        return Finding("CPU", found, "requests are scheduled here; models run on the GPU")
    # x86 and arm64 name the instructions differently.
    has_bfloat16 = bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
    quick = (
        "bfloat16 is computed by the CPU itself" if has_bfloat16 else "float32 is quicker than bfloat16 here"
    )
    return Finding("CPU", found, f"models run on these; {quick}")


def _arenas(has_gpu: bool) -> Iterator[Finding]:
    """Test host memory: take it, give it back and take it again, as release and resume on a CPU do."""
    subject = "host memory saver" if has_gpu else "memory saver"
    needed_by = "--device cpu and --enable-weights-cpu-backup" if has_gpu else "the engine"
    try:
        from ebbtide.srt.device import CpuDevice

        device = CpuDevice()
        virtual_memory = device.virtual_memory()
        size = virtual_memory.granularity
        place = virtual_memory.reserve(size)
        for _ in range(2):
            handle = virtual_memory.create(size)
            virtual_memory.map(place, 0, handle)
            virtual_memory.as_tensor(place).fill_(1)
            virtual_memory.unmap(place, 0, size)
            virtual_memory.release(handle)
        virtual_memory.free_reservation(place)
        memory = device.memory_info()
    except ImportError as error:
        yield Finding("memory", f"not looked at: {error}", "install the packages first", Bearing.MISSING)
        return
    except Exception as error:  # Any failure here is a finding.
        bearing = Bearing.NOTE if has_gpu else Bearing.MISSING
        yield Finding(subject, f"does not work: {error}", f"it is for {needed_by}", bearing)
        return
    meaning = f"for {needed_by}: memory can be released and resumed at the same addresses"
    yield Finding(subject, "works", meaning)
    taken = "backups of weights" if has_gpu else "weights and KV cache"
    yield Finding(
        "memory",
        f"{memory.free_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB free",
        f"{taken} come out of this; the machine's, or the control group's if that is less",
    )


def _shared_memory(mount: Path) -> Finding:
    try:
        usage = shutil.disk_usage(mount)
    except OSError:
        meaning = "weights cannot be sent as tensors; from disk and as safetensors they can"
        return Finding("shared memory", f"no {mount}", meaning, Bearing.NOTE)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {mount}"
    if usage.free < SMALL_SHM_BYTES:
        meaning = "small: tensors on their way to the engine must fit (in a container: --shm-size)"
        return Finding("shared memory", found, meaning, Bearing.NOTE)
    return Finding("shared memory", found, "tensors on their way to the engine must fit in it")


def _visible_gpus() -> int:
    """Number of CUDA devices that torch can use. No context is created on any."""
    try:
        return import_module("torch").accelerator.device_count() if sees_cuda() else 0
    except (ImportError, AttributeError):  # torch is missing or too old: `_packages` reports that.
        return 0


def _gpus(num_visible: int, devices: Path, nvml: Any = None) -> Finding:
    """Compare the GPUs that torch sees with those of the machine.

    Args:
        devices: /dev.
        nvml: replaces the module pynvml in tests; None: pynvml, if it is installed.
    """
    num_cards = len(list(devices.glob("nvidia[0-9]*")))
    if num_visible == 0 and num_cards == 0:
        return Finding("GPU", "none", "the CPU is used")
    if num_visible == 0:
        meaning = (
            "torch sees no CUDA device, so the CPU is used: install a torch built for CUDA, and look at the "
            "driver (nvidia-smi) and at CUDA_VISIBLE_DEVICES"
        )
        return Finding("GPU", f"{num_cards} NVIDIA", meaning, Bearing.NOTE)
    found = ", ".join([str(num_visible), *_gpu_names(nvml)])
    meaning = "models run on the first one (--base-gpu-id chooses another, --device cpu none)"
    if num_visible > 1:
        meaning += "; one takes as many as --tp-size times --dp-size says"
    return Finding("GPU", found, meaning)


def _gpu_names(nvml: Any) -> list[str]:
    """Names and memory of the machine's GPUs, each kind once; empty if NVML does not work."""
    try:
        library = nvml if nvml is not None else import_module("pynvml")
    except ImportError:
        return []
    names = []
    try:
        library.nvmlInit()
        for index in range(library.nvmlDeviceGetCount()):
            device = library.nvmlDeviceGetHandleByIndex(index)
            name = library.nvmlDeviceGetName(device)
            names.append(f"{name} ({library.nvmlDeviceGetMemoryInfo(device).total / GIB:.0f} GiB)")
    except library.NVMLError:
        return []
    return sorted(set(names))


# Packages for GPUs, except FlashInfer: what each is for, what it means if it is missing, and how bad that is.
_GPU_PACKAGES = {
    "cuda-bindings": (
        "device memory can be released and resumed at the same addresses",
        "the engine does not start on the GPU without it (--device cpu does)",
        Bearing.MISSING,
    ),
    "torch_memory_saver": (
        "for --memory-saver-backend torch_memory_saver",
        "only --memory-saver-backend torch_memory_saver needs it",
        Bearing.NOTE,
    ),
    "nvidia-ml-py": (
        "tells what each process holds of the device",
        "what the engine holds of the device is estimated without it",
        Bearing.NOTE,
    ),
}


def _gpu_packages() -> Iterator[Finding]:
    for name, (use, lack, bearing) in _GPU_PACKAGES.items():
        requirement = _cuda_requirement(name)
        if (fault := _fault(requirement)) is None:
            yield Finding(name, metadata.version(requirement.name), use)
        else:
            yield Finding(name, fault, f'{lack}; pip install "ebbtide[cuda]"', bearing)


def _flashinfer() -> Finding:
    from ebbtide.srt.kernel_cache import flashinfer_cache_dir, flashinfer_problem

    fallback = "attention is a Triton kernel's then: slower"
    if (problem := flashinfer_problem()) is not None:
        return Finding("FlashInfer", f"not usable: {problem}", fallback, Bearing.NOTE)
    requirement = _cuda_requirement("flashinfer-python")
    if (fault := _fault(requirement)) is not None:
        meaning = "attention may fail: Ebbtide calls functions beneath FlashInfer's public ones"
        return Finding("FlashInfer", fault, meaning, Bearing.NOTE)
    meaning = f"attention by its kernels; `ebbtide warmup` compiles them once, into {flashinfer_cache_dir()}"
    return Finding("FlashInfer", metadata.version(requirement.name), meaning)


def _requirements() -> list[Requirement]:
    """Ebbtide's requirements; empty if Ebbtide itself is not installed."""
    try:
        return [Requirement(line) for line in metadata.requires("ebbtide") or ()]
    except metadata.PackageNotFoundError:
        return []


def _cuda_requirement(name: str) -> Requirement:
    """The requirement of this name in the extra `cuda`; any version if there is none."""
    of_cuda = (one for one in _requirements() if one.marker and one.marker.evaluate({"extra": "cuda"}))
    return next((one for one in of_cuda if one.name == name), Requirement(name))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
