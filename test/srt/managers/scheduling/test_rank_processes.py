"""Ranks of one replica as processes, over their channels, around null parts."""

from collections.abc import Iterator

import pytest
from fixtures.servers import is_alive, wait_until, wait_until_idle
from fixtures.uneven_ranks import TARGETS, fatal_on

from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import EngineError
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_engine import NullEngine
from ebbtide.testing.null_runner import null_config

NUM_RANKS = 3


class ThreeRanks(NullEngine):
    """An engine of three ranks, each of which can be made to differ."""

    def __init__(self) -> None:
        super().__init__(tp_size=NUM_RANKS)

    @classmethod
    def _start(cls, server_args: ServerArgs) -> EngineService:
        return EngineService(null_config(server_args), TARGETS)

    @property
    def pids(self) -> dict[str, int]:
        return self._service.pids


@pytest.fixture(scope="module")
def engine() -> Iterator[ThreeRanks]:
    with ThreeRanks() as engine:
        yield engine


def test_ranks_that_wait_idle(engine: ThreeRanks) -> None:
    engine.pause_generation("in_place")
    assert len(engine.pids) == NUM_RANKS
    wait_until_idle(engine.pids)
    engine.continue_generation()


def test_a_rank_that_cannot_commit_ends_the_engine_and_says_why(engine: ThreeRanks) -> None:
    """It would serve other weights than the others do. The last test: the engine has ended."""
    with pytest.raises(EngineError, match=r"scheduler-tp2 .*: .*the swap failed"):
        engine.update_weights_from_disk("6", weight_version=fatal_on(2))
    wait_until(lambda: not any(map(is_alive, engine.pids.values())), "all ranks have ended")
