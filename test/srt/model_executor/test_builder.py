"""The size of the KV pool, and what the builder refuses."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fixtures.checkpoints import make_checkpoint
from fixtures.model_runs import RunnerDriver
from safetensors.torch import load_file, save_file

from ebbtide.srt.config import resolve
from ebbtide.srt.device import CpuDevice
from ebbtide.srt.errors import ConfigurationError, OutOfDeviceMemory
from ebbtide.srt.mem_cache import Paged
from ebbtide.srt.mem_cache.kv_pool import KVLayout
from ebbtide.srt.memory_saver.saver import VirtualMemorySaver
from ebbtide.srt.memory_saver.virtual_memory.host import HostVirtualMemory
from ebbtide.srt.model_executor import graph_runner
from ebbtide.srt.model_executor.builder import _pass_room, capture_graphs
from ebbtide.srt.model_executor.kv_sizing import checkpoint_scales, choose_budget, choose_num_pages
from ebbtide.srt.server_args import ServerArgs

SIZES: dict[str, Any] = {
    "free_bytes": 1_000_000,
    "budget_bytes": 100_000,
    "max_total_tokens": None,
    "max_running_requests": 8,
    "context_len": 1000,
}


# Pages of 16 tokens and of 1,024 bytes, four of them in a chunk.
LAYOUT = KVLayout(2, 16, Paged(1, 8), torch.bfloat16, granularity=4096)


@pytest.mark.parametrize(
    ("changes", "num_pages"),
    [
        ({}, 96),
        ({"budget_bytes": 1_000_000}, 8 * 63),
        ({"max_running_requests": 1}, 63),
        ({"context_len": 16, "max_running_requests": 2}, 2),
        ({"max_total_tokens": 175}, 10),
        ({"max_total_tokens": 15_616}, 976),
    ],
    ids=str,
)
def test_number_of_pages(changes: dict[str, Any], num_pages: int) -> None:
    assert choose_num_pages(LAYOUT, **SIZES | changes) == num_pages


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_total_tokens": 15}, "max_total_tokens 15 is less than one page of 16 tokens"),
        ({"max_total_tokens": 15_632}, "needs 1003520 bytes, 1000000 are free"),
        (
            {"budget_bytes": 999},
            r"may take 999 bytes \(1000000 are free.* one chunk of 4 pages .* needs 4096",
        ),
        ({"budget_bytes": -5}, "may take 0 bytes .* set mem_fraction_static higher"),
    ],
    ids=str,
)
def test_pools_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        choose_num_pages(LAYOUT, **SIZES | changes)


# Of 1,000 bytes that were free before the weights.
@pytest.mark.parametrize(
    ("fraction", "least_pool_share", "weight_bytes", "budget_bytes"),
    [
        (None, 0.0, 0, 100),
        (0.25, 0.0, 0, 250),
        (0.85, 0.5, 100, 750),
        (0.85, 0.5, 800, 100),
        (0.85, 0.5, 900, 50),
        (0.85, 0.0, 800, 50),
        (0.85, 0.0, 900, 0),
    ],
)
def test_weights_that_take_most_of_the_memory_leave_the_pool_half_of_the_rest(
    fraction: float | None, least_pool_share: float, weight_bytes: int, budget_bytes: int, tmp_path: Path
) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = {"mem_fraction_static": fraction, "least_pool_share": least_pool_share}
    cache_config = replace(resolve(ServerArgs(model_path=str(path))).cache, **sizes)

    assert choose_budget(cache_config, 1000 - weight_bytes, weight_bytes) == budget_bytes


def test_ranks_that_share_the_hosts_memory_take_a_part_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, free_bytes = make_checkpoint(tmp_path, "LlamaForCausalLM"), 100 << 20
    monkeypatch.setattr(CpuDevice, "free_bytes", lambda self: free_bytes)
    taken_bytes = []
    for num_ranks in (1, 2):
        runner = RunnerDriver(
            path,
            max_total_tokens=None,
            mem_fraction_static=0.8,
            dp_size=num_ranks,
            max_running_requests=4096,
        ).runner
        weight_bytes = runner.weight_store.arena.resident_bytes
        taken_bytes.append(num_ranks * (weight_bytes + runner.kv_pool.arena.resident_bytes))
        rounding_bytes = num_ranks * (4 << 20)
        assert taken_bytes[-1] <= 0.8 * (free_bytes + num_ranks * weight_bytes) + rounding_bytes
    assert taken_bytes[1] > 0.9 * taken_bytes[0]


def test_a_backend_for_gpus_is_torchs_own_on_a_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")

    driver = RunnerDriver(path, attention_backend="flashinfer")
    driver.generate([driver.start([1, 2, 3])], 2)

    assert "attention_backend=flashinfer: " in caplog.text
    assert "attention by TorchNativeAttention instead" in caplog.text


@pytest.mark.parametrize(
    "error",
    [OutOfDeviceMemory(9, 5), torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")],
    ids=str,
)
def test_too_little_memory_for_graphs_is_a_configuration_error_that_names_the_flag(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> None:
        raise error

    runner = RunnerDriver(make_checkpoint(tmp_path, "LlamaForCausalLM")).runner
    monkeypatch.setattr(graph_runner, "DecodeGraphs", no_room)

    message = r"graphs of up to 512 requests: (needed 9|CUDA out).*[^\n]; lower cuda_graph_max_bs"
    with pytest.raises(ConfigurationError, match=message):
        capture_graphs(runner, VirtualMemorySaver(HostVirtualMemory()), (1, 512), torch.zeros(1))


def with_scales(path: Path, scales: dict[str, torch.Tensor]) -> Path:
    """A checkpoint with these tensors beside its weights, named from the layer on."""
    make_checkpoint(path, "LlamaForCausalLM")
    named = {f"model.layers.{name}": scale for name, scale in scales.items()}
    save_file(load_file(path / "model.safetensors") | named, path / "model.safetensors", {"format": "pt"})
    return path


SCALES = {
    "0.self_attn.k_scale": torch.tensor(0.5),
    "0.self_attn.v_proj.v_scale": torch.tensor([2.0, 4.0]),
    "1.self_attn.attn.k_scale": torch.tensor([0.25], dtype=torch.bfloat16),
    "1.self_attn.v_scale": torch.tensor(1.0),
}


def test_a_kv_cache_in_fp8_has_twice_the_pages_and_the_scales_of_the_checkpoint(tmp_path: Path) -> None:
    path = with_scales(tmp_path, SCALES)
    whole, half = (
        RunnerDriver(path, dtype="bfloat16", kv_cache_dtype=dtype).runner.kv_pool
        for dtype in ("auto", "fp8_e4m3")
    )
    assert whole.layout.page_bytes == 2 * half.layout.page_bytes
    assert whole.scales is None
    assert half.scales is not None
    assert half.scales.scales_G2K.tolist() == [[[0.5, 0.5], [2.0, 4.0]], [[0.25, 0.25], [1.0, 1.0]]]


def test_ranks_have_the_scales_of_their_own_heads(tmp_path: Path) -> None:
    config = resolve(ServerArgs(model_path=str(with_scales(tmp_path, SCALES)))).model
    group: Any = SimpleNamespace(rank=1, size=2)
    scales_G2K = checkpoint_scales(config.path, "auto", config, group)
    assert scales_G2K is not None
    assert scales_G2K.tolist() == [[[0.5], [4.0]], [[0.25], [1.0]]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"1.self_attn.v_scale": None}, "layer 1: expected 1 v_scale, found 0"),
        ({"0.self_attn.k_proj.k_scale": torch.ones(1)}, "layer 0: expected 1 k_scale, found 2"),
        ({"2.self_attn.k_scale": torch.ones(1)}, "layer 2: expected 0 k_scale, found 1"),
        ({"0.self_attn.k_scale": torch.ones(3)}, r"one for each of 2 KV heads, got shape \[3\]"),
        ({"0.self_attn.k_scale": torch.tensor(0.0)}, r"finite numbers above 0, got \[0.0, 0.0\]"),
        ({"0.self_attn.k_scale": torch.tensor(float("nan"))}, "finite numbers above 0, got"),
    ],
    ids=str,
)
def test_scales_that_cannot_be_meant_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str
) -> None:
    scales = {name: scale for name, scale in (SCALES | changes).items() if scale is not None}
    with pytest.raises(ConfigurationError, match=message):
        RunnerDriver(with_scales(tmp_path, scales), kv_cache_dtype="fp8")


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("in_float32", [False, True])
def test_logits_are_computed_in_float32_where_that_is_asked_for(
    tmp_path: Path, is_tied: bool, in_float32: bool
) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM", tied=is_tied)
    runner = RunnerDriver(path, dtype="bfloat16", enable_fp32_lm_head=in_float32).runner
    store = runner.weight_store
    weight_VD = store.read("lm_head.weight", 10**6)()
    hidden_TD = torch.randn(5, weight_VD.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    logits_TV = runner.model.logits(hidden_TD, runner.kernels)
    expected_TV = hidden_TD.float() @ weight_VD.T
    assert logits_TV.dtype == (torch.float32 if in_float32 else torch.bfloat16)
    tolerance = 1e-5 if in_float32 else 2e-2
    torch.testing.assert_close(logits_TV.float(), expected_TV, rtol=tolerance, atol=tolerance)
    # Numbers of 16 bits are not what the products are rounded to.
    assert torch.equal(logits_TV.bfloat16().float(), logits_TV.float()) is not in_float32


def test_routes_of_a_model_without_experts_are_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ConfigurationError, match="enable_return_routed_experts: LlamaForCausalLM has no exp"):
        RunnerDriver(path, enable_return_routed_experts=True)


def test_room_for_passes_is_what_the_longest_prompt_took_on_the_rank_where_it_took_most(
    tmp_path: Path,
) -> None:
    runner: Any = SimpleNamespace(device=CpuDevice())
    group: Any = SimpleNamespace(
        size=2, rank=0, smallest=lambda value: min(value, -101) if value < 0 else value
    )
    config = resolve(
        ServerArgs(model_path=str(make_checkpoint(tmp_path, "LlamaForCausalLM")), chunked_prefill_size=64)
    )
    for taken_bytes, token_bytes in ((6400, 101), (6464, 101), (6465, 102)):
        room = _pass_room(runner, config, group, taken_bytes)
        assert (room.token_bytes, room.row_bytes) == (token_bytes, 3 * 4 * config.model.vocab_size)
