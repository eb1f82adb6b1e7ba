"""Versions of adapters on a real model: every token is what PEFT computes with the version named for it."""

import base64
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.adapters import Adapter, make_adapter
from fixtures.checkpoints import make_checkpoint
from fixtures.full_rank import prompt
from fixtures.real_rank import RealRank
from fixtures.references import Reference
from safetensors.torch import load_file, save_file

from ebbtide.srt.managers.io_struct import (
    AbortReq,
    ContinueGenerationReqInput,
    LoadLoRAAdapterFromTensorsReqInput,
    LoadLoRAAdapterReqInput,
    PauseGenerationReqInput,
    PauseMode,
    Preserve,
    Refusal,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UnloadLoRAAdapterReqInput,
    VersionContract,
)
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.trainer.payload_encoding import PayloadEncoder, serialize

NUM_ADAPTERS = 4
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8, "max_loras_per_batch": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(model, folder / str(seed), seed=seed) for seed in range(NUM_ADAPTERS)]


class AdapterRank(RealRank):
    """A rank of which requests may ask for adapters.

    Attributes:
        references: by the label of a version, what PEFT computes; by "", the base.
    """

    def __init__(self, model: Path, **args: Any) -> None:
        super().__init__(model, max_total_tokens=1024, page_size=8, **{**LORA, **args})
        self.prompts: dict[str, list[int]] = {}
        self.references: dict[str, Reference] = {"": Reference(model)}

    def ask(self, adapter: str | None, prompt_ids: list[int], num_tokens: int = 8, **fields: Any) -> str:
        rid = self.generate(prompt_ids, num_tokens, adapter=adapter, **fields)
        self.prompts[rid] = prompt_ids
        return rid

    def load(self, name: str, adapter: Adapter, **fields: Any) -> Any:
        reply = self.apply(LoadLoRAAdapterReqInput(lora_name=name, lora_path=str(adapter.folder), **fields))
        assert not isinstance(reply, Refusal), reply
        self.references[f"{name}@{reply.lora_version}"] = adapter.reference
        return reply

    def assert_true(self, *rids: str) -> None:
        """Each token is the best, after all before it, of the version that is named for it."""
        for rid in rids or self.outputs:
            asked, prompt_ids = self.outputs[rid], self.prompts[rid]
            if not asked.token_ids:
                continue
            spans = asked.adapter_starts or [("", 0)]
            ends = [start for _, start in spans[1:]] + [len(asked.token_ids)]
            for (label, start), end in zip(spans, ends, strict=True):
                reference = self.references[label]
                rows = reference.logprobs([*prompt_ids, *asked.token_ids])[len(prompt_ids) - 1 :]
                chosen = torch.tensor(asked.token_ids[start:end])
                assert reference.wrong_token(rows[start:end], chosen) is None, (rid, label, start)


def test_what_comes_from_a_folder_and_from_tensors_is_the_same(model: Path, adapters: list[Adapter]) -> None:
    rank = AdapterRank(model)
    folder = rank.load("a", adapters[0], lora_version="1")
    payload = PayloadEncoder(["cpu"], 1).encode(adapters[0].tensors.items())
    with payload:
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name="a",
            lora_version="1",
            config_dict=adapters[0].fields,
            serialized_named_tensors=payload.entries,
            load_format=payload.load_format,
        )
        retried = rank.apply(request)
    assert (retried.changed, retried.checksum) == (False, folder.checksum)
    other = rank.apply(
        LoadLoRAAdapterReqInput(lora_name="a", lora_version="1", lora_path=str(adapters[1].folder))
    )
    assert other.status == 409
    assert folder.checksum in other.message
    rids = [rank.ask("a", prompt(1, 20)), rank.ask(None, prompt(1, 20))]
    rank.run()
    rank.assert_true()
    assert rank.outputs[rids[0]].token_ids != rank.outputs[rids[1]].token_ids


Change = Callable[[dict[str, torch.Tensor]], object]


def _spoil(name: str, value: float) -> Change:
    return lambda tensors: tensors[name][-1].fill_(value)


LORA_A = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
LORA_B = "base_model.model.model.layers.1.self_attn.k_proj.lora_B.weight"
BAD: dict[str, tuple[Change, str]] = {
    "half a pair": (lambda tensors: tensors.pop(LORA_B), "expected lora_B of the module"),
    "NaN in A": (_spoil(LORA_A, float("nan")), f"1 tensors hold NaN or Inf: {LORA_A}"),
    "Inf in B": (_spoil(LORA_B, float("-inf")), f"1 tensors hold NaN or Inf: {LORA_B}"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_adapter_that_does_not_fit_is_refused_and_changes_nothing(
    model: Path, adapters: list[Adapter], tmp_path: Path, what: str
) -> None:
    rank = AdapterRank(model, refuse_nonfinite=True)
    rank.load("a", adapters[0])
    change, expected = BAD[what]
    tensors = load_file(adapters[1].folder / "adapter_model.safetensors")
    change(tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapters[1].fields))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    refusal = rank.apply(LoadLoRAAdapterReqInput(lora_name="a", lora_path=str(tmp_path)))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, expected in refusal.message) == (400, True), refusal.message
    rid = rank.ask("a", prompt(1, 20))
    rank.run()
    assert rank.outputs[rid].adapter_starts == [("a@1", 0)]
    rank.assert_true()


