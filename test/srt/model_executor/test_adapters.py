"""Adapters in slots: what a model computes with them, against PEFT, and what is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.adapters import EXPERT_PARAMETERS, Adapter, make_adapter, merged_adapter
from fixtures.checkpoints import make_checkpoint
from fixtures.eight_bits import MOE_SHAPE, is_quantized, make_exact_checkpoint, quantized, restored
from fixtures.gpu_device import ON_CPU_AND_GPU
from fixtures.model_runs import Run, RunnerDriver
from fixtures.real_rank import RealRank
from fixtures.references import Reference
from safetensors.torch import load_file, save_file

from ebbtide.srt.errors import ConfigurationError, RequestRejected
from ebbtide.srt.hf_folder import adapter_config
from ebbtide.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from ebbtide.srt.memory_saver import MemoryTag
from ebbtide.srt.model_executor.adapters import AdapterSlots
from ebbtide.srt.model_executor.batch_plan import LogprobSpec

PROMPT = list(b"Ebb and flow: the tide goes out, and the tide comes in again.")
NUM_TOKENS = 6
LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 16, "max_loras_per_batch": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama-stabilized": ("LlamaForCausalLM", {"use_rslora": True, "lora_alpha": 5}),
    "llama-some": ("LlamaForCausalLM", {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama-regex": ("LlamaForCausalLM", {"target_modules": r".*\.1\..*(k_proj|up_proj)"}),
    "llama-patterns": (
        "LlamaForCausalLM",
        {"rank_pattern": {"q_proj": 7, "1.mlp.down_proj": 12}, "alpha_pattern": {"v_proj": 3}},
    ),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3-moe-down": (
        "Qwen3MoeForCausalLM",
        {"target_modules": ["o_proj"], "target_parameters": EXPERT_PARAMETERS[1:]},
    ),
    "mixtral": ("MixtralForCausalLM", {}),
    "nemotron-h": ("NemotronHForCausalLM", {"target_modules": ["in_proj", "q_proj", "up_proj", "down_proj"]}),
    "deepseek-v3": (
        "DeepseekV3ForCausalLM",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]},
    ),
}


def slots(driver: RunnerDriver) -> AdapterSlots:
    adapters = driver.runner.adapters
    assert adapters is not None
    return adapters


def held(adapters: AdapterSlots, slot: int) -> list[float]:
    """What a slot holds."""
    copy = adapters.save(slot)
    return [*copy.values.flatten().tolist(), *copy.scalings.tolist()]


def load(driver: RunnerDriver, slot: int, adapter: Adapter) -> None:
    fit = slots(driver).fit(adapter_config(adapter.fields), adapter.described)
    slots(driver).write(slot, fit, adapter.tensors.items())


def check(run: Run, reference: Reference, tolerance: float = 1e-5) -> None:
    """Assert that ids are the reference's, and logprobs nearly."""
    assert run.output_ids == reference.greedy(run.spec.prompt_ids, len(run.output_ids))
    rows = reference.logprobs(run.token_ids)[len(run.spec.prompt_ids) - 1 : -1]
    expected = rows.gather(1, torch.tensor([run.output_ids]).t()).flatten()
    found = torch.tensor([position.token for position in run.logprobs])
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_adapters_and_none_computes_what_peft_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("peft")
    architecture, options = CASES[name]
    model = make_checkpoint(tmp_path / "model", architecture)
    adapters = [make_adapter(model, tmp_path / str(seed), seed=seed, **options) for seed in (1, 2)]
    driver = RunnerDriver(model, device="cpu", **LORA)
    for slot, adapter in zip((2, 0), adapters, strict=True):
        load(driver, slot, adapter)
    references = {2: adapters[0].reference, 0: adapters[1].reference, -1: Reference(model)}
    runs = [
        driver.start(PROMPT[: 20 + 7 * number], logprobs=LogprobSpec(), adapter=slot)
        for number, slot in enumerate((2, -1, 0, 2))
    ]
    driver.generate(runs, NUM_TOKENS, chunk=16)
    for run in runs:
        check(run, references[run.adapter])
    outputs = {tuple(reference.greedy(PROMPT, NUM_TOKENS)) for reference in references.values()}
    assert len(outputs) > 1, "these adapters change nothing"


