"""Two replicas as one engine, in real processes around null parts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from fixtures.uneven_replicas import TARGETS, held_up_by, misread_by, refused_by

from ebbtide.srt.entrypoints.service import EngineService
from ebbtide.srt.errors import EngineError, RequestRejected
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_engine import NullEngine, null_config

# Seconds, even without a model.
LONG = {"max_new_tokens": 50_000, "ignore_eos": True}
SHORT = {"max_new_tokens": 4, "ignore_eos": True}


class TwoReplicas(NullEngine):
    """An engine of two replicas, either of which can be made to refuse an update."""

    def __init__(self) -> None:
        super().__init__(dp_size=2, context_length=60_000)

    @classmethod
    def _start(cls, server_args: ServerArgs) -> EngineService:
        return EngineService(null_config(server_args), TARGETS)

    @property
    def versions(self) -> list[str]:
        """What each replica says that it serves."""
        return [replica["weight_version"] for replica in self.server_info()["internal_states"]]

    @property
    def pids(self) -> dict[str, int]:
        return self._service.pids


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[TwoReplicas]:
    with TwoReplicas() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: TwoReplicas) -> Iterator[TwoReplicas]:
    """The shared engine, left idle, running, resident, and with weights of version "default"."""
    yield shared_engine
    shared_engine.abort_request(abort_all=True)
    shared_engine.abort_weight_update()
    shared_engine.resume_memory_occupation()
    shared_engine.continue_generation()
    shared_engine.update_weights_from_disk("0", weight_version="default")


def test_an_update_that_one_replica_refuses_changes_none(engine: TwoReplicas) -> None:
    chunks = engine.generate(input_ids=[1], sampling_params=LONG, stream=True, routed_dp_rank=0)
    next(chunks)
    with pytest.raises(RequestRejected, match=r"^replica 1: this replica cannot read the folder$") as caught:
        engine.update_weights_from_disk("5", weight_version=refused_by(1), pause_mode="retract")
    assert caught.value.status == 400
    assert engine.versions == ["default", "default"]
    assert engine.get_weights_by_name("layer.0") == [0.0]
    next(chunks)
    chunks.close()
    engine.update_weights_from_disk("6", weight_version="8", pause_mode="retract")
    assert engine.versions == ["8", "8"]
    assert engine.model_info()["weight_versions"] == ["8", "8"]
    batch = engine.generate(input_ids=[[1], [2]], sampling_params=SHORT)
    assert [answer["meta_info"]["weight_version"] for answer in batch] == ["8", "8"]


def test_no_replica_serves_an_update_that_another_is_still_reading(engine: TwoReplicas) -> None:
    version = held_up_by(1, seconds=1.0)

    def served_by(dp_rank: int) -> str:
        answer = engine.generate(input_ids=[1], sampling_params=SHORT, routed_dp_rank=dp_rank)
        return str(answer["meta_info"]["weight_version"])

    with ThreadPoolExecutor(1) as pool:
        terms = {"weight_version": version, "pause_mode": "in_place", "flush_cache": False}
        updating = pool.submit(engine.update_weights_from_disk, "5", **terms)
        served = [served_by(0)]
        while served[-1] != version:
            served.append(served_by(0))
        # Both were told to commit before anybody could see that one has.
        assert served_by(1) == version
        assert updating.result()["weight_version"] == version
    assert served[0] == "default"
    assert engine.versions == [version, version]


def test_replicas_that_hold_different_weights_have_different_checksums(engine: TwoReplicas) -> None:
    alike = engine.check_weights()
    assert len(alike["ranks"]) == 2
    engine.check_weights("snapshot")
    # The same values to the first, others to the second.
    engine.update_weights_from_disk("0", weight_version=misread_by(1))
    mixed = engine.check_weights()["per_engine_checksum"]
    assert mixed.startswith(f"mixed: {alike['per_engine_checksum']}, ")
    with pytest.raises(RequestRejected, match=r"^replica 1: 4 parameters are not those of the snapshot"):
        engine.check_weights("compare")
    engine.check_weights("reset_tensors")
    assert not engine.memory_occupation()["can_run"]
    engine.update_weights_from_disk("0")
    assert engine.check_weights() == alike


def test_a_session_of_which_one_replica_refused_a_part_is_discarded_on_both(engine: TwoReplicas) -> None:
    engine.begin_weight_update()
    engine.update_weights_from_disk("4")
    with pytest.raises(RequestRejected, match=r"replica 0: this replica cannot read.*session was discarded"):
        engine.update_weights_from_disk("5", weight_version=refused_by(0))
    with pytest.raises(RequestRejected, match="no weight update session is open"):
        engine.end_weight_update()
    assert engine.versions == ["default", "default"]
    assert engine.get_weights_by_name("layer.0") == [0.0]
    with engine.weight_update(weight_version="9"):
        engine.update_weights_from_disk("6")
    assert engine.versions == ["9", "9"]


# The last one: the shared engine is gone after it.
def test_a_dead_replica_takes_the_engine_down(shared_engine: TwoReplicas) -> None:
    os.kill(shared_engine.pids["scheduler-dp1-tp0"], signal.SIGKILL)
    with pytest.raises(EngineError, match="scheduler-dp1-tp0 process was ended by SIGKILL"):
        use_for_ever(shared_engine)


def use_for_ever(engine: TwoReplicas) -> None:
    while True:
        engine.flush_cache()
