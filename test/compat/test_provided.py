"""What each import path provides beyond its names: the column "must provide" of wire_api section 8."""

import dataclasses
import inspect
import multiprocessing
import pickle
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import sglang.srt.entrypoints.engine as engine_module
import sglang.srt.entrypoints.http_server as http_server
import sglang.srt.managers.io_struct as io_struct
import sglang.srt.managers.tokenizer_manager as tokenizer_manager
import torch
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fixtures.compat import COMPAT_ENVIRONMENT, PATHS
from fixtures.tokenizers import byte_level
from sglang.srt import constants
from sglang.srt.debug_utils.dumper import DumperConfig, _get_rank, dumper
from sglang.srt.entrypoints.EngineBase import EngineBase
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, Function, Tool
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.model_executor.model_runner import LocalSerializedTensor
from sglang.srt.model_executor.model_runner_components.weight_updater import _model_load_weights_direct
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs, prepare_server_args
from sglang.srt.utils import (
    MultiprocessingSerializer,
    assert_pkg_version,
    common as utils_common,
    kill_process_tree,
)
from sglang.srt.utils.hf_transformers_utils import get_tokenizer
from sglang.srt.utils.patch_torch import _reduce_tensor_modified, monkey_patch_torch_reductions
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata
from torch.multiprocessing import reductions

from ebbtide import SamplingParams as EngineSamplingParams

# The fields of wire_api sections 2.1 and 3 that frameworks send.
UPDATE = "flush_cache abort_all_requests weight_version selector torch_empty_cache pause_mode timeout_s"
FIELDS = {
    "GenerateReqInput": "text input_ids sampling_params rid stream return_logprob logprob_start_len "
    "top_logprobs_num token_ids_logprob return_text_in_logprobs return_prompt_token_ids cache_salt extra_key "
    "routed_dp_rank data_parallel_rank image_data video_data audio_data lora_path return_hidden_states "
    "return_routed_experts custom_logit_processor input_embeds bootstrap_host bootstrap_port bootstrap_room "
    "priority log_metrics routing_key session_params modalities mm_hashes",
    "PauseGenerationReqInput": "mode timeout_s",
    "ContinueGenerationReqInput": "torch_empty_cache",
    "ReleaseMemoryOccupationReqInput": "tags",
    "ResumeMemoryOccupationReqInput": "tags",
    "UpdateWeightFromDiskReqInput": f"model_path load_format {UPDATE}",
    "UpdateWeightsFromTensorReqInput": f"serialized_named_tensors load_format disable_draft_model {UPDATE}",
    "UpdateWeightsFromDistributedReqInput": "names dtypes shapes group_name load_format name dtype shape "
    + UPDATE,
    "UpdateWeightsFromIPCReqInput": f"zmq_handles {UPDATE}",
    "InitWeightsUpdateGroupReqInput": "master_address master_port rank_offset world_size group_name backend",
    "DestroyWeightsUpdateGroupReqInput": "group_name",
    "BeginWeightUpdateReqInput": "selector timeout_s",
    "EndWeightUpdateReqInput": "weight_version flush_cache pause_mode timeout_s",
    "UpdateWeightVersionReqInput": "new_version abort_all_requests",
    "CheckWeightsReqInput": "action skip_tensor_list allow_quant_error selector",
    "GetWeightsByNameReqInput": "name truncate_size",
    "AbortReq": "rid abort_all",
    "LoadLoRAAdapterReqInput": "lora_name lora_path pinned lora_id",
    "UnloadLoRAAdapterReqInput": "lora_name lora_id",
    "LoadLoRAAdapterFromTensorsReqInput": "lora_name config_dict serialized_tensors serialized_named_tensors "
    "load_format pinned lora_id added_tokens_config expected_checksums",
    "RpcReqInput": "method parameters",
    "RpcReqOutput": "success message",
    "Function": "description name parameters",
    "Tool": "function type",
}

WITH_TWO_ARGUMENTS = (
    "generate_request release_memory_occupation resume_memory_occupation update_weights_from_disk "
    "update_weights_from_tensor update_weights_from_distributed update_weights_from_ipc "
    "begin_weight_update end_weight_update init_weights_update_group destroy_weights_update_group"
)


