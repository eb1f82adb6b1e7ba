"""Weights of 8 bits: quantised where they land, or as they come; held against a reference in plain torch."""

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import checksum_of, edit_config, make_checkpoint
from fixtures.eight_bits import (
    COMPRESSED_TENSORS,
    HYBRID_SHAPE,
    LATENT_SHAPE,
    MOE_SHAPE,
    PROJECTIONS,
    SHAPE,
    STATE_SHAPE,
    SUFFIXES,
    in_eight_bits,
    is_quantized,
    quantized,
    restored,
    rewrite_in_eight_bits,
)
from fixtures.model_runs import RunnerDriver
from fixtures.real_rank import RealRank
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from ebbtide.formats import ChangedTensor
from ebbtide.formats.delta import encode_positions
from ebbtide.srt.distributed.parallel_group import ParallelGroup
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.layers.fp8 import FP8, SCALE_LAYOUTS, quantize_into
from ebbtide.srt.managers.io_struct import (
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    GetWeightsByNameReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromDistributedReqInput,
    UpdateWeightsFromTensorReqInput,
)
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor.batch_plan import LogprobSpec
from ebbtide.srt.model_executor.weight_store import WeightStore
from ebbtide.srt.models.quantizing import Quantization
from ebbtide.srt.models.registry import build_model
from ebbtide.srt.slices import finish
from ebbtide.srt.weight_sync.custom_loader import StagedModel
from ebbtide.srt.weight_sync.distributed_source import Memberships
from ebbtide.trainer.payload_encoding import serialize

