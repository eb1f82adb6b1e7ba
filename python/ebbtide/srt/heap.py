"""Python's garbage collector and what a process holds for good."""

import gc


def freeze_heap() -> None:
    """Take what the process has built so far out of the collector's sight.

    To be called when a process has started. A full collection would walk all of it, modules included, for
    tens of milliseconds, in the middle of a step or of everybody's streams.
    """
    gc.collect()
    gc.freeze()