PARENT_OF_TWO = """
import subprocess, sys, time
sleeper = [sys.executable, "-c", "import time; time.sleep(99)"]
print(*[subprocess.Popen(sleeper).pid for _ in range(2)], flush=True)
time.sleep(99)
"""


def test_every_request_is_listed_here() -> None:
    assert FIELDS.keys() == set(PATHS["sglang.srt.managers.io_struct"])


@pytest.mark.parametrize("name", FIELDS)
def test_requests_are_built_by_keyword_and_changed(name: str) -> None:
    request_class = getattr(io_struct, name)
    assert getattr(tokenizer_manager, name) is request_class
    fields = dict.fromkeys(FIELDS[name].split(), "given")
    request = request_class(**fields)
    assert {field: getattr(request, field) for field in fields} == fields
    setattr(request, next(iter(fields)), "changed")
    assert getattr(request, next(iter(fields))) == "changed"
    assert dataclasses.asdict(request).keys() >= fields.keys()


def test_sampling_params_have_every_key() -> None:
    keys = {field.name for field in dataclasses.fields(EngineSamplingParams)}
    assert keys <= set(dir(SamplingParams()))


def test_the_tokenizer_manager_has_every_coroutine() -> None:
    manager = tokenizer_manager.TokenizerManager
    for name in WITH_TWO_ARGUMENTS.split():
        function = getattr(manager, name)
        assert inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function), name
        inspect.signature(function).bind("self", "obj", None)
        inspect.signature(function).bind("self", obj="obj", request=None)
    for name, arguments in {
        "pause_generation": ["obj"],
        "continue_generation": ["obj"],
        "flush_cache": [],
        "get_internal_state": [],
    }.items():
        assert inspect.iscoroutinefunction(getattr(manager, name)), name
        inspect.signature(getattr(manager, name)).bind("self", *arguments)
    inspect.signature(manager.abort_request).bind("self", rid="", abort_all=False)
    inspect.signature(manager.auto_create_handle_loop).bind("self")
    assert {status.name for status in tokenizer_manager.ServerStatus} == {"Up", "Starting", "UnHealthy"}


def test_a_class_of_arguments_that_tests_can_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    built = []
    monkeypatch.setattr(ServerArgs, "__post_init__", lambda self: built.append(self))
    arguments = ServerArgs(model_path="somewhere", tp_size=2, dp_size=2)
    assert built == [arguments]
    assert {"tp_size", "dp_size", "mem_fraction_static"} <= {
        field.name for field in dataclasses.fields(ServerArgs)
    }


def test_arguments_of_a_command_line() -> None:
    arguments = prepare_server_args(
        ["--model-path", "somewhere", "--tp", "2", "--dp-size", "2", "--nccl-port", "9"]
    )
    assert (arguments.model_path, arguments.tp_size, arguments.dp_size) == ("somewhere", 2, 2)
    assert PortArgs.init_new(arguments).nccl_port == 9
    assert PortArgs.init_new(ServerArgs(model_path="somewhere")).nccl_port > 0
    with pytest.raises(SystemExit):
        prepare_server_args(["--model-path", "somewhere", "--no-such-flag"])


def test_the_module_that_is_run_is_the_command_line() -> None:
    command = [sys.executable, "-m", "sglang.launch_server", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=COMPAT_ENVIRONMENT)
    assert "--model-path" in shown.stdout
    assert "--enable-weights-cpu-backup" in shown.stdout


def test_what_serves_can_be_spawned_and_is_a_fastapi_application() -> None:
    arguments = ServerArgs(model_path="somewhere")
    assert pickle.loads(pickle.dumps((http_server.launch_server, arguments))) == (
        http_server.launch_server,
        arguments,
    )
    multiprocessing.get_context("spawn").Process(target=http_server.launch_server, args=(arguments,))
    assert isinstance(http_server.app, FastAPI)
    # By this class frameworks find the routes that they take away.
    paths = {route.path for route in http_server.app.routes if isinstance(route, APIRoute)}
    assert {
        "/generate",
        "/health",
        "/health_generate",
        "/update_weights_from_tensor",
        "/flush_cache",
    } <= paths
    state = http_server._GlobalState(tokenizer_manager=1, template_manager=2, scheduler_info=3)
    assert dataclasses.astuple(state) == (1, 2, 3)
    assert http_server.Engine is engine_module.Engine
    assert http_server.ServerArgs is ServerArgs


