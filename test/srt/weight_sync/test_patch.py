"""Changes of some elements: written into fused and sharded parameters, and summed up."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from transformers import AutoConfig

from ebbtide.formats.delta import bits_of, encode_positions, state_sum
from ebbtide.srt.errors import RequestRejected
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.loader import load_weights
from ebbtide.srt.model_executor.weight_copies import Destination
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.models.sharding import Part
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.patch import MatrixPart, MatrixParts, Patch, PatchedWeights, PatchKind

Tensors = list[torch.Tensor]


def positions_of(num_elements: int, share: float) -> torch.Tensor:
    return (torch.rand(num_elements) < share).nonzero()[:, 0]


class Parameters:
    """Two fused tensors, of one of which this rank has rows and of the other columns, and a bias in part."""

    shapes = ((40, 100), (40, 200), (80,))

    def __init__(self, dtype: torch.dtype) -> None:
        self.arena = torch.zeros(6000 + 50, dtype=dtype)
        fused, bias = self.arena[:6000].view(60, 100), self.arena[6000:]
        self.destinations = [
            Destination(fused.narrow(0, 0, 20), Part(0, ((10, 20),), is_first=True)),
            Destination(fused.narrow(0, 20, 40), Part(1, ((100, 100),), is_first=True)),
            Destination(bias, Part(0, ((30, 50),), is_first=True)),
        ]
        self.places = [
            MatrixPart.of(place, shape) for place, shape in zip(self.destinations, self.shapes, strict=True)
        ]

    def hold(self, wholes: Tensors) -> bool:
        pairs = zip(self.destinations, wholes, strict=True)
        return all(torch.equal(bits_of(place.region), bits_of(place.part_of(one))) for place, one in pairs)

    def take(self, wholes: Tensors) -> None:
        for place, whole in zip(self.destinations, wholes, strict=True):
            place.region.copy_(place.part_of(whole))


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 0.3), (torch.float32, 0.001)])
def test_changes_are_those_of_the_whole_tensors_by_kernel_and_without(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    parameters = Parameters(dtype)
    before = [torch.randn(shape).to(dtype) for shape in parameters.shapes]
    positions = [positions_of(one.numel(), share) for one in before]
    values = [torch.randn(len(one)).to(dtype) for one in positions]
    after = [one.clone() for one in before]
    for whole, where, value in zip(after, positions, values, strict=True):
        whole.view(-1)[where] = value
    patches = [Patch("w", *each).checked() for each in zip(parameters.shapes, positions, values, strict=True)]
    others = Parameters(dtype)
    others.take(after)
    expected = [int(state_sum(p.region, p.first_row, p.first_column)) for p in others.places]

    parameters.take(before)
    for place, patch in zip(parameters.places, patches, strict=True):
        place.apply(patch)
    assert parameters.hold(after)

    kernels = pytest.importorskip("ebbtide.srt.weight_sync.patch_kernels", exc_type=ImportError)
    parameters.take(before)
    codes, counts = encode_positions(positions)
    blocks = kernels.coded_blocks(codes, counts)
    assert blocks.num_values == list(map(len, positions))
    assert blocks.lasts == [int(one[-1]) if len(one) else -1 for one in positions]
    base = bits_of(parameters.arena)
    kernels.compile_deltas(base.device, dtype)
    rows = [place.numbers(base) for place in parameters.places]
    table = MatrixParts.of(rows, base.device)
    placed = kernels.PlacedBlocks(blocks, torch.cat(values), table, base)
    known = [int(state_sum(p.region, p.first_row, p.first_column)) for p in parameters.places]
    monkeypatch.setattr(kernels, "BLOCKS_AT_ONCE", 2)
    for told in ([None] * 3, known, [known[0], None, known[2]]):
        assert finish(placed.sums_after(told)).tolist() == expected
        pairs = zip(parameters.places, patches, told, strict=True)
        assert [int(place.sum_after(patch, one)) for place, patch, one in pairs] == expected
    assert parameters.hold(before)
    assert sum(placed.apply()) == sum(value.nbytes for value in values)
    assert (parameters.hold(after), placed.nonfinite()) == (True, [])
    # What no rank needs is passed over, but for what it holds.
    parameters.take(before)
    values[2][-1:] = float("nan")
    table = MatrixParts.of([rows[0], None, None], base.device)
    placed = kernels.PlacedBlocks(blocks, torch.cat(values), table, base)
    finish(placed.apply())
    assert parameters.hold([after[0], *before[1:]])
    assert placed.nonfinite() == ([2] if len(values[2]) else [])


def test_xor_twice_is_as_it_was() -> None:
    whole = torch.randn(8, 10).bfloat16()
    place = MatrixPart.of(Destination(whole.clone(), None), (8, 10))
    bits = torch.randint(-9999, 9999, (4,), dtype=torch.int16).view(torch.bfloat16)
    patch = Patch("w", (8, 10), torch.tensor([3, 9, 10, 79]), bits, PatchKind.XOR)
    expected = int(place.sum_after(patch))
    place.apply(patch)
    assert not torch.equal(bits_of(place.region), bits_of(whole))
    assert int(state_sum(place.region)) == expected
    place.apply(patch)
    assert torch.equal(bits_of(place.region), bits_of(whole))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0, 4], "position 4 of a tensor of 4"),
        ([-1, 2], "position -1"),
        ([3, 3], "twice"),
        ([1], "1 positions and 2 values"),
    ],
)
def test_positions_that_cannot_be(positions: list[int], message: str) -> None:
    with pytest.raises(RequestRejected, match=message):
        Patch("w", (2, 2), torch.tensor(positions), torch.zeros(2)).checked()


def test_a_store_says_where_its_tensors_lie_in_every_copy(tmp_path: Path) -> None:
    kernels = pytest.importorskip("ebbtide.srt.weight_sync.patch_kernels", exc_type=ImportError)
    path = make_checkpoint(tmp_path / "model", "Qwen3ForCausalLM", seed=1)
    config = AutoConfig.from_pretrained(path)
    model = build_model(config.architectures[0], config, torch.float32, torch.device("cpu"))
    store = WeightStore(model, VirtualMemorySaver(HostVirtualMemory()))
    load_weights(store, path, "auto")
    names = sorted(store.names)
    before = {name: store.destination(name, None).region.clone() for name in names}  # type: ignore[union-attr]
    positions = [positions_of(before[name].numel(), 0.1) for name in names]
    values = [torch.randn(len(one)) for one in positions]
    blocks = kernels.coded_blocks(*encode_positions(positions))
    with closing(finish(store.arena.stage())) as shadow:
        for _ in store.complete(shadow, ()):
            pass
        patched = PatchedWeights(store, shadow)
        table = patched.table(names)
        assert PatchedWeights(store, None, table).table(names) is table
        finish(kernels.PlacedBlocks(blocks, torch.cat(values), table, patched.base(torch.int32)).apply())
        for name, where, value in zip(names, positions, values, strict=True):
            live, staged = store.destination(name, None), store.destination(name, shadow)
            assert live is not None
            assert staged is not None
            assert torch.equal(live.region, before[name])
            before[name].view(-1)[where] = value
            assert torch.equal(staged.region, before[name]), name
    store.arena.close()
