"""A GPU of which the tests keep the books."""

from collections.abc import Iterator

import pytest
from fixtures.gpu_memory import Counters, Gpu


@pytest.fixture
def counters() -> Iterator[Counters]:
    counters = Counters()
    yield counters
    counters.close()


@pytest.fixture
def gpu(counters: Counters) -> Gpu:
    return Gpu(counters)
