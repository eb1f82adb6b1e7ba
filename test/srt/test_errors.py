"""What messages of errors say."""

import pytest

from ebbtide.srt.errors import first_few


@pytest.mark.parametrize(("number", "end"), [(2, "0, 1"), (10, "8, 9"), (13, "8, 9 and 3 more")])
def test_a_message_that_names_a_few_says_how_many_more_there_are(number: int, end: str) -> None:
    assert first_few([str(index) for index in range(number)]).endswith(end)
