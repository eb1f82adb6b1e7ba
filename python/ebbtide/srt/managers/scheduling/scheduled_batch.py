"""A forward pass as the scheduler plans it. Plain Python, but for the arrays of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from ebbtide.srt.managers.scheduling.request import KVHold, Req
from ebbtide.srt.model_executor.batch_plan import SAMPLED_BEFORE, BatchPlan


@dataclass(slots=True)
class ScheduledBatch:
    """One forward pass: the plan for the runner, the requests behind its rows, and those that it starts.

    Attributes:
        holds: the KV that each request held when the step was planned. Who holds another by the time the
            step has run was ended or retracted meanwhile: the row counts for nothing.
    """

    requests: list[Req]
    holds: list[KVHold]
    plan: BatchPlan
    admitted: list[Req]

    @classmethod
    def launched(cls, requests: list[Req], num_new: list[int], admitted: list[Req]) -> Self:
        """The plan of so many new tokens of each request; from here on they count as launched."""
        starts: list[int] = []
        rows: list[int] = []
        samples: list[bool] = []
        num_outputs: list[int] = []
        input_ids: list[int] = []
        holds: list[KVHold] = []
        for req, count in zip(requests, num_new, strict=True):
            kv = req.kv
            assert kv is not None
            start, output_ids = kv.num_launched, req.spec.output_ids
            holds.append(kv)
            starts.append(start)
            rows.append(kv.row)
            num_outputs.append(len(output_ids) + req.num_in_flight)
            if req.num_in_flight:
                input_ids.append(SAMPLED_BEFORE)
                is_sampled = True
            elif count == 1 and output_ids and start + 1 == req.num_tokens:
                input_ids.append(output_ids[-1])
                is_sampled = True
            else:
                input_ids.extend(req.tokens(start, start + count))
                is_sampled = start + count == req.num_tokens and req.max_new_tokens > 0
            samples.append(is_sampled)
            kv.num_launched = start + count
            req.num_in_flight += is_sampled
        plan = BatchPlan(
            input_ids_T=np.array(input_ids, dtype=np.int64),
            page_rows_R=np.array(rows, dtype=np.int32),
            starts_R=np.array(starts, dtype=np.int32),
            num_new_R=np.array(num_new, dtype=np.int32),
            samples_R=np.array(samples, dtype=np.bool_),
            num_outputs_R=np.array(num_outputs, dtype=np.int64),
            specs=[req.spec for req in requests],
        )
        return cls(requests, holds, plan, admitted)
