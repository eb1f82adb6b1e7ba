"""The weights of an engine in buckets, for another one like it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.payloads import open_payload

from ebbtide.formats.stored_tensor import whole
from ebbtide.ray import joint_engine
from ebbtide.ray.actor import EngineActor
from ebbtide.ray.continuation import OutputSoFar
from ebbtide.ray.joint_engine import JointEngine, WeightBucket
from ebbtide.ray.node_loans import NodeLender, NodeLoans
from ebbtide.srt.config import Place
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.managers.api import ended_outputs
from ebbtide.srt.managers.io_struct import WeightPiece
from ebbtide.srt.sampling_params import SamplingParams
from ebbtide.testing import NullRunner
from ebbtide.testing.null_engine import NullEngine

PARAMETERS = {
    "embedding": torch.arange(10.0),
    "projection": torch.arange(6.0).to(torch.float8_e4m3fn).view(2, 3),
    "projection_scale": torch.ones(1),
    "norm": torch.arange(3).to(torch.bfloat16),
}


class Engine(JointEngine):
    """Has two ranks, each with these parameters, and notes what it is told.

    Attributes:
        changes: whether something is written to them before each read.
        most_together: parameters that a read brings of each rank.
    """

    def __init__(self) -> None:
        self.server_args: Any = SimpleNamespace(tp_size=2)
        self.generation = 0
        self.changes = False
        self.most_together = (3, 2)
        self.num_reads = 0
        self.told: list[Any] = []

    async def _read_pieces(self, index: int, first_byte: int) -> list[list[WeightPiece]]:
        self.num_reads += 1
        self.generation += self.changes
        return [self._pieces(index, first_byte, most) for most in self.most_together]

    def _pieces(self, index: int, first_byte: int, num_parameters: int) -> list[WeightPiece]:
        pieces = []
        for name, tensor in list(PARAMETERS.items())[index : index + num_parameters]:
            data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
            if pieces and (first_byte > 0 or len(pieces[0].data) == joint_engine.PIECE_BYTES):
                break
            piece = WeightPiece(
                num_parameters=len(PARAMETERS),
                generation=self.generation,
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                data=data[first_byte : first_byte + joint_engine.PIECE_BYTES],
            )
            pieces.append(piece)
        return pieces

    async def _stage(self, bucket: WeightBucket) -> None:
        self.told.append([[parameter.name for parameter in rank] for rank in bucket.by_rank])
        for parameter in bucket.by_rank[1]:
            expected = PARAMETERS[parameter.name]
            assert torch.equal(parameter.tensor().view(torch.uint8), expected.view(torch.uint8))

    async def async_begin_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        self.told.append("begin")

    async def async_end_weight_update(self, *args: Any, **kwargs: Any) -> Any:
        self.told.append(kwargs["weight_version"])

    async def async_abort_weight_update(self) -> Any:
        self.told.append("abort")


def test_weights_travel_in_buckets_and_8_bits_with_their_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_engine, "PIECE_BYTES", 16)
    monkeypatch.setattr(joint_engine, "BUCKET_BYTES", 1)
    giver, taker = Engine(), Engine()
    asyncio.run(taker.take_weights(giver.read_weights, "7"))
    names = [["embedding"], ["projection", "projection_scale"], ["norm"]]
    assert taker.told == ["begin", *([one, one] for one in names), "7"]


def test_small_parameters_are_read_together() -> None:
    giver = Engine()
    bucket = asyncio.run(giver.read_weights(0))
    assert [[one.name for one in rank] for rank in bucket.by_rank] == [list(PARAMETERS)] * 2
    assert (bucket.next_index, bucket.num_bytes, giver.num_reads) == (None, 2 * (40 + 6 + 4 + 6), 2)


@pytest.mark.parametrize(
    ("piece_bytes", "most_together", "num_staged"),
    [(64, (1, 1), 1), (64, (3, 2), 0), (16, (1, 1), 0)],
    ids=["between buckets", "between parameters", "within a parameter"],
)
def test_weights_that_change_meanwhile_are_not_taken(
    monkeypatch: pytest.MonkeyPatch, piece_bytes: int, most_together: tuple[int, int], num_staged: int
) -> None:
    monkeypatch.setattr(joint_engine, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(joint_engine, "BUCKET_BYTES", 1)
    giver, taker = Engine(), Engine()
    giver.changes, giver.most_together = True, most_together
    with pytest.raises(RequestRejected, match="changed while they were read"):
        asyncio.run(taker.take_weights(giver.read_weights, "7"))
    assert (taker.told[0], len(taker.told), taker.told[-1]) == ("begin", 2 + num_staged, "abort")


class FarNode:
    """An actor in this process. `lent`: to which ranks it has lent what."""

    def __init__(self, fault: Exception | None = None) -> None:
        lender = NodeLender()
        self.lent: list[list[int]] = []
        self.lend, self.take_back = SimpleNamespace(remote=self._lend), SimpleNamespace(remote=self._back)
        self._lender, self._fault = lender, fault

    def _lend(self, loan: str, tensors: Any, takers: list[int]) -> Any:
        def lend() -> list[bytes]:
            if self._fault is not None:
                raise self._fault
            self.lent.append(takers)
            return self._lender.lend(loan, tensors, takers)

        return lend

    def _back(self, loan: str) -> None:
        self._lender.take_back(loan)
        self.lent.clear()


class TestNodes:
    @pytest.fixture(autouse=True)
    def _no_cluster(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ebbtide.ray.node_loans.ray.get", lambda answer: answer())

    def test_ranks_of_each_node_open_what_their_own_actor_lends(self) -> None:
        """Three replicas of two ranks on two nodes: the second replica lies on both."""
        far = FarNode()
        loans = NodeLoans(NodeLender(), [far], num_ranks=6)
        parts = [[("p", torch.full((3,), float(tp_rank)))] for tp_rank in range(2)]
        with loans.encode_each(parts) as payload:
            assert far.lent == [[1, 0, 1]]
            for rank in range(6):
                place = Place(tp_size=2, dp_size=3, tp_rank=rank % 2, dp_rank=rank // 2)
                source = open_payload(payload.entries, None, place=place)
                assert [whole(tensor).tolist() for _, tensor in source] == [[rank % 2] * 3]
                source.close()
        assert far.lent == []

    def test_one_that_cannot_lend_has_all_take_back(self) -> None:
        willing = FarNode()
        loans = NodeLoans(NodeLender(), [FarNode(RequestRejected("no room")), willing], 3)
        with pytest.raises(RequestRejected, match="no room"):
            loans.encode([("p", torch.ones(1))])
        assert willing.lent == []


class NullJointEngine(JointEngine, NullEngine):
    """One without a model, in real processes."""


def test_outputs_that_move_here_at_once_do_not_displace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_outputs, "MAX_KEPT", 1)
    params = SamplingParams(max_new_tokens=6, sampling_seed=3)
    whole = [NullRunner().token(3, position, 0) for position in range(6)]

    async def go_on(actor: EngineActor, rid: str) -> list[int]:
        chunks = actor.stream(OutputSoFar(rid, [1, 2], whole[:2], params), {"rid": rid})
        return [token for chunk in [one async for one in chunks] for token in chunk["output_ids"]]

    async def go_on_all(actor: EngineActor) -> list[list[int]]:
        return await asyncio.gather(*(go_on(actor, rid) for rid in "abcdef"))

    with NullJointEngine(incremental_streaming_output=True) as engine:
        actor = EngineActor()
        actor._engine = engine
        assert asyncio.run(go_on_all(actor)) == [whole[2:]] * 6
