"""A scheduler on null parts, turned by hand."""

import pytest
from fixtures.control import Harness


@pytest.fixture
def harness() -> Harness:
    return Harness()
