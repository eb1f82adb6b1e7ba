"""Any order of updates, sessions, releases and refusals, at every precision, on a real model of one rank.

What each tensor should be is kept beside the engine, as plain torch quantises it; and while the weights are
the same, so are answers.
"""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.eight_bits import MOE_SHAPE, SUFFIXES, in_eight_bits, is_quantized, quantized, restored
from fixtures.full_rank import Rank, prompt
from fixtures.fuzz import fuzzed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from safetensors.torch import load_file, save
from torch import Tensor

from ebbtide.srt.managers.io_struct import (
    AbortWeightUpdateReqInput,
    BeginWeightUpdateReqInput,
    EndWeightUpdateReqInput,
    FlushCacheReqInput,
    Preserve,
    ReleaseMemoryOccupationReqInput,
    ResizeMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightsFromTensorReqInput,
)
from ebbtide.srt.memory_saver import MemoryTag

TAGS = st.lists(st.sampled_from([MemoryTag.WEIGHTS, MemoryTag.KV_CACHE]), min_size=1).map(tuple)
PARTS = st.sampled_from([slice(None), slice(0, 9), slice(9, None, 2)])
FORMS = st.sampled_from(["as they are", "float32", "pairs"])
BAD = st.sampled_from(["no scales", "scales that are none", "a cut tensor", "an unknown name"])
DOWN = "model.layers.1.mlp.down_proj.weight"
NUM_VERSIONS = 2


@cache
def home() -> tempfile.TemporaryDirectory[str]:
    """Gone with this process."""
    return tempfile.TemporaryDirectory(prefix="eb-")


@cache
def checkpoint(seed: int) -> Path:
    folder = Path(home().name) / str(seed)
    return make_checkpoint(folder, "Qwen3MoeForCausalLM", seed=seed, dtype="bfloat16", **MOE_SHAPE)


@cache
def tensors(seed: int) -> dict[str, Tensor]:
    return load_file(checkpoint(seed) / "model.safetensors")


class PrecisionMachine(RuleBasedStateMachine):
    """One who drives the engine alone; requests are answered between two rules."""

    @initialize(quantization=st.sampled_from([None, "fp8", "w8a8_fp8"]), is_rounded=st.booleans())
    def start(self, quantization: str | None, is_rounded: bool) -> None:
        self.quantization = quantization
        kv_cache_dtype = "fp8_e4m3" if is_rounded else "auto"
        self.rank = Rank(
            checkpoint(0),
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            update_staging="always",
            enable_weights_cpu_backup=True,
        )
        self.rank.vm.budget_bytes = 1 << 40
        self.held = dict.fromkeys(tensors(0), 0)
        self.answers: dict[tuple[int, ...], list[int]] = {}

    def sent(self, version: int, part: slice, form: str) -> list[dict[str, Tensor]]:
        """What is sent: values and their scales may come apart in a session."""
        chosen = dict(list(tensors(version).items())[part])
        if form == "float32":
            return [{name: tensor.float() for name, tensor in chosen.items()}]
        if form == "pairs" and self.quantization is not None:
            pairs = in_eight_bits(chosen, self.quantization)
            suffix = SUFFIXES[self.quantization]
            return [
                {name: one for name, one in pairs.items() if name.endswith(suffix) is has_scales}
                for has_scales in (True, False)
            ]
        return [chosen]

    def apply(self, request: Any, *, succeeds: bool = True) -> Any:
        reply = self.rank.apply(request)
        assert getattr(reply, "success", True) is succeeds, reply
        return reply

    def send(self, named: dict[str, Tensor], *, succeeds: bool = True) -> None:
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[save(named)], load_format="safetensors"
        )
        self.apply(request, succeeds=succeeds)

    @rule(version=st.integers(0, NUM_VERSIONS - 1), part=PARTS, form=FORMS)
    def update(self, version: int, part: slice, form: str) -> None:
        self.send({name: tensor for some in self.sent(version, part, form) for name, tensor in some.items()})
        self.held |= dict.fromkeys(list(self.held)[part], version)

    @rule(version=st.integers(0, NUM_VERSIONS - 1), part=PARTS, form=FORMS, ends=st.booleans())
    def session(self, version: int, part: slice, form: str, ends: bool) -> None:
        self.apply(BeginWeightUpdateReqInput())
        for some in self.sent(version, part, form):
            self.send(some)
        if ends:
            self.apply(EndWeightUpdateReqInput(allow_incomplete=True))
            self.held |= dict.fromkeys(list(self.held)[part], version)
        else:
            self.apply(AbortWeightUpdateReqInput())

    @rule(what=BAD)
    def refused(self, what: str) -> None:
        named = dict(tensors(1))
        if what == "an unknown name":
            named["model.nothing"] = torch.zeros(3)
        elif what == "a cut tensor" or self.quantization is None:
            named["model.norm.weight"] = named["model.norm.weight"][:-1]
        else:
            named = in_eight_bits(named, self.quantization)
            scales = DOWN + SUFFIXES[self.quantization]
            if what == "no scales":
                del named[scales]
            else:
                named[scales] = named[scales] * torch.nan
        self.send(named, succeeds=False)

    @rule(tags=TAGS, preserve=st.sampled_from(list(Preserve)))
    def sleep(self, tags: tuple[MemoryTag, ...], preserve: Preserve) -> None:
        self.apply(ReleaseMemoryOccupationReqInput(tags=tags, preserve=preserve))
        self.apply(ResumeMemoryOccupationReqInput())

    @rule(num_tokens=st.sampled_from([1024, 2048]))
    def resize(self, num_tokens: int) -> None:
        self.apply(ResizeMemoryOccupationReqInput(num_tokens=num_tokens))

    @invariant()
    def weights_are_those_that_were_sent(self) -> None:
        for name, version in self.held.items():
            tensor = tensors(version)[name]
            if self.quantization is not None and is_quantized(name):
                expected = restored(*quantized(tensor, self.quantization))
            else:
                expected = tensor.float()
            assert torch.equal(self.rank.store.read(name, 1 << 30)(), expected), name

    @invariant()
    def answers_are_the_same(self) -> None:
        self.apply(FlushCacheReqInput())
        rid = self.rank.generate(prompt(1, 20), 4)
        self.rank.run()
        tokens = self.rank.tokens[rid]
        assert len(tokens) == 4
        assert self.answers.setdefault(tuple(self.held.values()), tokens) == tokens

    def teardown(self) -> None:
        self.rank.kv.close()
        self.rank.store.arena.close()


TestPrecisionFuzz = fuzzed(PrecisionMachine, 8, num_steps=10)