@pytest.mark.parametrize("server_args", ON_CPU_AND_GPU[1:])
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "NemotronHForCausalLM"])
def test_an_adapter_computes_what_merged_weights_do(
    tmp_path: Path, architecture: str, server_args: dict[str, Any]
) -> None:
    model = make_checkpoint(tmp_path / "model", architecture)
    adapters = {slot: merged_adapter(model, seed=slot, rank=4 + 8 * slot) for slot in (0, 1)}
    driver = RunnerDriver(model, **{"device": "cpu", **LORA, **server_args})
    for slot, adapter in adapters.items():
        load(driver, slot, adapter)
    references = {-1: Reference(model)} | {slot: each.reference for slot, each in adapters.items()}
    # More tokens than kernels for few of them take, and then as many as a graph has.
    batches = [(1, -1, 0, 1, 0), (-1, -1), (0,)]
    for batch in batches:
        runs = [
            driver.start(PROMPT[: 20 + 7 * number], logprobs=LogprobSpec(), adapter=slot)
            for number, slot in enumerate(batch)
        ]
        driver.generate(runs, NUM_TOKENS)
        for run in runs:
            check(run, references[run.adapter], 1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_as_served_adapters_give_tokens_of_merged_weights(tmp_path: Path, architecture: str) -> None:
    """In bfloat16, by the kernels for few tokens."""
    model = make_checkpoint(tmp_path / "model", architecture, head_dim=128, dtype="bfloat16")
    adapters = {slot: merged_adapter(model, seed=slot, rank=4 + 8 * slot) for slot in (0, 1)}
    driver = RunnerDriver(model, device="cuda", cuda_graph_max_bs=8, **LORA)
    for slot, adapter in adapters.items():
        load(driver, slot, adapter)
    references = {-1: Reference(model)} | {slot: each.reference for slot, each in adapters.items()}
    for batch in ((1, -1, 0, 1, 0), (0,)):
        runs = [driver.start(PROMPT[: 20 + 7 * number], adapter=slot) for number, slot in enumerate(batch)]
        driver.generate(runs, NUM_TOKENS)
        for run in runs:
            reference = references[run.adapter]
            rows = reference.logprobs(run.token_ids)[len(run.spec.prompt_ids) - 1 : -1]
            worst = (rows.max(-1).values - rows.gather(1, torch.tensor([run.output_ids]).t()).flatten()).max()
            # Random logits of these models lie about 1.5 apart, and those of adapters further.
            assert worst < 0.5, f"slot {run.adapter}: a token is {worst:.3f} below the best"


def rounded_by_rows(model: Path, folder: Path) -> Path:
    """The same checkpoint with the weights that 8 bits and a scale for each row leave."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = {
        name: restored(*quantized(tensor, "w8a8_fp8")) if is_quantized(name) else tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def test_experts_may_have_adapters_one_by_one(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "Qwen3MoeForCausalLM")
    adapter = merged_adapter(model, rank=4)
    driver = RunnerDriver(model, device="cpu", **LORA)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in adapter.tensors.items():
        module, half = name.removesuffix(".weight").split(".lora_")
        if not module.endswith(("experts", "experts.base_layer")):
            tensors[name] = tensor
            continue
        # As PEFT has them: E·R rows of A, expert after expert; E columns of B for each rank.
        parts = {"down_proj": slice(None)}
        if module.endswith(".base_layer"):
            inner = adapter.tensors[f"{module}.lora_B.weight"].shape[0] // 2
            parts = {"gate_proj": slice(0, inner), "up_proj": slice(inner, None)}
        for expert in range(6):
            for part, rows in parts.items():
                one = tensor[4 * expert : 4 * expert + 4] if half == "A" else tensor[rows, expert::6]
                tensors[f"{module.removesuffix('.base_layer')}.{expert}.{part}.lora_{half}.weight"] = one
    load(driver, 1, Adapter(adapter.fields, tensors, adapter.reference))
    run = driver.start(PROMPT, logprobs=LogprobSpec(), adapter=1)
    driver.generate([run], NUM_TOKENS)
    check(run, adapter.reference)


@pytest.mark.parametrize(
    ("pattern", "module", "is_meant"),
    [
        ("q_proj", "model.layers.0.self_attn.q_proj", True),
        ("q_proj", "model.layers.0.self_attn.qq_proj", False),
        (r".*\.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj", True),
        (r"layers\.(0|2)\..*_proj", "model.layers.2.mlp.up_proj", True),
        (r"layers\.(0|2)\..*_proj", "model.layers.1.mlp.up_proj", False),
        (r"^model.layers.\d+.mlp.up_proj$", "model.layers.11.mlp.up_proj", True),
    ],
)
def test_patterns_are_those_of_peft(pattern: str, module: str, is_meant: bool) -> None:
    config = adapter_config({"r": 8, "lora_alpha": 8, "rank_pattern": {pattern: 4}})
    assert config.rank_of(module) == (4 if is_meant else 8)
    assert config.scaling_of(module) == (2 if is_meant else 1)


@pytest.mark.parametrize("quantization", ["fp8", "w8a8_fp8"])
@pytest.mark.parametrize(
    ("architecture", "shape"), [("LlamaForCausalLM", {}), ("Qwen3MoeForCausalLM", MOE_SHAPE)]
)
def test_adapters_keep_their_precision_over_weights_of_8_bits(
    tmp_path: Path, architecture: str, shape: dict[str, Any], quantization: str
) -> None:
    model = make_exact_checkpoint(tmp_path / "model", architecture, **shape)
    rounded = rounded_by_rows(model, tmp_path / "rounded") if quantization == "w8a8_fp8" else model
    adapter = merged_adapter(rounded)
    driver = RunnerDriver(model, device="cpu", quantization=quantization, **LORA)
    load(driver, 0, adapter)
    run = driver.start(PROMPT, logprobs=LogprobSpec(), adapter=0)
    driver.generate([run], NUM_TOKENS)
    check(run, adapter.reference)


@pytest.mark.parametrize("keeps_weights", [True, False])
def test_adapters_outlive_a_release_of_the_weights(tmp_path: Path, keeps_weights: bool) -> None:
    rank = RealRank(make_checkpoint(tmp_path / "model", "LlamaForCausalLM"), **LORA)
    adapters = rank.runner.adapters
    assert adapters is not None
    adapter = merged_adapter(tmp_path / "model")
    fit = adapters.fit(adapter_config(adapter.fields), adapter.described)
    adapters.write(1, fit, adapter.tensors.items())
    before = [held(adapters, slot) for slot in range(adapters.num_slots)]
    tags = (MemoryTag.WEIGHTS,)
    released = rank.apply(ReleaseMemoryOccupationReqInput(tags=tags, backup=keeps_weights))
    assert adapters.arena.resident_bytes == 0
    both_bytes = rank.store.arena.virtual_bytes + adapters.arena.virtual_bytes
    assert released.freed_bytes[MemoryTag.WEIGHTS] == both_bytes
    resumed = rank.apply(ResumeMemoryOccupationReqInput(tags=tags))
    assert resumed.weights.content == ("valid" if keeps_weights else "stale")
    assert [held(adapters, slot) for slot in range(adapters.num_slots)] == before


def test_a_slot_that_was_saved_is_what_it_was(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    driver = RunnerDriver(model, **LORA)
    load(driver, 1, merged_adapter(model))
    before = [held(slots(driver), slot) for slot in range(3)]
    assert before[0] == before[2] != before[1]
    slots(driver).restore(2, slots(driver).save(1))
    assert [held(slots(driver), slot) for slot in range(3)] == [before[0], before[1], before[1]]


def changed(adapter: Adapter, **tensors: torch.Tensor | None) -> Iterator[tuple[str, Any, torch.dtype]]:
    """The adapter's names, shapes and dtypes with those of one module changed."""
    for name, tensor in {**adapter.tensors, **tensors}.items():
        if tensor is not None:
            yield name, tensor.shape, tensor.dtype


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({Q + "B.weight": None}, "q_proj.lora_A.weight: expected lora_B of the module with it"),
        (
            {Q + "A.weight": torch.zeros(8, 63)},
            r"lora_A.weight: expected shape \[8, 64\] \(rank 8\), got \[8, 63\]",
        ),
        ({Q + "B.weight": torch.zeros(64, 4)}, r"lora_B.weight: expected shape \[64, 8\]"),
        ({Q + "A.weight": torch.zeros(8, 64, dtype=torch.int8)}, "expected a floating type"),
        ({Q + "A.bias": torch.zeros(8)}, "expected a name of PEFT's"),
        (
            {
                "model.layers.9.self_attn.q_proj.lora_" + half: torch.zeros(8, 8)
                for half in ("A.weight", "B.weight")
            },
            "layers.9.self_attn.q_proj.lora_A.weight: expected modules of the model",
        ),
        (
            {"base_model.model.lm_head.lora_" + half: torch.zeros(8, 8) for half in ("A.weight", "B.weight")},
            "lm_head.lora_A.weight: expected no adapter of embeddings or the output layer",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    llama: tuple[RunnerDriver, Adapter], tensors: dict[str, Any], message: str
) -> None:
    driver, adapter = llama
    before = slots(driver).generation
    with pytest.raises(RequestRejected, match=message):
        slots(driver).fit(adapter_config(adapter.fields), changed(adapter, **tensors))
    assert slots(driver).generation == before


@pytest.mark.parametrize(
    ("architecture", "module"),
    [
        ("DeepseekV3ForCausalLM", "self_attn.kv_b_proj"),
        ("GptOssForCausalLM", "mlp.experts"),
        ("GptOssForCausalLM", "mlp.experts.base_layer"),
    ],
)
def test_what_no_kernel_adds_an_adapter_to_takes_none(tmp_path: Path, architecture: str, module: str) -> None:
    driver = RunnerDriver(make_checkpoint(tmp_path, architecture), **LORA)
    name = f"base_model.model.model.layers.0.{module}.lora_"
    described = [
        (name + half, torch.Size(size), torch.float32)
        for half, size in (("A.weight", (4, 32)), ("B.weight", (128, 4)))
    ]
    with pytest.raises(RequestRejected, match=rf"{module}.lora_A.weight: expected modules of the model"):
        slots(driver).fit(adapter_config({"r": 4}), described)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a CUDA GPU")
def test_experts_with_scales_of_blocks_take_none_on_a_gpu(tmp_path: Path) -> None:
    model = make_exact_checkpoint(tmp_path, "Qwen3MoeForCausalLM", **MOE_SHAPE)
    options = {"device": "cuda", "dtype": "bfloat16", "quantization": "fp8", **LORA}
    with pytest.raises(ConfigurationError, match=r"layers.0.mlp.experts, have no adapters on a GPU"):
        RunnerDriver(model, **options)
    assert RunnerDriver(model, lora_target_modules=["q_proj"], **options).runner.adapters is not None


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunnerDriver, Adapter]:
    model = make_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    return RunnerDriver(model, **LORA), merged_adapter(model)


