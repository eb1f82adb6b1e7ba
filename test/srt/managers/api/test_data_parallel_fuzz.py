"""Any order of requests, deadlines and failures: all replicas commit an update, or none does.

But for an update in place that breaks off half-way on one of them, when all have been told to write: what it
was overwriting is stale, and the reply says which replica serves what.
"""

import re

from fixtures.control import updating
from fixtures.control_fuzz import RANKS, STEPS, Clients
from fixtures.fuzz import fuzzed
from fixtures.replicas_by_hand import Replicas
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from ebbtide.srt.managers.io_struct import (
    AnyControlRequest,
    EndWeightUpdateReqInput,
    Expire,
    Refusal,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsReqOutput,
    UpdateWeightVersionReqInput,
)
from ebbtide.testing import default_schedule

NUM_REPLICAS = 2
# What a replica says of a part of a session, which serves nowhere.
SESSION_PIECE = re.compile("Staged|nothing runs before end_weight_update")
UPDATES = (UpdateWeightFromDiskReqInput, EndWeightUpdateReqInput)
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

    @rule(index=RANKS, step=st.sampled_from(STEPS), is_refused=st.booleans())
    def break_something(self, index: int, step: str, is_refused: bool) -> None:
        # What is written once all have been told to, and in place, ends its rank where it fails.
        super().break_something(index, step, is_refused or step == "write")

    @rule()
    def name_version(self) -> None:
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

    @property
    def divided(self) -> dict[str, list[bool]]:
        """Of the updates that only some replicas are said to have committed, which.

        A session's piece that only some of them hold is none: it serves nowhere.
        """
        divided = {}
        for call, reply in self.replicas.replies.items():
            is_update = isinstance(self.replicas.calls[call], UPDATES)
            if is_update and isinstance(reply, Refusal) and "replicas" in reply.fields:
                outcomes = reply.fields["replicas"]
                committed = [
                    each["success"] and not SESSION_PIECE.search(each["message"]) for each in outcomes
                ]
                if any(committed):
                    divided[call] = committed
        return divided

    @invariant()
    def none_is_a_commit_ahead_for_good(self) -> None:
        divided = self.divided
        committed = [
            [call for call in replica.committed if call not in divided] for replica in self.replicas.replicas
        ]
        longest = max(committed, key=len)
        assert all(each == longest[: len(each)] for each in committed)

    def turn_until_idle(self) -> None:
        for _ in range(300):
            # Some operations wait for what the loop is not told of: in the harness, every turn looks.
            operations = [rank.scheduler.control.operations for rank in self.ranks]
            if not any(replica.is_busy for replica in self.replicas.replicas) and not any(
                each.any_pending for each in operations
            ):
                return
            self.turn_all(1)
        raise AssertionError("still busy")

    def teardown(self) -> None:
        """Every call is answered, what was said to be committed is so everywhere, and nothing else is."""
        replicas = self.replicas
        self.make_whole()
        for _ in range(3):
            self.call_for_rest()
            self.turn_until_idle()
        assert replicas.replies.keys() == replicas.calls.keys()
        committed = [
            call
            for call, reply in replicas.replies.items()
            if isinstance(reply, UpdateWeightsReqOutput) and reply.committed
        ]
        divided = self.divided
        for dp_rank, replica in enumerate(replicas.replicas):
            by_itself = [call for call, outcomes in divided.items() if outcomes[dp_rank]]
            assert sorted(replica.committed) == sorted([*committed, *by_itself])
            assert not replica.scheduler.control.operations.any_pending
        if divided:
            # As the reply says: send it again.
            replicas.apply(updating(1, weight_version="1", flush_cache=False), UpdateWeightsReqOutput)
        assert len(set(replicas.versions)) == 1
        missing = frozenset[str]().union(
            *(replica.scheduler.control.memory.content.missing for replica in replicas.replicas)
        )
        names = replicas[0].weights.names - missing
        held = [{name: replica.weights.live[name] for name in names} for replica in replicas.replicas]
        assert held[0] == held[1]


TestReplicasFuzz = fuzzed(ReplicasMachine, 30)
