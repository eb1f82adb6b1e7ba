"""A trainer that sends what changed, against real engines: what serves is bit for bit what it holds."""

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.servers import Server, url_of
from fixtures.weight_sending import FakeEngine, Weights, holds, sender_to
from safetensors.torch import save

from ebbtide.srt.errors import RequestRejected
from ebbtide.trainer import WeightSender, WeightSendError

FUSED = "model.layers.0.self_attn.q_proj.weight"


def changed(weights: Weights, share: float, seed: int) -> Weights:
    """The weights after a step that moved this share of their elements."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in weights.items():
        is_moved = torch.rand(tensor.shape, generator=generator) < share
        moved[name] = torch.where(is_moved, tensor + 0.5, tensor)
    return moved


@pytest.mark.parametrize(
    ("kind", "transport"),
    [("divided_engine", "auto"), ("server", "memory"), ("server", "body")],
)
def test_updates_bring_what_changed(
    request: pytest.FixtureRequest, kind: str, transport: Any, old: Weights
) -> None:
    target = request.getfixturevalue(kind)
    where = url_of(target) if isinstance(target, Server) else target
    with WeightSender(where, delta=True, transport=transport, bucket_bytes=64 << 10, retries=0) as sender:
        weights = changed(old, 0.5, seed=0)
        whole = sender.send(weights.items(), version=1)
        assert whole.num_bytes == sum(tensor.nbytes for tensor in weights.values())
        for version in (2, 3):
            weights = changed(weights, 0.02, seed=version)
            # Some tensor always changes as a whole, and is sent whole.
            weights["model.norm.weight"] = weights["model.norm.weight"] + 1
            sent = sender.send(weights.items(), version=version)
            assert sent.num_bytes < 0.04 * whole.num_bytes
            assert holds(target, weights)
        assert sender.send(weights.items(), version=4).num_bytes == 0


def test_what_changed_lies_elsewhere_each_time_and_is_not_kept_mapped() -> None:
    engine, kept = FakeEngine(), []
    update, state = engine.update_weights_from_tensor, {"tags": {"weights": {"content": "valid"}}}

    def note(named_tensors: Any, **fields: Any) -> Any:
        kept.append(fields.get("keep_mapped", False))
        return update(named_tensors, **fields)

    engine.update_weights_from_tensor = note  # type: ignore[method-assign]
    engine.server_info = lambda: {"state": state}  # type: ignore[attr-defined]
    sender, weights = sender_to(engine, delta=True, keep_mapped=True), torch.zeros(64)
    for version in range(2):
        weights[version] = 1
        sender.send([("a", weights)], version)
    assert (engine.updates, kept) == ([["a"], ["codes", "values"]], [True, False])


def test_an_engine_that_serves_something_else_is_sent_everything(
    engine: Any, checkpoint: Path, old: Weights
) -> None:
    with WeightSender(engine, delta=True, retries=0) as sender:
        whole = sender.send(old.items(), version="a")
        engine.update_weights_from_disk(str(checkpoint), weight_version="b")
        assert sender.send(old.items(), version="c").num_bytes == whole.num_bytes
        sender.send(changed(old, 0.01, seed=8).items(), version="c")
        # The version is the same, what serves is not: the checksum tells, and the next update is whole.
        engine.update_weights_from_tensor([(FUSED, old[FUSED] + 1)], flush_cache=False)
        weights = changed(old, 0.01, seed=9)
        with pytest.raises(WeightSendError, match="checksums"):
            sender.send(weights.items(), version="d")
        assert engine.weight_version == "c"
        assert sender.send(weights.items(), version="e").num_bytes == whole.num_bytes
        assert holds(engine, weights)


def test_an_engine_that_another_updates_before_the_session_opens_is_sent_everything(
    engine: Any, checkpoint: Path, old: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = changed(old, 0.01, seed=10)
    with WeightSender(engine, delta=True, retries=0) as sender:
        whole = sender.send(weights.items(), version="mine")
        begin = engine.begin_weight_update

        def begin_late(**fields: Any) -> Any:
            engine.update_weights_from_disk(str(checkpoint), weight_version="another's")
            return begin(**fields)

        monkeypatch.setattr(engine, "begin_weight_update", begin_late)
        # Nothing has changed here: if nothing were sent, the weights of the other would get this version.
        assert sender.send(weights.items(), version="again").num_bytes == whole.num_bytes
        assert holds(engine, weights)


def test_weights_that_a_release_has_lost_are_sent_whole(engine: Any, old: Weights) -> None:
    with WeightSender(engine, delta=True, retries=0) as sender:
        whole = sender.send(old.items(), version="before")
        for version, weights in (("same", old), ("moved", changed(old, 0.01, seed=11))):
            engine.release_memory_occupation(["weights"])
            engine.resume_memory_occupation(["weights"])
            assert sender.send(weights.items(), version=version).num_bytes == whole.num_bytes
            assert holds(engine, weights)


def payload(codes: torch.Tensor, values: torch.Tensor, **others: torch.Tensor) -> list[str]:
    return [base64.b64encode(save({"codes": codes, "values": values, **others})).decode()]


def delta(**fields: Any) -> dict[str, Any]:
    """A request that sets the elements 1 and 2 of a fused parameter to 7."""
    header = {"name": FUSED, "shape": [64, 64], "num_codes": 2, "num_changed": 2, **fields}
    codes, values = torch.tensor([1, 0], dtype=torch.uint8), torch.full((2,), 7.0)
    return {
        "named_tensors": payload(codes, values),
        "load_format": "sparse",
        "changed": [header],
        "base_version": "base",
        "weight_version": "next",
    }


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        (lambda body: body.update(base_version="other"), 409, "'base' serves"),
        (lambda body: body.update(changed=None), 400, "changed: load_format sparse needs it"),
        (lambda body: body["changed"].append(body["changed"][0]), 400, "expected \\[4\\]"),
        (lambda body: body["changed"][0].update(name="model.nowhere"), 400, "no parameter of this name"),
        (lambda body: body["changed"][0].update(shape=[2]), 400, "expected shape"),
        (lambda body: body["changed"][0].update(num_changed=1), 400, "expected \\[1\\]"),
        (lambda body: body["changed"][0].update(checksum="0" * 16), 400, "checksums of 1 tensors"),
        (
            lambda body: body.update(
                named_tensors=payload(torch.zeros(2, dtype=torch.uint8), torch.zeros(2, dtype=torch.float16))
            ),
            400,
            "the parameter's own torch.float32",
        ),
        (
            lambda body: body.update(named_tensors=payload(torch.zeros(2), torch.zeros(2))),
            400,
            "codes: expected",
        ),
        (
            lambda body: body.update(
                named_tensors=payload(torch.tensor([255, 1], dtype=torch.uint8), torch.zeros(2))
            ),
            400,
            "its codes are 1 positions, its values 2",
        ),
        (
            lambda body: body.update(
                named_tensors=payload(
                    torch.tensor([0] + [255] * 99 + [0], dtype=torch.uint8), torch.zeros(2)
                ),
                changed=[{**body["changed"][0], "num_codes": 101}],
            ),
            400,
            "of a tensor of 4096 elements",
        ),
        (
            lambda body: body.update(
                named_tensors=payload(torch.zeros(2, dtype=torch.uint8), torch.zeros(2), more=torch.zeros(1))
            ),
            400,
            "expected the tensors codes and values",
        ),
    ],
)
def test_a_delta_that_cannot_be_changes_nothing(
    engine: Any,
    checkpoint: Path,
    old: Weights,
    change: Callable[[dict[str, Any]], None],
    status: int,
    message: str,
) -> None:
    engine.update_weights_from_disk(str(checkpoint), weight_version="base")
    body = delta(shape=list(old[FUSED].shape))
    change(body)
    with pytest.raises(RequestRejected, match=message) as refused:
        engine.update_weights_from_tensor(**body)
    assert refused.value.status == status
    assert holds(engine, old)
    assert engine.weight_version == "base"


def test_deltas_of_one_session_are_of_each_other(engine: Any, checkpoint: Path, old: Weights) -> None:
    engine.update_weights_from_disk(str(checkpoint), weight_version="base")
    expected = old[FUSED] + 1
    engine.begin_weight_update()
    engine.update_weights_from_tensor([(FUSED, expected)], weight_version="next")
    for base_version, value in (("next", 7.0), ("next", 8.0)):
        body = delta(shape=list(expected.shape))
        body["named_tensors"] = payload(torch.tensor([1, 0], dtype=torch.uint8), torch.full((2,), value))
        reply = engine.update_weights_from_tensor(**{**body, "base_version": base_version})
        assert reply["base_checked"] is True
    assert engine.update_weights_from_tensor(**{**body, "base_version": None})["base_checked"] is False
    assert holds(engine, old)
    # A repeat after a lost answer, of what the session has moved past.
    with pytest.raises(
        RequestRejected, match=r"of version 'base', and the session has come to 'next'"
    ) as late:
        engine.update_weights_from_tensor(**delta(shape=list(expected.shape)))
    assert late.value.status == 409
    engine.end_weight_update(allow_incomplete=True)
    expected.view(-1)[1:3] = 8.0
    assert holds(engine, {**old, FUSED: expected})
    assert engine.weight_version == "next"


def test_stale_weights_are_sent_whole_first(engine: Any, checkpoint: Path, old: Weights) -> None:
    engine.update_weights_from_disk(str(checkpoint), weight_version="base")
    engine.release_memory_occupation(["weights"])
    engine.resume_memory_occupation(["weights"])
    body = delta(shape=list(old[FUSED].shape))
    with pytest.raises(RequestRejected, match="stale"):
        engine.update_weights_from_tensor(**body)
    engine.update_weights_from_disk(str(checkpoint))
    assert engine.update_weights_from_tensor(**body)["weight_version"] == "next"
    expected = old[FUSED].clone()
    expected.view(-1)[1:3] = 7.0
    assert holds(engine, {**old, FUSED: expected})