@pytest.mark.parametrize(
    ("files", "status", "expected"),
    [
        ({}, 404, "adapter_config.json"),
        ({"adapter_config.json": b"{"}, 400, "adapter_config.json"),
        ({"adapter_config.json": b"[]"}, 400, "a JSON object"),
        ({"adapter_config.json": b'{"r": 4}'}, 404, "adapter_model.safetensors"),
        ({"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": b"x" * 9}, 400, "safetensors"),
    ],
)
def test_a_folder_that_is_no_adapter_is_refused(
    model: Path, tmp_path: Path, files: dict[str, bytes], status: int, expected: str
) -> None:
    rank = AdapterRank(model)
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    refusal = rank.apply(LoadLoRAAdapterReqInput(lora_name="a", lora_path=str(tmp_path)))
    assert isinstance(refusal, Refusal)
    assert (refusal.status, expected in refusal.message) == (status, True), refusal.message


def test_a_pipe_or_folder_in_the_place_of_a_config_is_neither_waited_for_nor_kept_open(
    model: Path, tmp_path: Path
) -> None:
    pipe = tmp_path / "adapter_config.json"
    os.mkfifo(pipe)
    rank = AdapterRank(model)
    num_open = len(os.listdir("/proc/self/fd"))
    refusals = [rank.apply(LoadLoRAAdapterReqInput(lora_name="a", lora_path=str(tmp_path)))]
    with pipe.open("r+b", buffering=0):  # somebody could write to it, and does not
        refusals.append(rank.apply(LoadLoRAAdapterReqInput(lora_name="a", lora_path=str(tmp_path))))
    pipe.unlink()
    pipe.mkdir()
    refusals.append(rank.apply(LoadLoRAAdapterReqInput(lora_name="a", lora_path=str(tmp_path))))
    assert len(os.listdir("/proc/self/fd")) == num_open
    for refusal in refusals:
        assert isinstance(refusal, Refusal)
        assert (refusal.status, "adapter_config.json" in refusal.message) == (400, True), refusal.message


@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_loads_sleeps_and_aborts_leaves_every_token_true(
    model: Path, adapters: list[Adapter], seed: int
) -> None:
    chance = random.Random(seed)
    rank = AdapterRank(model, enable_weights_cpu_backup=True)
    for _ in range(60):
        name = chance.choice(["a", "b", "c", "d"])
        match chance.randrange(9):
            case 0 | 1:
                rank.load(name, chance.choice(adapters), in_flight=chance.choice(["stay", "recompute"]))
            case 2:
                rank.apply(UnloadLoRAAdapterReqInput(lora_name=name, timeout_s=0))
            case 3:
                tags = tuple(chance.sample(list(MemoryTag), k=chance.randint(1, 3)))
                preserve = chance.choice(list(Preserve))
                rank.apply(ReleaseMemoryOccupationReqInput(tags=tags, preserve=preserve))
                rank.apply(ResumeMemoryOccupationReqInput())
            case 4:
                mode = chance.choice([PauseMode.RETRACT, PauseMode.IN_PLACE])
                rank.apply(PauseGenerationReqInput(mode=mode))
                rank.apply(ContinueGenerationReqInput())
            case 5 if rank.outputs:
                rank.apply(AbortReq(rid=chance.choice(list(rank.outputs))))
            case _:
                contract = VersionContract(on_update=chance.choice(["continue", "recompute"]))
                asked = chance.choice([name, name, None])
                prompt_ids = prompt(chance.randrange(3), chance.choice([9, 30, 40]))
                rank.ask(asked, prompt_ids, chance.randint(1, 20), contract=contract)
        rank.turn(chance.randrange(5))
    rank.run()
    assert all(asked.finish is not None for asked in rank.outputs.values()), "a request was lost"
    assert sum(len(asked.token_ids) for asked in rank.outputs.values()) > 50
    rank.assert_true()


def test_an_engine_of_one_rank_takes_a_single_entry(model: Path, adapters: list[Adapter]) -> None:
    rank = AdapterRank(model)
    fields: dict[str, Any] = {"lora_name": "a", "config_dict": adapters[0].fields}
    with PayloadEncoder(["cpu"], 1).encode(adapters[0].tensors.items()) as payload:
        entry = base64.b64encode(payload.entries[0]).decode()
        request = LoadLoRAAdapterFromTensorsReqInput(
            serialized_tensors=entry, load_format=payload.load_format, **fields
        )
        assert rank.apply(request).changed
    # As SGLang's clients send it: by name, in a pickle.
    pickled = base64.b64encode(serialize(adapters[0].tensors)).decode()
    assert rank.apply(LoadLoRAAdapterFromTensorsReqInput(serialized_tensors=pickled, **fields)).changed
    rid = rank.ask("a@2", prompt(1, 20))
    rank.run()
    rank.references["a@2"] = adapters[0].reference
    rank.assert_true(rid)
    assert "expected tensors, got none" in rank.apply(LoadLoRAAdapterFromTensorsReqInput(**fields)).message