ARCHITECTURE = "Qwen3MoeForCausalLM"
DOWN, EMBED = "model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight"
OUTPUT = "model.layers.1.self_attn.o_proj.weight"
EXPERT_DOWN = "model.layers.0.mlp.experts.2.down_proj.weight"
K = "model.layers.0.self_attn.k_proj.weight"
SCALES = DOWN + "_scale_inv"
# Experts behind attention to keys and values, and to latents, and behind linear attention.
WITH_EXPERTS = [
    (ARCHITECTURE, MOE_SHAPE),
    ("DeepseekV3ForCausalLM", LATENT_SHAPE),
    ("Qwen3_5MoeForCausalLM", STATE_SHAPE),
]
BY_BLOCK_AND_ROW = pytest.mark.parametrize("quantization", ["fp8", "w8a8_fp8"])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("a"), ARCHITECTURE, seed=1, dtype="bfloat16", **MOE_SHAPE)


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Other weights of the same shapes."""
    folder = make_checkpoint(
        tmp_path_factory.mktemp("b"), ARCHITECTURE, seed=2, dtype="bfloat16", **MOE_SHAPE
    )
    return load_file(folder / "model.safetensors")


def expected(tensors: dict[str, Tensor], quantization: str = "fp8") -> dict[str, Tensor]:
    """What the engine says that it holds of them."""
    return {
        name: restored(*quantized(tensor, quantization)) if is_quantized(name) else tensor.float()
        for name, tensor in tensors.items()
    }


def assert_same(held: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    assert held.keys() == tensors.keys()
    assert [name for name, tensor in tensors.items() if not torch.equal(held[name], tensor)] == []


def update(tensors: dict[str, Tensor], **fields: Any) -> UpdateWeightsFromTensorReqInput:
    return UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[save(tensors)], load_format="safetensors", **fields
    )


@BY_BLOCK_AND_ROW
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_weights_are_quantised_as_the_reference_does_it(dtype: torch.dtype, quantization: str) -> None:
    layout = SCALE_LAYOUTS[quantization]
    weight = (torch.randn(256, 384) * torch.logspace(-6, 2, 384)).to(dtype)
    weight[:128, :128] = 0
    weight[5] = 0
    values, scales = torch.empty(256, 384, dtype=FP8), torch.empty(layout.shape(256, 384))
    quantize_into(values, scales, weight, layout)

    expected_values, expected_scales = quantized(weight, quantization)
    assert torch.equal(values.view(torch.uint8), expected_values.view(torch.uint8))
    assert torch.equal(scales, expected_scales)
    weight[5, 5] = float("nan")
    quantize_into(values, scales, weight, layout)
    assert scales.isnan().nonzero().tolist() == [[0 if quantization == "fp8" else 5, 0]]


@pytest.mark.parametrize(("architecture", "shape"), [*WITH_EXPERTS, ("NemotronHForCausalLM", HYBRID_SHAPE)])
@BY_BLOCK_AND_ROW
def test_outputs_are_to_the_bit_those_of_weights_that_plain_torch_has_rounded(
    quantization: str, architecture: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path / "plain", architecture, **shape)
    rounded = make_checkpoint(tmp_path / "rounded", architecture, **shape)
    file = rounded / "model.safetensors"
    save_file(expected(load_file(file), quantization), file, metadata={"format": "pt"})
    found = []
    # A GPU multiplies weights of 8 bits by kernels of its own.
    for path, fields in ((folder, {"quantization": quantization}), (rounded, {})):
        driver = RunnerDriver(path, device="cpu", **fields)
        runs = [driver.start([seed, *range(20)], logprobs=LogprobSpec()) for seed in (3, 5)]
        driver.generate(runs, 5)
        found.append([(run.output_ids, run.logprobs) for run in runs])
    assert found[0] == found[1]


@pytest.mark.parametrize(("architecture", "shape"), WITH_EXPERTS)
@BY_BLOCK_AND_ROW
def test_a_checkpoint_in_8_bits_is_what_the_engine_makes_of_its_weights(
    quantization: str, architecture: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path / "plain", architecture, seed=1, dtype="bfloat16", **shape)
    plain = RealRank(path, quantization=quantization)
    tensors = load_file(path / "model.safetensors")
    assert_same(plain.values, expected(tensors, quantization))
    assert plain.store.num_bytes < 0.6 * sum(tensor.nbytes for tensor in tensors.values())
    assert not any(plain.store.precision_of(name) for name in tensors if name.endswith(".mlp.gate.weight"))

    folder = make_checkpoint(tmp_path / "in-8-bits", architecture, seed=1, dtype="bfloat16", **shape)
    as_it_is = RealRank(rewrite_in_eight_bits(folder, quantization))
    assert checksum_of(as_it_is.store) == checksum_of(plain.store)
    # A name of the scales says what is stored; get_weights_by_name multiplies it out.
    scales = quantized(tensors[OUTPUT], quantization)[1]
    assert torch.equal(as_it_is.store.read(OUTPUT + SUFFIXES[quantization], 1000)(), scales)
    reply = plain.apply(GetWeightsByNameReqInput(name=OUTPUT, truncate_size=2))
    assert reply.values == expected({OUTPUT: tensors[OUTPUT]}, quantization)[OUTPUT][:2].tolist()
    assert f"float8_e4m3fn, with a scale for each {SCALE_LAYOUTS[quantization]}" in reply.message
    other = next(iter(SUFFIXES.keys() - {quantization}))
    with pytest.raises(ConfigurationError, match=f"are {quantization} already"):
        RealRank(folder, quantization=other)


@pytest.mark.parametrize(
    ("how", "quantization", "staging", "architecture", "shape"),
    [
        *(("disk", "fp8", "always", *each) for each in WITH_EXPERTS),
        *(("pairs", "w8a8_fp8", "never", *each) for each in WITH_EXPERTS),
        ("tensors", "fp8", "never", *WITH_EXPERTS[0]),
        ("tensors", "w8a8_fp8", "always", *WITH_EXPERTS[1]),
        ("pairs", "fp8", "always", *WITH_EXPERTS[1]),
        ("session", "fp8", "never", *WITH_EXPERTS[0]),
    ],
)
def test_updates_are_quantised_where_they_land(
    how: str, quantization: str, staging: str, architecture: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    path, folder = (
        make_checkpoint(tmp_path / str(seed), architecture, seed=seed, dtype="bfloat16", **shape)
        for seed in (1, 2)
    )
    new = load_file(folder / "model.safetensors")
    rank = RealRank(path, quantization=quantization, update_staging=staging)
    match how:
        case "disk":
            reply = rank.apply(UpdateWeightFromDiskReqInput(model_path=str(folder)))
        case "tensors":
            reply = rank.apply(update(new))
        case "pairs":
            reply = rank.apply(update(in_eight_bits(new, quantization)))
        case "session":
            rank.apply(BeginWeightUpdateReqInput())
            for some in (dict(list(new.items())[:9]), dict(list(new.items())[9:])):
                assert rank.apply(update(some)).success
            reply = rank.apply(EndWeightUpdateReqInput())
    assert reply.success, reply.message
    assert reply.staged is (staging == "always")
    assert_same(rank.values, expected(new, quantization))


def _with(name: str, value: float) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change(pairs: dict[str, Tensor]) -> dict[str, Tensor]:
        scales = pairs[name].clone()
        scales[0, 1] = value
        return pairs | {name: scales}

    return change


BAD: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "no scales": (lambda pairs: {DOWN: pairs[DOWN]}, rf"expected with them {SCALES}. In a session"),
    "no values": (lambda pairs: {SCALES: pairs[SCALES]}, rf"expected with them {DOWN}. In a session"),
    "scales of bf16": (lambda pairs: {DOWN: pairs[DOWN].bfloat16(), SCALES: pairs[SCALES]}, "bfloat16"),
    "zero": (_with(SCALES, 0.0), "finite and above zero"),
    "negative": (_with(SCALES, -1.0), "finite and above zero"),
    "NaN": (_with(SCALES, float("nan")), "finite and above zero"),
    "zero in float32": (lambda pairs: pairs | {SCALES: pairs[SCALES].double() / 1e300}, "finite and above"),
    "infinite in float32": (
        lambda pairs: pairs | {SCALES: pairs[SCALES].double() * 1e300},
        "finite and above",
    ),
    "blocks of 64": (
        lambda pairs: pairs | {SCALES: torch.ones(2, 4)},
        r"expected shape \[1, 2\], got \[2, 4\]",
    ),
    "scales of 8 bits": (
        lambda pairs: pairs | {SCALES: pairs[SCALES].to(FP8)},
        r"float32 or .* got \S*e4m3fn$",
    ),
    "values of e5m2": (
        lambda pairs: pairs | {DOWN: pairs[DOWN].to(torch.float8_e5m2)},
        r"expected \S*e4m3fn or .* got \S*e5m2",
    ),
    "values as bytes": (
        lambda pairs: pairs | {DOWN: pairs[DOWN].view(torch.uint8)},
        r"expected \S*e4m3fn or .* got \S*uint8",
    ),
    "scales of activations": (
        lambda pairs: pairs | {DOWN.replace("weight", "input_scale"): torch.ones(())},
        "activations are quantised as they come",
    ),
    "an embedding": (lambda pairs: {EMBED: pairs[EMBED].to(FP8)}, "not kept in 8 bits here"),
}


@pytest.mark.parametrize("first", [DOWN, SCALES])
@pytest.mark.parametrize("staging", ["always", "never"])
def test_a_pair_may_be_split_over_two_updates_of_a_session(
    first: str, staging: str, path: Path, new: dict[str, Tensor]
) -> None:
    rank = RealRank(path, quantization="fp8", update_staging=staging)
    before, pairs = rank.values, in_eight_bits(new)
    second = SCALES if first == DOWN else DOWN

    def send(*names: str) -> None:
        assert rank.apply(update({name: pairs[name] for name in names})).success

    rank.apply(BeginWeightUpdateReqInput())
    send(first, K, K + "_scale_inv")
    refused = rank.apply(EndWeightUpdateReqInput())
    assert not refused.success
    assert second in refused.message
    # A half that comes again is another one: its fellow has to come again too.
    for names in ((second,), (first,)):
        send(*names)
    assert not rank.apply(EndWeightUpdateReqInput()).success
    send(second)
    assert rank.apply(EndWeightUpdateReqInput()).success
    assert_same(
        rank.values, before | {name: restored(pairs[name], pairs[name + "_scale_inv"]) for name in (DOWN, K)}
    )

    # What is left of a pair is not served; weights that come whole take its place.
    rank.apply(BeginWeightUpdateReqInput())
    rank.apply(update({first: in_eight_bits(before)[first] if first == DOWN else pairs[SCALES] * 2}))
    if staging == "always":
        held = rank.values
        assert rank.apply(EndWeightUpdateReqInput(allow_incomplete=True)).success
        assert_same(rank.values, held)
    else:
        assert rank.apply(update({DOWN: new[DOWN]})).success
        assert rank.apply(EndWeightUpdateReqInput()).success
        assert_same(rank.values, before | expected({DOWN: new[DOWN], K: new[K]}))


@pytest.fixture(scope="module", params=["always", "never"])
def unchanged(request: pytest.FixtureRequest, path: Path) -> RealRank:
    """A rank that refuses whatever it is sent."""
    return RealRank(path, quantization="fp8", update_staging=request.param)


@pytest.mark.parametrize("what", BAD)
def test_bad_pairs_are_refused_and_change_nothing(
    what: str, unchanged: RealRank, new: dict[str, Tensor]
) -> None:
    make, reason = BAD[what]
    before = checksum_of(unchanged.store)
    reply = unchanged.apply(update(make(in_eight_bits(new))))
    assert not reply.success
    assert re.search(reason, reply.message), reply.message
    assert checksum_of(unchanged.store) == before


@pytest.mark.parametrize(
    ("kept", "sent", "reason"),
    [
        (None, "fp8", r"not kept in 8 bits here \(--quantization"),
        (None, "w8a8_fp8", r"not kept in 8 bits here \(--quantization"),
        ("w8a8_fp8", "fp8", r"a scale for each row here: \S+.weight_scale, float32 of shape \[\d+, 1\]"),
        ("fp8", "w8a8_fp8", r"block of 128 x 128 here: \S+.weight_scale_inv, float32 of shape \[\d, \d\]"),
    ],
)
def test_8_bits_are_refused_where_weights_are_kept_otherwise(
    kept: str | None, sent: str, reason: str, path: Path, new: dict[str, Tensor]
) -> None:
    rank = RealRank(path, quantization=kept)
    before = checksum_of(rank.store)
    reply = rank.apply(update(in_eight_bits(new, sent)))
    assert not reply.success
    assert re.search(reason, reply.message), reply.message
    assert checksum_of(rank.store) == before


class Group:
    """One in which a trainer has broadcast these tensors already."""

    device = torch.device("cpu")
    is_done = True

    def __init__(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors

    def receive(self, *_: object) -> "Group":
        return self

    def result(self) -> list[Tensor]:
        return self._tensors


@pytest.mark.parametrize("staging", ["always", "never"])
def test_scales_that_are_broadcast_are_looked_at_too(
    staging: str, path: Path, new: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = RealRank(path, quantization="fp8", update_staging=staging)
    before, pairs = checksum_of(rank.store), in_eight_bits(new)
    sent = {name: pairs[name] for name in (DOWN, SCALES)}

    def broadcast(scales: Tensor) -> Any:
        monkeypatch.setattr(Memberships, "get", lambda *_: Group([sent[DOWN], scales]))
        dtypes, shapes = ["float8_e4m3fn", "float32"], [list(tensor.shape) for tensor in sent.values()]
        return rank.apply(
            UpdateWeightsFromDistributedReqInput(names=list(sent), dtypes=dtypes, shapes=shapes)
        )

    for bad in (sent[SCALES] * 0, sent[SCALES] * torch.nan):
        assert "scales are finite and above zero" in broadcast(bad).message
        assert checksum_of(rank.store) == before
    assert broadcast(sent[SCALES]).success
    assert torch.equal(rank.store.read(DOWN, 1 << 30)(), restored(*sent.values()))


def test_one_weight_in_two_types_is_refused(path: Path, new: dict[str, Tensor]) -> None:
    """Scales would be those of one, and values those of the other."""
    rank = RealRank(path, quantization="fp8")
    before, pairs = checksum_of(rank.store), in_eight_bits(new)
    twice = [(SCALES, pairs[SCALES]), (DOWN, new[DOWN] * 3), (DOWN, pairs[DOWN])]
    request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=[serialize(twice)])
    assert "expected it once, got it in torch.bfloat16 and in" in rank.apply(request).message
    assert checksum_of(rank.store) == before


def test_a_delta_of_values_or_scales_is_refused(path: Path) -> None:
    rank = RealRank(path, quantization="fp8")
    before = checksum_of(rank.store)

    def change(name: str, dtype: torch.dtype) -> Any:
        codes, [num_codes] = encode_positions([torch.tensor([1])])
        shape = rank.store.shape(name)
        one = ChangedTensor(name=name, shape=shape, num_codes=num_codes, num_changed=1)
        payload = save({"codes": codes, "values": torch.ones(1).to(dtype)})
        return rank.apply(
            UpdateWeightsFromTensorReqInput(
                serialized_named_tensors=[payload], load_format="sparse", changed=[one]
            )
        )

    for name, dtype in ((DOWN, FP8), (DOWN, torch.bfloat16), (SCALES, torch.float32)):
        assert "kept in 8 bits here, as values and scales that come" in change(name, dtype).message
    assert checksum_of(rank.store) == before
    assert change("model.norm.weight", torch.bfloat16).success


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        (None, "expected its scales with it"),
        (torch.zeros(1, 2), "finite and above zero"),
        (torch.ones(2, 2), "expected shape"),
    ],
)
def test_a_bad_checkpoint_is_refused(scales: Tensor | None, reason: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, ARCHITECTURE, dtype="bfloat16", **MOE_SHAPE)
    rewrite_in_eight_bits(folder, **{SCALES: scales})
    with pytest.raises(ConfigurationError, match=reason):
        RealRank(folder)


def test_other_quantisations_and_sizes_are_refused_and_modules_excluded(path: Path, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, ARCHITECTURE, dtype="bfloat16")
    with pytest.raises(ConfigurationError, match=r"o_proj.weight .* cannot be cut into blocks"):
        RealRank(folder, quantization="fp8", quantization_exclude=["q_proj", "k_proj", "v_proj"])
    with pytest.raises(ConfigurationError, match=r"q_proj.weight are one weight with .*k_proj"):
        RealRank(path, quantization="fp8", quantization_exclude=["model.layers.0.self_attn.q_proj"])
    with pytest.raises(ConfigurationError, match=r"experts.1.* are one weight with"):
        RealRank(path, quantization="w8a8_fp8", quantization_exclude=["experts.1"])
    hybrid = make_checkpoint(tmp_path / "nemotron", "NemotronHForCausalLM")
    with pytest.raises(ConfigurationError, match=r"without gates keep their dtype, or take w8a8_fp8: name"):
        RealRank(hybrid, quantization="fp8")
    biased = make_checkpoint(tmp_path / "gpt-oss", "GptOssForCausalLM", **SHAPE)
    with pytest.raises(
        ConfigurationError, match=r"biases keep .*: name them .* as model.layers.0.mlp.experts"
    ):
        RealRank(biased, quantization="fp8")
    rank = RealRank(biased, quantization="fp8", quantization_exclude=["experts", "sinks", "router"])
    assert {name.split(".")[-2] for name in rank.store.names if rank.store.precision_of(name)} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    edit_config(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(ConfigurationError, match=r"quantization_config: expected .*'fp8'.* got .*'awq'"):
        RealRank(folder)
    edit_config(folder, quantization_config={**COMPRESSED_TENSORS, "config_groups": {}})
    with pytest.raises(ConfigurationError, match=r"expected one group of compressed-tensors, .*, got \[\]"):
        RealRank(folder)
    edit_config(folder, quantization_config={**COMPRESSED_TENSORS, "ignore": ["re:*head"]})
    with pytest.raises(ConfigurationError, match=r"ignore: expected names .* got 're:\*head': nothing"):
        RealRank(folder)
    plain = r"re:.*layers\.\d\.(self_attn|mlp\.experts)"
    edit_config(folder, quantization_config={**COMPRESSED_TENSORS, "ignore": ["lm_head", plain]})
    store = RealRank(folder).store
    assert not any(map(store.precision_of, store.names))
    assert not Quantization((plain,)).excludes("model.layers.0.mlp.gate_proj")
    rank = RealRank(path, quantization="fp8", quantization_exclude=["o_proj", "model.layers.1.*"])
    kept = {name for name in rank.store.names if rank.store.precision_of(name)}
    assert {name.split(".")[-2] for name in kept} == set(PROJECTIONS) - {"o_proj"}
    assert all(name.startswith("model.layers.0.") for name in kept)


class Half(ParallelGroup):
    """One of two ranks that do not talk to each other."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank


