"""resolve: what is chosen, what is read from the model folder, what is refused and how it is said."""

import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.srt import config
from ebbtide.srt.config import EngineConfig, resolve
from ebbtide.srt.errors import ConfigurationError
from ebbtide.srt.server_args import ServerArgs

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 257,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, **QWEN3)
    return tmp_path


def write(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def resolved(folder: Path, **arguments: Any) -> EngineConfig:
    return resolve(ServerArgs(model_path=str(folder), **arguments))


def refused(folder: Path | str, **arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as refusal:
        resolve(ServerArgs(model_path=str(folder), **arguments))
    return str(refusal.value)


def test_limits_of_requests_come_from_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolved(folder).schedule.waiting_timeout_s is None
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "2.5")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "-1")
    schedule = resolved(folder).schedule
    assert (schedule.waiting_timeout_s, schedule.running_timeout_s) == (2.5, None)
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "soon")
    assert "SGLANG_REQ_RUNNING_TIMEOUT: expected a number of seconds, got 'soon'" in refused(folder)


def test_the_model_is_read_from_its_folder(folder: Path) -> None:
    model = resolved(folder).model
    assert (model.architecture, model.model_type, model.dtype) == ("Qwen3ForCausalLM", "qwen3", "bfloat16")
    assert (model.vocab_size, model.num_layers, model.num_heads) == (258, 2, 4)
    assert (model.num_kv_heads, model.head_dim, model.context_len) == (2, 16, 256)
    assert model.path == model.tokenizer_path == model.served_model_name == str(folder)


def test_what_config_json_leaves_out_is_derived(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN3.items() if key not in ("head_dim", "num_key_value_heads")}
    write(tmp_path, **{**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": None})
    model = resolved(tmp_path).model
    assert (model.num_kv_heads, model.head_dim, model.dtype) == (4, 16, "float32")


def test_a_config_of_another_name_is_read_without_its_code(tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}
    kimi = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"], "auto_map": code}
    write(tmp_path, **kimi, hidden_size=128, num_attention_heads=4, n_routed_experts=384, qk_nope_head_dim=48)
    model = resolved(tmp_path, json_model_override_args='{"num_hidden_layers": 3}').model
    assert (model.architecture, model.num_layers) == ("DeepseekV3ForCausalLM", 3)
    assert (model.hf_config.n_routed_experts, model.hf_config.qk_nope_head_dim) == (384, 48)


def test_eos_ids_come_from_both_files(folder: Path) -> None:
    assert resolved(folder).model.eos_token_ids == {257}
    (folder / "generation_config.json").write_text('{"eos_token_id": [5, 257]}')
    assert resolved(folder).model.eos_token_ids == {5, 257}
    write(folder, **{**QWEN3, "eos_token_id": None})
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    assert resolved(folder).model.eos_token_ids == {0}


def test_overrides_are_merged_before_fields_are_derived(folder: Path) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    overrides = json.dumps({"max_position_embeddings": 1024, "rope_parameters": rope})
    model = resolved(folder, json_model_override_args=overrides).model
    assert model.context_len == 1024
    assert model.hf_config.rope_parameters["factor"] == 4.0
    assert model.vocab_size == 258


@pytest.mark.parametrize(
    ("policy", "ordered"),
    [
        ("fcfs", "priority"),
        ("lof", "priority-lof"),
        ("priority", "priority"),
        ("lpm", None),
    ],
)
def test_priority_scheduling_orders_by_priority_first(folder: Path, policy: str, ordered: str | None) -> None:
    write(folder, **QWEN3)
    assert resolved(folder, schedule_policy=policy).schedule.policy == policy
    given = {"schedule_policy": policy, "enable_priority_scheduling": True}
    if ordered is None:
        with pytest.raises(ConfigurationError, match=f"expected schedule_policy fcfs or lof, got {policy}"):
            resolved(folder, **given)
    else:
        assert resolved(folder, **given).schedule.policy == ordered


@pytest.mark.parametrize(
    ("chunk", "given", "experts", "share"),
    [
        *((8192, None, 0, 1 / 16), (2048, None, 0, 0.25), (256, None, 0, 1.0), (2048, 0.1, 0, 0.1)),
        (8192, None, 8, 0.125),
    ],
)
def test_a_prompt_gets_a_sixteenth_of_a_pass_but_no_fewer_tokens_than_a_pass_is_worth(
    folder: Path, chunk: int, given: float | None, experts: int, share: float
) -> None:
    write(folder, **QWEN3, num_experts_per_tok=experts)
    config = resolved(folder, chunked_prefill_size=chunk, prefill_share=given)
    assert config.schedule.prefill_share == share


def test_arguments_are_put_as_the_engine_takes_them(folder: Path) -> None:
    config = resolved(
        folder, dtype="half", chunked_prefill_size=-1, custom_weight_loader="pkg.loader", host="[::1]"
    )
    assert (config.model.dtype, config.cache.dtype) == ("float16", "float16")
    assert config.schedule.chunked_prefill_size is None
    assert config.server_args.custom_weight_loader == ["pkg.loader"]
    assert config.server_args.host == "::1"


@pytest.mark.parametrize("saver", [{"enable_memory_saver": False}, {"memory_saver_backend": "none"}])
def test_without_a_memory_saver_the_backend_is_none(folder: Path, saver: dict[str, Any]) -> None:
    assert resolved(folder, **saver).server_args.memory_saver_backend == "none"


def test_it_has_no_class_of_transformers_and_arguments_of_its_own(folder: Path) -> None:
    args = ServerArgs(model_path=str(folder), page_size=8)
    config = resolve(args)
    # Each rank would have to import it.
    assert json.dumps(vars(config.model.hf_config))
    args.page_size = 9
    assert config.server_args.page_size == 8


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert str(tmp_path / "gone") in refused(tmp_path / "gone")
    assert "'no-such-model'" in refused("no-such-model")
    assert "no config.json" in refused(tmp_path)
    (tmp_path / "file").write_text("")
    assert "(a file)" in refused(tmp_path / "file")
    assert "model_path: expected a checkpoint folder or a hub id, got ''" in refused("")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "tidal"}, "tidal"),
        ({"model_type": None}, "config.json"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": 0}, "head_dim"),
        ({"intermediate_size": -5}, "intermediate_size"),
        ({"first_k_dense_replace": -2}, "first_k_dense_replace"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 0}, "linear_num_key_heads"),
        ({"model_type": "glm4_moe", "n_group": 0}, "n_group"),
        ({"architectures": None}, "architectures"),
        ({"architectures": "Qwen3ForCausalLM"}, "list of names, got 'Qwen3ForCausalLM'"),
        ({"quantization_config": {**FP8, "modules_to_not_convert": 5}}, "list of names, got 5"),
        ({"dtype": "float64"}, "float64"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"vocab_size": "many"}, "'vocab_size' expected int, got str"),
    ],
)
def test_a_bad_config_json_is_refused_with_the_reason(
    folder: Path, change: dict[str, Any], said: str
) -> None:
    write(folder, **{**QWEN3, **change})
    message = refused(folder)
    assert said in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "</s>"}', '{"eos_token_id": [1, null]}'])
