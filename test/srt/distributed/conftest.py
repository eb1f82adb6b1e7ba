"""Ranks for all tests of the folder: each start costs seconds."""

from collections.abc import Iterator

import pytest
from fixtures.rank_processes import Ranks


@pytest.fixture(scope="session")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(2, tmp_path_factory.mktemp("two")) as ranks:
        yield ranks
