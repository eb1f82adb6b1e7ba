"""Any order of requests, deadlines and failures: all replicas commit an update, or none does."""

from __future__ import annotations

import os

from fixtures.control_fuzz import Clients, fuzzed
from fixtures.replicas_by_hand import Replicas
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    Expire,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
)
from ebbtide.testing import default_schedule

NUM_SEQUENCES = int(os.environ.get("EBBTIDE_FUZZ_SEQUENCES", "400")) // 8
NUM_REPLICAS = 2
REPLICAS = st.integers(0, NUM_REPLICAS - 1)


class ReplicasMachine(Clients):
    """Clients of replicas of which each has its own speed."""

    @initialize(
        overlap=st.booleans(),
        keeps_weights=st.booleans(),
        num_ranks=st.integers(1, 2),
        seed=st.integers(0, 1 << 16),
    )
    def start(self, overlap: bool, keeps_weights: bool, num_ranks: int, seed: int) -> None:
        self.expired: set[tuple[str, int]] = set()
        self.replicas = Replicas(
            NUM_REPLICAS,
            num_pages=40,
            context_len=64,
            schedule=default_schedule(max_running_requests=4, overlap=overlap),
            keeps_weights=keeps_weights,
            num_ranks=num_ranks,
        )
        self.begin([rank for replica in self.replicas.replicas for rank in replica.ranks], seed)

    @rule(dp_rank=REPLICAS, length=st.integers(1, 30), count=st.integers(0, 30))
    def generate(self, dp_rank: int, length: int, count: int) -> None:
        self.replicas[dp_rank].generate(range(1, 1 + length), max_new_tokens=count)
        self.go_on()

    @rule()
    def name_version(self) -> None:
        """In a session it takes effect with that; on a replica that has lost its own, at once."""
        has_session = {replica.scheduler.control.updates.is_under_way for replica in self.replicas.replicas}
        if has_session == {False}:
            self.call(UpdateWeightVersionReqInput(new_version="v"))

    @rule(dp_rank=REPLICAS, number=st.integers(0, 20), is_session=st.booleans())
    def expire(self, dp_rank: int, number: int, is_session: bool) -> None:
        """A deadline comes once; each replica looks at its own clock."""
        waiting = [call for call in self.replicas.calls if call not in self.replicas.replies]
        if is_session:
            self.replicas[dp_rank].deliver(Expire(id=f"weight-session-{number % 3}"))
        elif waiting:
            call = waiting[number % len(waiting)]
            if (call, dp_rank) not in self.expired:
                self.expired.add((call, dp_rank))
                self.replicas[dp_rank].deliver(Expire(id=call))
        self.go_on()

    @rule(count=st.sampled_from([1, 5, 40]))
    def turn_all(self, count: int) -> None:
        self.replicas.turn(*range(NUM_REPLICAS), count=count)

    def call(self, request: AnyControlRequest) -> None:
        self.replicas.call(request)
        self.go_on()

    def go_on(self) -> None:
        for _ in range(self.random.choice([0, 1, 4])):
            self.replicas.turn(self.random.randrange(NUM_REPLICAS), count=self.random.choice([1, 5, 25]))

    @invariant()
    def none_is_a_commit_ahead_for_good(self) -> None:
        committed = [replica.committed for replica in self.replicas.replicas]
        longest = max(committed, key=len)
        assert all(each == longest[: len(each)] for each in committed)

    def teardown(self) -> None:
        """Every call is answered, what was said to be committed is so everywhere, and nothing else is."""
        replicas = self.replicas
        self.make_whole()
        for _ in range(3):
            self.call_for_rest()
            replicas.turn(*range(NUM_REPLICAS), count=300)
        assert replicas.replies.keys() == replicas.calls.keys()
        committed = [
            call
            for call, reply in replicas.replies.items()
            if isinstance(reply, UpdateWeightsReqOutput) and reply.committed
        ]
        for replica in replicas.replicas:
            assert sorted(replica.committed) == sorted(committed)
            assert not replica.scheduler.control.operations.any_pending
        assert len(set(replicas.versions)) == 1
        missing = frozenset[str]().union(
            *(replica.scheduler.control.memory.content.missing for replica in replicas.replicas)
        )
        names = replicas[0].weights.names - missing
        held = [{name: replica.weights.live[name] for name in names} for replica in replicas.replicas]
        assert held[0] == held[1]


TestReplicasFuzz = fuzzed(ReplicasMachine, NUM_SEQUENCES)
