"""What a server says of itself, of how weights are kept."""

from pathlib import Path
from typing import Any

import pytest
from fixtures.checkpoints import edit_config, make_checkpoint
from fixtures.eight_bits import COMPRESSED_TENSORS, QUANTIZATION_CONFIG

from ebbtide.srt.config import resolve
from ebbtide.srt.entrypoints.information import arguments
from ebbtide.srt.entrypoints.vllm.routes import ServerInfoQuery, vllm_sections
from ebbtide.srt.server_args import ServerArgs

AS_JSON = ServerInfoQuery(config_format="json")


@pytest.mark.parametrize(
    ("stored", "given", "quantization", "excluded"),
    [
        (None, {}, None, None),
        (None, {"quantization": "fp8", "quantization_exclude": ["o_proj"]}, "fp8", ["o_proj"]),
        (QUANTIZATION_CONFIG, {}, "fp8", None),
        (COMPRESSED_TENSORS, {}, "w8a8_fp8", ["lm_head"]),
        (COMPRESSED_TENSORS, {"quantization_exclude": ["o_proj"]}, "w8a8_fp8", ["lm_head", "o_proj"]),
    ],
)
def test_what_a_checkpoint_is_kept_as_is_told_like_what_was_asked_for(
    stored: Any, given: Any, quantization: str | None, excluded: list[str] | None, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    if stored is not None:
        edit_config(folder, quantization_config=stored)
    config = resolve(ServerArgs(model_path=str(folder), **given))

    told = arguments(config, {})
    assert (told["quantization"], told["quantization_exclude"]) == (quantization, excluded)
    assert config.precision == {"weights": quantization or "float32", "kv_cache": "float32"}
    vllm_config = vllm_sections(config, AS_JSON)["vllm_config"]
    assert vllm_config["model_config"]["quantization"] == quantization
    assert vllm_config["cache_config"]["cache_dtype"] == "float32"


@pytest.mark.parametrize("given", ["auto", "fp8", "bf16"])
def test_the_kv_cache_has_one_name_wherever_it_is_told(given: str, tmp_path: Path) -> None:
    config = resolve(
        ServerArgs(model_path=str(make_checkpoint(tmp_path, "Qwen3ForCausalLM")), kv_cache_dtype=given)
    )
    told = {
        arguments(config, {})["kv_cache_dtype"],
        vllm_sections(config, AS_JSON)["vllm_config"]["cache_config"]["cache_dtype"],
        config.precision["kv_cache"],
    }
    assert told == {{"auto": "float32", "fp8": "fp8_e4m3", "bf16": "bfloat16"}[given]}


@pytest.mark.parametrize(("given", "told"), [("lpm", "lpm"), ("routing-key", "fcfs")])
def test_the_schedule_policy_that_is_in_force_is_told(given: str, told: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, "Qwen3ForCausalLM")
    config = resolve(ServerArgs(model_path=str(folder), schedule_policy=given))
    assert arguments(config, {})["schedule_policy"] == told
