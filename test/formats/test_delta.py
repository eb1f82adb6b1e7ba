"""How positions are coded."""

import pytest
import torch

from ebbtide.formats.delta import decode_positions, encode_positions


@pytest.mark.parametrize(
    ("share", "bytes_each"), [(0.0, None), (0.001, 2.1), (0.01, 1.15), (0.1, 1.0), (1.0, 1.0)]
)
def test_a_position_takes_about_a_byte(share: float, bytes_each: float | None) -> None:
    torch.manual_seed(0)
    positions = [(torch.rand(count) < share).nonzero()[:, 0] for count in (5, 1_000_000, 0, 70_000)]
    codes, counts = encode_positions(positions)
    decoded = [decode_positions(part) for part in torch.split(codes, counts)]
    assert all(torch.equal(one, other) for one, other in zip(positions, decoded, strict=True))
    if bytes_each is not None:
        assert codes.nbytes <= bytes_each * sum(map(len, positions))
