"""`ebbtide doctor`: what this machine has, and what that means for someone who wants to run Ebbtide on it."""

from __future__ import annotations

import argparse
import enum
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table

from ebbtide import __version__

GIB = 1 << 30
SMALL_SHM_BYTES = GIB


class Verdict(enum.Enum):
    """How a finding bears on running Ebbtide; the value is its colour."""

    GOOD = "green"
    NOTE = "yellow"
    MISSING = "red"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was looked at, what is there, what that means."""

    subject: str
    found: str
    meaning: str
    verdict: Verdict = Verdict.GOOD


def main(argv: Sequence[str]) -> int:
    """Print the report; returns 1 if something is missing without which the engine cannot run, else 0."""
    argparse.ArgumentParser(prog="ebbtide doctor", description=__doc__).parse_args(argv)
    findings = list(examine())
    table = Table(title=f"Ebbtide {__version__}", title_justify="left")
    for heading in ("", "found", "what it means"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        table.add_row(finding.subject, finding.found, finding.meaning, style=finding.verdict.value)
    console = Console()
    console.print(table)
    missing = [finding.subject for finding in findings if finding.verdict is Verdict.MISSING]
    console.print(f"Ebbtide cannot run here: {', '.join(missing)}." if missing else "Ebbtide can run here.")
    return 1 if missing else 0


def examine() -> Iterator[Finding]:
    """Look at everything, from the interpreter to the GPUs."""
    yield Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.release()}", "")
    yield from _packages()
    yield _cpu()
    yield from _arenas()
    yield _huge_pages(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    yield _shared_memory(Path("/dev/shm"))
    yield _gpus(Path("/dev"))


def _packages() -> Iterator[Finding]:
    try:
        requirements = [Requirement(line) for line in metadata.requires("ebbtide") or ()]
    except metadata.PackageNotFoundError:
        yield Finding("packages", "ebbtide is not installed", "run: pip install -e python", Verdict.NOTE)
        return
    needed = [one for one in requirements if one.marker is None]
    wrong = {one.name: fault for one in needed if (fault := _fault(one)) is not None}
    for name, fault in wrong.items():
        yield Finding(name, fault, "the engine does not start without it", Verdict.MISSING)
    present = [f"{one.name} {metadata.version(one.name)}" for one in needed if one.name not in wrong]
    yield Finding("packages", ", ".join(present), "in the versions that Ebbtide was built for")
    lacking = [one for one in requirements if one.marker and one.marker.evaluate({"extra": "demo"})]
    if any(_fault(one) is not None for one in lacking):
        yield Finding("demo", "matplotlib is not installed", "only `ebbtide demo` needs it", Verdict.NOTE)


def _fault(requirement: Requirement) -> str | None:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"not installed, needs {requirement.specifier}"
    is_right = requirement.specifier.contains(version, prereleases=True)
    return None if is_right else f"{version}, needs {requirement.specifier}"


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        flags = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        flags = set()
    # x86 and arm64 name the instructions differently.
    has_bfloat16 = bool(flags & {"amx_bf16", "avx512_bf16", "bf16"})
    quick = (
        "bfloat16 is computed by the CPU itself" if has_bfloat16 else "float32 is quicker than bfloat16 here"
    )
    return Finding("CPU", f"{platform.machine()}, {cores} cores", f"models run on these; {quick}")


def _arenas() -> Iterator[Finding]:
    """Take memory, give it back and take it again, as a release and a resume do."""
    try:
        from ebbtide.srt.device.cpu import CpuDevice
    except ImportError as error:
        yield Finding("memory", f"not looked at: {error}", "install the packages first", Verdict.MISSING)
        return
    try:
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
    except Exception as error:  # whatever stops an arena here is what this command is for
        yield Finding(
            "memory saver", f"does not work: {error}", "the engine needs it to start", Verdict.MISSING
        )
        return
    yield Finding("memory saver", "host", "memory can be released and resumed at the same addresses")
    yield Finding(
        "memory",
        f"{memory.free_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB free",
        "weights and KV cache come out of this; the machine's, or the control group's if that is less",
    )


def _huge_pages(setting: Path) -> Finding:
    try:
        chosen = setting.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        chosen = "unknown"
    if chosen in ("always", "madvise"):
        return Finding("huge pages", chosen, "release and resume move 2 MiB at a time")
    meaning = "release and resume work, but slower: memory moves in small pages"
    return Finding("huge pages", chosen, meaning, Verdict.NOTE)


def _shared_memory(mount: Path) -> Finding:
    try:
        usage = shutil.disk_usage(mount)
    except OSError:
        meaning = "weights cannot be sent as tensors; from disk and as safetensors they can"
        return Finding("shared memory", f"no {mount}", meaning, Verdict.NOTE)
    found = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB free in {mount}"
    if usage.free < SMALL_SHM_BYTES:
        meaning = "small: tensors on their way to the engine must fit (in a container: --shm-size)"
        return Finding("shared memory", found, meaning, Verdict.NOTE)
    return Finding("shared memory", found, "tensors on their way to the engine must fit in it")


def _gpus(devices: Path) -> Finding:
    count = len(list(devices.glob("nvidia[0-9]*")))
    if count == 0:
        return Finding("GPU", "none", "the CPU is used")
    return Finding("GPU", f"{count} NVIDIA", "not used: this version runs on the CPU", Verdict.NOTE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