@BY_BLOCK_AND_ROW
def test_ranks_hold_their_parts_of_values_and_scales(
    quantization: str, path: Path, new: dict[str, Tensor]
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    pairs = in_eight_bits(new, quantization)
    terms = Quantization(layout=SCALE_LAYOUTS[quantization])
    for rank in range(2):
        model = build_model(ARCHITECTURE, config, torch.bfloat16, torch.device("cpu"))
        saver = VirtualMemorySaver(HostVirtualMemory())
        store = WeightStore(model, saver, group=Half(rank), quantization=terms)
        held = {}
        for sent in (new, pairs):
            for name, tensor in sent.items():
                store.write(name, tensor, None)
            held[len(sent)] = checksum_of(store)
        assert len(set(held.values())) == 1, "values and scales that are sent are those that are made"
        columns = slice(128 * rank, 128 * (rank + 1))
        for name in (DOWN, EXPERT_DOWN):
            down = store.destination(name, None)
            assert down is not None
            assert down.scales is not None
            assert torch.equal(down.region.float(), pairs[name].float()[:, columns])
            # Of rows that ranks divide everyone has the same scales.
            scales = pairs[name + SUFFIXES[quantization]]
            part = scales if quantization == "w8a8_fp8" else scales[:, rank : rank + 1]
            assert torch.equal(down.scales, part)
        store.arena.close()


def test_sizes_that_ranks_cannot_share_by_blocks_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    folder = make_checkpoint(tmp_path, ARCHITECTURE, **{**MOE_SHAPE, "intermediate_size": 128})
    config = AutoConfig.from_pretrained(folder)
    model = build_model(ARCHITECTURE, config, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigurationError, match="choose another tp_size"):
        WeightStore(
            model, VirtualMemorySaver(HostVirtualMemory()), group=Half(0), quantization=Quantization()
        )


def test_a_loader_of_ones_own_brings_values_with_their_scales(path: Path, new: dict[str, Tensor]) -> None:
    store = RealRank(path, quantization="fp8").store
    pairs = in_eight_bits(new)
    with closing(finish(store.arena.stage())) as shadow:
        model = StagedModel(store, shadow)
        assert model.load_weights(new.items()) == new.keys()
        assert model.load_weights(pairs.items()) == pairs.keys()
        with pytest.raises(ValueError, match="expected its scales with it"):
            model.load_weights([(DOWN, pairs[DOWN])])
        with pytest.raises(ValueError, match="finite and above zero"):
            model.load_weights([(SCALES, -pairs[SCALES])])
