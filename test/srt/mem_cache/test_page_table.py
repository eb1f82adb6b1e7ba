import numpy as np
import pytest

from ebbtide.srt.mem_cache.page_allocator import PageTable


def test_rows_hold_what_was_written() -> None:
    table = PageTable(num_rows=3, max_pages=4)
    first, second = table.allocate_row(), table.allocate_row()
    table.write(first, 0, [7, 8])
    table.write(second, 0, [1])
    table.write(first, 2, [9])
    assert table.array[first, :3].tolist() == [7, 8, 9]
    assert table.array[second, 0] == 1
    assert table.array.dtype == np.int32
    assert table.array.shape == (3 + 1, 4)  # with the spare row


def test_rows_are_distinct_and_come_back() -> None:
    table = PageTable(num_rows=3, max_pages=1)
    rows = [table.allocate_row() for _ in range(3)]
    assert sorted(rows) == [0, 1, 2]
    with pytest.raises(AssertionError):
        table.allocate_row()
    table.free_row(rows[1])
    assert table.allocate_row() == rows[1]


def test_a_row_cannot_be_returned_twice_nor_written_after() -> None:
    table = PageTable(num_rows=2, max_pages=2)
    row = table.allocate_row()
    table.free_row(row)
    with pytest.raises(AssertionError):
        table.free_row(row)
    with pytest.raises(AssertionError):
        table.write(row, 0, [1])
    with pytest.raises(AssertionError):
        table.free_row(5)


@pytest.mark.parametrize(("first_index", "pages"), [(2, [1]), (1, [1, 2]), (-1, [1]), (0, [1, 2, 3])])
def test_writing_outside_the_row_fails(first_index: int, pages: list[int]) -> None:
    table = PageTable(num_rows=2, max_pages=2)
    row = table.allocate_row()
    with pytest.raises(AssertionError):
        table.write(row, first_index, pages)
    assert not table.array.any()
