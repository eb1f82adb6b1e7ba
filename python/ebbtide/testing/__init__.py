"""Ebbtide without a model, for tests of programs that control it.

The scheduler and the control plane are the real ones. `SchedulerHarness` is a scheduler that a test turns
step by step: it takes milliseconds, and needs no process and no torch. `ebbtide.testing.null_engine` is a
whole engine around the same parts, with real processes and channels: `NullEngine` in Python, or a server to
start with `python -m`.
"""

from ebbtide.testing.harness import Output, SchedulerHarness, default_schedule
from ebbtide.testing.null_kv import NullDevice, NullMemory
from ebbtide.testing.null_runner import NullRunner
from ebbtide.testing.null_weights import NullWeights

__all__ = [
    "NullDevice",
    "NullMemory",
    "NullRunner",
    "NullWeights",
    "Output",
    "SchedulerHarness",
    "default_schedule",
]
