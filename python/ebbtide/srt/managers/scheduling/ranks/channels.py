"""The channels of one rank: those of a leader, which speaks for its replica, or of a follower."""

from __future__ import annotations

from ebbtide.srt.config import EngineConfig
from ebbtide.srt.managers.io_struct import DetokenizerInput, ManagerInput, SchedulerInput
from ebbtide.srt.managers.scheduling.ranks.lockstep import (
    FollowerInbox,
    Inbox,
    LeaderInbox,
    NoOutputs,
    RankInbox,
    RankMessage,
    Tick,
)
from ebbtide.srt.managers.wire.channel import ChannelAddresses, Receiver, SendEnd, Sender


class LeaderReceiver(Receiver[SchedulerInput | RankMessage]):
    """One queue for what the API process and what the followers send, so that a sleep ends by either."""

    def __init__(self, addresses: ChannelAddresses) -> None:
        super().__init__(addresses.scheduler, SchedulerInput | RankMessage)
        self._socket.bind(addresses.ranks)


def open_rank_channels(
    config: EngineConfig, addresses: ChannelAddresses
) -> tuple[RankInbox, SendEnd[DetokenizerInput]]:
    """The inbox of the rank that `config.parallel` names, and where its outputs go."""
    parallel = config.parallel
    if not parallel.is_leader:
        ticks: Receiver[Tick] = Receiver(addresses.ticks[parallel.tp_rank], Tick)
        leader: Sender[RankMessage] = Sender(addresses.ranks)
        return FollowerInbox(ticks, leader, parallel.tp_rank, parallel.dp_rank), NoOutputs()
    manager: Sender[ManagerInput] = Sender(addresses.manager)
    outputs: Sender[DetokenizerInput] = Sender(
        addresses.manager if config.model.skip_tokenizer_init else addresses.detokenizer
    )
    if parallel.tp_size == 1:
        messages: Receiver[SchedulerInput] = Receiver(addresses.scheduler, SchedulerInput)
        return Inbox(messages, manager, parallel.dp_rank), outputs
    followers: list[Sender[Tick]] = [Sender(address) for address in addresses.ticks[1:]]
    return LeaderInbox(LeaderReceiver(addresses), manager, followers, parallel.dp_rank), outputs
