"""A plan's tensors: positions, slots and the rows whose logits are needed."""

from collections.abc import Sequence

import numpy as np
import pytest

from ebbtide.srt.model_executor.batch_plan import BatchPlan, LogprobSpec, SampleSpec
from ebbtide.srt.model_executor.forward_batch import ForwardBatch
from ebbtide.srt.sampling_params import SamplingParams

PAGE_TABLE = np.array([[9, 8, 7, 6], [0, 0, 0, 0], [3, 1, 5, 2]], dtype=np.int32)


def spec(prompt_len: int = 10, start: int | None = None) -> SampleSpec:
    logprobs = LogprobSpec(start=start) if start is not None else None
    return SampleSpec(SamplingParams(), 0, frozenset(), list(range(100, 100 + prompt_len)), [], logprobs)


def lay_out(
    rows: list[int], starts: list[int], num_new: list[int], samples: list[bool], specs: list[SampleSpec]
) -> ForwardBatch:
    plan = BatchPlan(
        input_ids_T=np.arange(sum(num_new)),
        page_rows_R=np.array(rows, dtype=np.int32),
        starts_R=np.array(starts, dtype=np.int32),
        num_new_R=np.array(num_new, dtype=np.int32),
        samples_R=np.array(samples),
        num_outputs_R=np.zeros(len(rows), dtype=np.int64),
        specs=specs,
    )
    return ForwardBatch.from_plan(plan, PAGE_TABLE[np.newaxis], page_size=4)


def test_positions_and_slots_of_a_mixed_batch() -> None:
    batch = lay_out([2, 0], [6, 3], [4, 1], [False, True], [spec(), spec()])

    assert batch.positions_T.tolist() == [6, 7, 8, 9, 3]
    # Positions 6 and 7 lie in page 1, 8 and 9 in page 5; position 3 of the other request in page 9.
    assert batch.paged.slots_T.tolist() == [4 + 2, 4 + 3, 20, 21, 36 + 3]
    assert batch.paged.lens_R.tolist() == [10, 4]
    assert batch.paged.page_table_RP.tolist() == [[3, 1, 5], [9, 8, 7]]
    assert batch.sampled_R == [1]
    assert batch.sampled_rows_S.tolist() == [4]
    assert batch.prompt_rows == []


def test_a_decode_batch_samples_every_row() -> None:
    batch = lay_out([0, 2], [7, 8], [1, 1], [True, True], [spec(), spec()])

    assert batch.positions_T.tolist() == [7, 8]
    assert batch.paged.slots_T.tolist() == [8 * 4 + 3, 5 * 4]
    assert batch.sampled_rows_S.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("start", "begun", "num_new", "first_row", "predicted"),
    [
        # Behind another request's three: row 3 is position 4, so position 6 is predicted by row 4.
        (5, 4, 4, 4, range(106, 109)),
        (0, 0, 10, 3, range(101, 110)),
        # A prompt and its output, prefilled again.
        (0, 8, 6, 3, [109]),
        # A decode step, a chunk before the start, a start at the end.
        *((0, 12, 1, None, []), (8, 0, 4, None, []), (9, 0, 10, None, [])),
    ],
)
def test_rows_of_a_prompt_predict_the_next_position(
    start: int, begun: int, num_new: int, first_row: int | None, predicted: Sequence[int]
) -> None:
    samples = [True, begun + num_new >= 10]
    batch = lay_out([0, 2], [2, begun], [3, num_new], samples, [spec(), spec(start=start)])

    found = [(rows.request, rows.first_row, rows.token_ids) for rows in batch.prompt_rows]
    assert found == ([] if first_row is None else [(1, first_row, list(predicted))])