def test_a_rank_beyond_the_slots_is_refused(llama: tuple[RunnerDriver, Adapter]) -> None:
    driver, _ = llama
    large = {Q + "A.weight": torch.zeros(17, 64), Q + "B.weight": torch.zeros(64, 17)}
    described = [(name, tensor.shape, tensor.dtype) for name, tensor in large.items()]
    with pytest.raises(RequestRejected, match=r"r: expected at most 16 \(max_lora_rank\)"):
        slots(driver).fit(adapter_config({"r": 17}), described)


def test_only_the_modules_that_were_asked_for_take_adapters(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", "LlamaForCausalLM")
    driver = RunnerDriver(model, lora_target_modules=["q_proj", "o_proj"], **LORA)
    adapter = merged_adapter(model)
    described = [each for each in adapter.described if ".q_proj." in each[0]]
    slots(driver).fit(adapter_config(adapter.fields), described)
    with pytest.raises(RequestRejected, match=r"gate_proj\.lora_A\.weight: .* lora_target_modules if it is"):
        slots(driver).fit(adapter_config(adapter.fields), adapter.described)
    with pytest.raises(ConfigurationError, match="lora_target_modules: the model has no module 'qq_proj'"):
        RunnerDriver(model, lora_target_modules=["qq_proj"], **LORA)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("r", 0),
        ("r", "8"),
        ("lora_alpha", float("nan")),
        ("lora_alpha", 10**400),
        ("use_dora", True),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("peft_type", "IA3"),
        ("rank_pattern", {"(": 4}),
        ("rank_pattern", {"(a+)+b": 4}),
        ("rank_pattern", {".*.*.*.*.*x": 4}),
        ("rank_pattern", {"q_proj": 0}),
        ("alpha_pattern", {"q_proj": float("inf")}),
    ],
)
def test_a_config_that_is_not_plain_lora_is_refused_by_field(field: str, value: object) -> None:
    with pytest.raises(RequestRejected, match=f"adapter config: {field}: expected "):
        adapter_config({"r": 8, "lora_alpha": 16, field: value})
