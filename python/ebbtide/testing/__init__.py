"""Ebbtide without a model, to test what drives it: the scheduler and its state machines are the real ones.

`SchedulerHarness` is one scheduler, turned by hand: milliseconds, no process, no torch.
`ebbtide.testing.null_engine` has the same inside a whole engine, with real processes and channels:
`NullEngine` in Python, and a server to be started with `python -m`.
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