def test_a_bad_generation_config_is_refused(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    assert "generation_config.json" in refused(folder)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", " cannot be read: "),
        ("[1]", ": expected a JSON object, got [1]"),
        ("[" * 10**5, " cannot be read: "),
    ],
)
def test_a_config_that_is_no_json_object_is_refused(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text)
    assert f"{folder}/config.json{said}" in refused(folder)


BAD_ARGUMENTS: dict[str, list[Any]] = {
    "page_size": [0, "16", True],
    "max_total_tokens": [15],
    "max_running_requests": [0],
    "max_queued_requests": [-1],
    "chunked_prefill_size": [0, -2],
    "mem_fraction_static": [0.0, 1.0, float("nan")],
    "context_length": [257],
    "dtype": ["float8"],
    "load_format": ["gguf"],
    "schedule_policy": ["lifo"],
    "prefix_cache_scope": ["all"],
    "skip_tokenizer_init": [1],
    "weight_update_timeout_s": [0],
    "watchdog_timeout": [float("inf")],
    "soft_watchdog_timeout": [0],
    "drain_timeout_s": [float("nan")],
    "port": [0, 65536],
    "log_level": ["loud"],
    "custom_weight_loader": [[1]],
    "json_model_override_args": ["[1]", "{"],
    "tokenizer_path": ["/no/tokenizer"],
    "api_key": [""],
    "admin_api_key": [""],
    "cuda_graph_bs": [[0, 4]],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [*((name, value) for name, values in BAD_ARGUMENTS.items() for value in values)],
)
def test_a_bad_argument_is_refused_by_name(folder: Path, name: str, value: Any) -> None:
    assert name in refused(folder, **{name: value})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"tp_size": 3, "nnodes": 2},
            "nnodes: expected a divisor of the 3 ranks (tp_size=3, dp_size=1), got 2",
        ),
        ({"tp_size": 2, "nnodes": 2, "node_rank": 2}, "node_rank: expected at most 1 (nnodes=2), got 2"),
        ({"node_rank": 1}, "node_rank: expected at most 0 (nnodes=1), got 1"),
        ({"tp_size": 2, "nnodes": 2}, "dist_init_addr: nnodes=2 needs the host:port of node 0"),
        ({"tp_size": 2, "nnodes": 2, "dist_init_addr": "node-0:70000"}, "dist_init_addr"),
        ({"tp_size": 2, "nnodes": 2, "dist_init_addr": "0.0.0.0:5000"}, "reach node 0, got '0.0.0.0:5000'"),
        ({"nccl_port": 65536}, "nccl_port: expected at most 65535"),
    ],
)
def test_ranks_that_cannot_be_are_refused(folder: Path, arguments: dict[str, Any], message: str) -> None:
    assert message in refused(folder, **arguments)