class Answering(BaseHTTPRequestHandler):
    """A server that knows a key."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer k" else 401)
        self.end_headers()

    def log_message(self, *told: object) -> None:
        pass


def test_a_server_of_ones_own_is_asked_directly_whatever_proxy_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr(urllib.request, "_opener", None)
    monkeypatch.setattr(http_server, "_WARMUP_TIMEOUT_S", 5.0)
    with HTTPServer(("127.0.0.1", 0), Answering) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        arguments = ServerArgs(model_path="somewhere", port=listening.server_port, api_key="k")
        has_answered = http_server._execute_server_warmup(arguments)
        listening.shutdown()
    assert has_answered


def test_adapters_must_say_everything_of_an_engine() -> None:
    class Half(EngineBase):
        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return None

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
    assert issubclass(engine_module.Engine, EngineBase)


def test_hooks_that_are_passed_on_say_what_starts_an_engine() -> None:
    parameters = inspect.signature(engine_module.Engine._launch_subprocesses).parameters
    for name in ("init_tokenizer_manager", "run_scheduler_process", "run_detokenizer_process"):
        assert f"{name}_func" in parameters
        with pytest.raises(NotImplementedError, match="_launch_subprocesses"):
            getattr(engine_module, name)()


def test_both_utils_are_one() -> None:
    import sglang.srt.utils as utils

    for name in PATHS["sglang.srt.utils.common"]:
        assert getattr(utils, name) is getattr(utils_common, name)
    assert_pkg_version("flashinfer_python", "99.0", "please upgrade")
    assert 0 < utils_common.get_open_port() < 65536
    assert utils_common.get_device(1) == ("cuda:1" if utils_common.is_cuda() else "cpu")
    assert utils_common.get_ip().count(".") == 3
    for nothing in (
        "set_prometheus_multiproc_dir",
        "maybe_set_triton_cache_manager",
        "suppress_noisy_warnings",
    ):
        assert getattr(utils, nothing)() is None
    utils.add_prometheus_middleware(http_server.app)


def test_nemo_rl_finds_its_entries_and_leaves_the_file_as_it_is() -> None:
    source = inspect.getsource(utils_common)
    for module in ("models.generation.sglang.utils.train_utils", "models.policy.torch_reductions_utils"):
        assert f'"nemo_rl.{module}."' in source


def test_a_tree_of_processes_is_killed_but_for_one() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT_OF_TWO], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    first, second = map(int, parent.stdout.readline().split())
    kill_process_tree(parent.pid, include_parent=False, skip_pid=second, wait_timeout=30)
    assert parent.poll() is None
    assert not _runs(first)
    assert _runs(second)
    kill_process_tree(parent.pid)
    assert parent.wait() < 0
    while _runs(second):
        time.sleep(0.01)
    parent.stdout.close()


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


def test_buckets_local_tensors_and_the_serializer() -> None:
    tensors = [("a", torch.arange(3, dtype=torch.float32)), ("b", torch.ones(2, 2, dtype=torch.bfloat16))]
    assert FlattenedTensorBucket.supports_multi_dtypes is True
    bucket = FlattenedTensorBucket(named_tensors=dict(tensors).items())
    metadata = bucket.get_metadata()
    assert {type(entry).__module__ for entry in metadata} == {"sglang.srt.weight_sync.tensor_bucket"}
    assert all(isinstance(entry, FlattenedTensorMetadata) for entry in metadata)
    again = FlattenedTensorBucket(flattened_tensor=bucket.get_flattened_tensor(), metadata=metadata)
    assert [name for name, _ in again.reconstruct_tensors()] == ["a", "b"]
    for arguments in ({}, {"metadata": metadata}, {"named_tensors": [], "metadata": metadata}):
        with pytest.raises(ValueError, match="named_tensors"):
            FlattenedTensorBucket(**arguments)
    local = LocalSerializedTensor(
        values=[MultiprocessingSerializer.serialize(tensor) for _, tensor in tensors]
    )
    assert torch.equal(local.get(1), tensors[1][1])
    text = MultiprocessingSerializer.serialize({"answer": 42}, output_str=True)
    assert text.startswith("gASV")
    assert MultiprocessingSerializer.deserialize(text) == {"answer": 42}


def test_a_loader_of_ones_own_writes_parameters_by_name() -> None:
    model = torch.nn.Linear(2, 3)
    _model_load_weights_direct(model, [("bias", torch.ones(3))])
    assert model.bias.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="scale: the model has no such parameter"):
        _model_load_weights_direct(model, [("scale", torch.ones(3))])
    with pytest.raises(ValueError, match=r"bias: expected shape \[3\], got \[1\]"):
        _model_load_weights_direct(model, [("bias", torch.zeros(1))])
    assert model.bias.tolist() == [1.0, 1.0, 1.0]


def test_the_patch_leaves_cpu_tensors_alone_and_may_be_repeated() -> None:
    monkey_patch_torch_reductions()
    monkey_patch_torch_reductions()
    assert reductions.reduce_tensor is _reduce_tensor_modified
    rebuild, _ = _reduce_tensor_modified(torch.zeros(2))
    assert rebuild is reductions.rebuild_tensor


def test_small_things(tmp_path: Path) -> None:
    tags = [
        constants.GPU_MEMORY_TYPE_KV_CACHE,
        constants.GPU_MEMORY_TYPE_WEIGHTS,
        constants.GPU_MEMORY_TYPE_CUDA_GRAPH,
    ]
    assert tags == ["kv_cache", "weights", "cuda_graph"]
    assert sorted(constants.GPU_MEMORY_ALL_TYPES) == sorted(tags)
    assert dumper.configure(enable=True) is None
    assert dumper.dump("name", torch.zeros(1), layer=3) is None
    DumperConfig(enable=True)
    assert _get_rank() == 0
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"function": {"name": "f"}}],
    }
    assert ChatCompletionRequest.model_validate(body).messages[0].role == "user"
    byte_level().hf.save_pretrained(tmp_path)
    assert get_tokenizer(str(tmp_path), trust_remote_code=True).encode("hello")


def test_calls_and_reasoning_are_found() -> None:
    tools = [Tool(function=Function(name="f"))]
    text = 'So: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    parser = FunctionCallParser(tools, "qwen25")
    assert parser.has_tool_call(text)
    plain, [item] = parser.parse_non_stream(text)
    assert (plain, item) == ("So: ", ToolCallItem(tool_index=0, name="f", parameters='{"a": 1}'))
    for name, bare in (("llama3", '{"name": "f", "parameters": {"a": 1}}'), ("pythonic", "[f(a=1)]")):
        assert FunctionCallParser(tools, name).parse_stream_chunk(bare) == ("", [item])
    pieces = [parser.parse_stream_chunk(text[:7])[0], *parser.parse_stream_chunk(text[7:])[1]]
    assert pieces == ["So: ", item]
    assert (parser.parse_stream_chunk(" <tool"), parser.finish()) == (("", []), ("<tool", []))
    named = {"type": "function", "function": {"name": "f"}}
    for choice in ("required", named):
        kind, schema = parser.get_structure_constraint(choice) or ("", {})
        assert (kind, schema["items"]["properties"]["name"]) == ("json_schema", {"enum": ["f"]})
    assert parser.get_structure_constraint("auto") is None
    with pytest.raises(ValueError, match="expected one of qwen, "):
        FunctionCallParser(tools, "x")
    reasoning = ReasoningParser("deepseek-r1")
    assert reasoning.detector.think_end_token == "</think>"
    assert reasoning.parse_non_stream("hmm</think>yes") == ("hmm", "yes")
    assert (reasoning.parse_stream_chunk("hm <"), reasoning.finish()) == (("hm ", ""), ("<", ""))
