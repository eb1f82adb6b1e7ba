"""A forward pass as the scheduler plans it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ebbtide.srt.model_executor.batch_plan import BatchPlan

if TYPE_CHECKING:
    from ebbtide.srt.managers.scheduling.request import Req


@dataclass(slots=True)
class ScheduledBatch:
    """One forward pass: the plan for the runner, the requests behind its rows, and those that it starts.

    Attributes:
        serials_R: of the holds of KV when the step was planned. Where another holds the row by the time the
            step has run the request was ended or retracted meanwhile: its part counts for nothing.
    """

    requests: list[Req]
    serials_R: NDArray[np.int64]
    plan: BatchPlan
    admitted: list[Req]
