"""Ebbtide as a rollout engine of verl. Importing verl imports this package by its entry point."""

from __future__ import annotations

from typing import Any

NAME = "ebbtide"


def _load_replica() -> type[Any]:
    from ebbtide_verl.replica import EbbtideReplica

    return EbbtideReplica


def register() -> None:
    """Register this package with verl as `rollout.name=ebbtide`."""
    from verl.workers.rollout import base, replica

    replica.RolloutReplicaRegistry.register(NAME, _load_replica)
    base._ROLLOUT_REGISTRY[NAME, "async"] = "ebbtide_verl.trainer_side.TrainerSide"


register()