def test_ranks_are_counted_by_node(folder: Path) -> None:
    address = {"nnodes": 2, "node_rank": 1, "dist_init_addr": "[fd00::1]:5000"}
    parallel = resolved(folder, tp_size=2, dp_size=2, **address, load_balance_method="total_tokens").parallel
    assert (parallel.num_ranks, parallel.ranks_per_node, parallel.node_rank) == (4, 2, 1)
    assert (parallel.dist_init_addr, parallel.load_balance_method) == ("[fd00::1]:5000", "shortest_queue")


@pytest.mark.parametrize(("is_cuda", "served"), [(False, {"bfloat16", "float32"}), (True, {"bfloat16"})])
def test_quantised_weights_need_a_dtype_that_has_products_with_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_cuda: bool, served: set[str]
) -> None:
    monkeypatch.setattr(config, "sees_cuda", lambda: is_cuda)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    for dtype in ("bfloat16", "float32", "float16"):
        asked = {"dtype": dtype, "quantization": "fp8"}
        if dtype in served:
            assert resolved(folder, **asked).precision["weights"] == "fp8"
        else:
            said = refused(folder, **asked)
            assert "quantization=fp8: expected dtype bfloat16" in said
            assert said.endswith(f"got {dtype}")


def test_the_gpus_of_all_ranks_of_a_node_must_be_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "sees_cuda", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    assert resolved(folder, tp_size=2, dp_size=2).runtime.device == "cuda:0"
    assert resolved(folder, tp_size=2, base_gpu_id=1, gpu_id_step=2).runtime.device == "cuda:1"
    assert resolved(folder, tp_size=8, nnodes=2, dist_init_addr="node-0:5000").parallel.ranks_per_node == 4
    assert "4 ranks on this node (tp_size=4" in refused(folder, tp_size=4, base_gpu_id=1)
    assert "need 5 visible GPUs, found 4" in refused(folder, tp_size=4, base_gpu_id=1)
    assert "need 7 visible GPUs, found 4" in refused(folder, tp_size=2, dp_size=2, gpu_id_step=2)


@pytest.mark.parametrize(
    ("arguments", "largest"),
    [
        ({}, 512),
        ({"max_running_requests": 37}, 37),
        ({"max_running_requests": 1024}, 512),
        ({"max_running_requests": 1024, "cuda_graph_max_bs": 1000}, 1000),
    ],
    ids=str,
)
def test_graphs_cover_what_may_run_and_lie_close_together(
    arguments: dict[str, Any], largest: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "sees_cuda", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)

    sizes = resolved(folder, **arguments).runtime.cuda_graph_bs

    assert (sizes[0], sizes[-1]) == (1, largest)
    assert all(bigger - size <= max(8, size / 16) for size, bigger in pairwise(sizes))


def test_defaults_warn_about_nothing(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    resolved(folder)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_an_attention_backend_of_others_is_replaced_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert resolved(folder, attention_backend="fa3").runtime.attention_backend is None
    assert "fa3" in caplog.text


def test_listening_beyond_loopback_must_be_allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refused(folder, host="0.0.0.0")
    assert "--allow-unauthenticated-control" in message
    assert "EBBTIDE_ALLOW_UNAUTHENTICATED_CONTROL=1" in message
    assert resolved(folder, host="0.0.0.0", allow_unauthenticated_control=True).server_args.host == "0.0.0.0"
    monkeypatch.setenv("EBBTIDE_ALLOW_UNAUTHENTICATED_CONTROL", "1")
    assert resolved(folder, host="10.1.2.3").server_args.host == "10.1.2.3"
    monkeypatch.undo()
    assert "--admin-api-key" in refused(folder, host="0.0.0.0", api_key="sesame")
    assert resolved(folder, host="0.0.0.0", admin_api_key="sesame").server_args.host == "0.0.0.0"
