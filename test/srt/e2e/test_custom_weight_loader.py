"""A function of the operator's that writes updates, on several ranks."""

from pathlib import Path

import pytest
import torch
from fixtures.gpu_device import DEVICE
from fixtures.references import Reference

from ebbtide import Engine
from ebbtide.srt.errors import EngineError
from ebbtide.trainer.payload_encoding import serialize

COPY_OWN, HANG = (f"fixtures.weight_loaders.{name}" for name in ("copy_own", "hang_where_told"))
DOWN = "model.layers.0.mlp.down_proj.weight"


def test_a_rank_is_given_its_own_entry_and_one_that_never_returns_ends_the_engine(
    checkpoint_a: Path, reference_a: Reference, capfd: pytest.CaptureFixture[str]
) -> None:
    weights = reference_a.weights()
    whole = -weights[DOWN]
    with Engine(
        model_path=str(checkpoint_a),
        max_total_tokens=4096,
        tp_size=1 if DEVICE.is_cuda else 2,
        skip_tokenizer_init=True,
        custom_weight_loader=[COPY_OWN, HANG],
        watchdog_timeout=8.0,
        **DEVICE.server_args,
    ) as engine:
        last = engine.server_info()["tp_size"] - 1
        parts = torch.chunk(whole, last + 1, dim=1)
        entries = [serialize([(DOWN, part.contiguous())]) for part in parts]
        engine.update_weights_from_tensor(entries, COPY_OWN, weight_version="own")
        for name, tensor in {**weights, DOWN: whole}.items():
            assert engine.get_weights_by_name(name, 10**6) == tensor.tolist(), name
        assert engine.weight_version == "own"

        entries = [serialize([("hangs", torch.tensor(rank == last))]) for rank in range(last + 1)]
        with pytest.raises(EngineError, match=r"process ended.*has not ended within 8 s"):
            engine.update_weights_from_tensor(entries, HANG)
    stacks = capfd.readouterr().err
    assert "in hang_where_told" in stacks
    assert stacks.count("Current thread") == last + 1
