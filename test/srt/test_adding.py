"""What CONTRIBUTING.md says it takes to add something: done to a copy of the package, in no other files."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ebbtide

ROOT = Path(__file__).resolve().parents[2]
# As patches without line numbers: the lines of each place that are not new are there once.
ADDITIONS = {
    "a control request": """
--- managers/io_struct.py
@@
+class CountQueuedReqOutput(Reply, frozen=True, kw_only=True):
+    num_queued: Annotated[int, merge.PER_REPLICA]
+    num_ranks: Annotated[int, merge.SUM]
+
+
+class CountQueuedReqInput(ControlRequest, frozen=True):
+    '''Count what waits.'''
+
+    row = ControlRow(CountQueuedReqOutput, "/count_queued", POST_OR_GET, op="count_queued")
+
+    at_least: int = 0
+
+
 # ---------------------------------------------------------------------------------------- generation state
@@
     | PingReqInput
+    | CountQueuedReqInput
@@
     | PingReqOutput
+    | CountQueuedReqOutput
--- managers/control/pause.py
@@
+from ebbtide.srt.managers import io_struct
 from ebbtide.srt.managers.io_struct import (
@@
             AbortReq: self.abort,
+            io_struct.CountQueuedReqInput: self.count_queued,
@@
+    def count_queued(self, request: io_struct.CountQueuedReqInput) -> AnyReply:
+        num_queued = max(self._requests.num_queued, request.at_least)
+        return io_struct.CountQueuedReqOutput(num_queued=num_queued, num_ranks=1)
+
     def resume(self,
--- entrypoints/engine_methods.py
@@
+    async def async_count_queued(self, at_least: int = 0) -> dict[str, Any]:
+        return await self._control(io_struct.CountQueuedReqInput, locals())
+
+    count_queued = blocking(async_count_queued)
+
     async def async_continue_generation(self)
""",
    # Ends an output behind a token that is a multiple of it.
    "a sampling parameter": """
--- sampling_params.py
@@
+    stop_multiple: int | None = _field(None, _integer(1, "an integer ≥ 1"))
     ignore_eos: bool = _field(
--- managers/scheduling/output_processor.py
@@
+        if spec.params.stop_multiple and token_id % spec.params.stop_multiple == 0:
+            return FinishReason("stop", matched=token_id)
         if req.stop_strings is not None:
--- managers/scheduling/running_rows.py
@@
-        self.is_followed[row] = req.stop_strings is not None or spec.mask is not None
+        self.is_followed[row] = bool(req.stop_strings or spec.mask or spec.params.stop_multiple)
""",
    "a number in `meta_info`": """
--- managers/wire/generation.py
@@
     num_nonfinite: int = 0
+    num_evens: int = 0
--- managers/scheduling/output_processor.py
@@
             num_nonfinite=req.num_nonfinite,
+            num_evens=sum(token % 2 == 0 for token in req.spec.output_ids),
--- managers/api/output_state.py
@@
         self._num_nonfinite = 0
+        self._num_evens = 0
@@
         self._num_nonfinite = output.num_nonfinite
+        self._num_evens = output.num_evens
@@
             meta["num_nonfinite"] = self._num_nonfinite
+            meta["num_evens"] = self._num_evens
--- entrypoints/bodies.py
@@
     num_nonfinite: int | UnsetType = UNSET
+    num_evens: int | UnsetType = UNSET
""",
    "an attention backend": """
--- layers/attention/foo.py
@@
+from ebbtide.srt.layers.attention.torch_native import TorchNativeAttention
+
+
+class FooAttention(TorchNativeAttention):
+    '''Attends to nothing.'''
+
+    def forward(self, layer, qkv_TNH, rope, norms):
+        return super().forward(layer, qkv_TNH, rope, norms).zero_()
--- layers/attention/registry.py
@@
+from ebbtide.srt.layers.attention.foo import FooAttention
 from ebbtide.srt.layers.attention.torch_native import
@@
     "triton": TritonAttention,
+    "foo": FooAttention,
""",
    "a model": """
--- models/foo.py
@@
+from ebbtide.srt.models.qwen import Qwen3ForCausalLM
+
+
+class FooForCausalLM(Qwen3ForCausalLM):
+    '''The least likely token of Qwen3 is its most likely one.'''
+
+    def logits(self, hidden_TD, kernels):
+        return -super().logits(hidden_TD, kernels)
--- models/registry.py
@@
     "LlamaForCausalLM": "llama",
+    "FooForCausalLM": "foo",
""",
}
# With three of them, on two replicas.
SCRIPT = """
import json, sys
import httpx
from fixtures.model_runs import RunnerDriver
from ebbtide.srt.entrypoints.http_server import create_app
from ebbtide.srt.entrypoints.openapi import openapi_document
from ebbtide.srt.layers.attention.registry import name_of
from ebbtide.testing.null_engine import NullEngine

GIVEN = {"stop_multiple": 5, "max_tokens": 99}
STOPPING = {
    "/generate": {"input_ids": [1], "sampling_params": {"stop_multiple": 5, "sampling_seed": 1}},
    "/v1/completions": {"model": "null", "prompt": [1], "seed": 1, "return_token_ids": True, **GIVEN},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"seed": 1, **GIVEN}},
}

class Engine(NullEngine):
    async def over_http(self):
        transport = httpx.ASGITransport(app=create_app(self._service))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            async def post(path, **body):
                return (await client.post(path, json=body)).json()

            return {
                "posted": await post("/count_queued", at_least=3),
                "queried": (await client.get("/count_queued?at_least=4")).json(),
                "refused": (await post("/count_queued", at_least="many"))["message"],
                "stopped": {path: await post(path, **body) for path, body in STOPPING.items()},
                "refused_too": (await post(
                    "/generate", input_ids=[1], sampling_params={"stop_multiple": 0}
                ))["message"],
            }

if __name__ == "__main__":
    with Engine(dp_size=2) as engine:
        answers = engine._runner.wait(engine.over_http())
        answers["called"] = engine.count_queued(at_least=2)
        answers["step"] = engine.transition([{"op": "count_queued", "at_least": 5}])["steps"][0]["reply"]
        params = {"max_new_tokens": 9, "sampling_seed": 1}
        answers["generated"] = engine.generate(input_ids=[1], sampling_params=params)
    document = openapi_document()
    schemas = document["components"]["schemas"]
    answers["summary"] = document["paths"]["/count_queued"]["post"]["summary"]
    kinds = ("SamplingParams", "CompletionRequest", "ChatCompletionRequest")
    answers["minima"] = [schemas[kind]["properties"]["stop_multiple"]["minimum"] for kind in kinds]
    answers["num_evens"] = schemas["MetaInfo"]["properties"]["num_evens"]
    answers["runs"] = []
    for path, backend in zip(sys.argv[1::2], sys.argv[2::2]):
        driver = RunnerDriver(path, attention_backend=backend)
        run = driver.start([1, 2, 3])
        driver.generate([run], 2)
        kinds = type(driver.runner.model).__name__, name_of(driver.runner.attention)
        answers["runs"].append([*kinds, run.output_ids])
    print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, checkpoints: tuple[Path, Path]) -> Any:
    """What the script prints, run with a copy of the package that has all of them."""
    copied = tmp_path_factory.mktemp("copied")
    package = Path(ebbtide.__file__).parent
    shutil.copytree(package, copied / "ebbtide", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ADDITIONS:
        add(name, copied)
    (script := copied / "script.py").write_text(SCRIPT)
    known, new = checkpoints[0], copied / "foo"
    shutil.copytree(known, new)
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    environment = {**os.environ, "PYTHONPATH": f"{copied}{os.pathsep}{ROOT / 'test' / 'srt'}"}
    runs = [(known, "torch_native"), (new, "torch_native"), (known, "foo")]
    command = [sys.executable, str(script), *(str(argument) for run in runs for argument in run)]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def edits(name: str) -> dict[str, list[tuple[str, str]]]:
    """Of an addition, by file: texts that are there, and what stands in their places."""
    found: dict[str, list[tuple[str, str]]] = {}
    for part in ADDITIONS[name].split("\n--- ")[1:]:
        file, *places = part.rstrip("\n").split("\n@@\n")
        lines = [place.split("\n") for place in places]
        there = ["\n".join(line[1:] for line in place if line[0] != "+") for place in lines]
        then = ["\n".join(line[1:] for line in place if line[0] != "-") for place in lines]
        found[file] = list(zip(there, then, strict=True))
    return found


def add(name: str, copied: Path) -> None:
    for file, changes in edits(name).items():
        path = copied / "ebbtide" / "srt" / file
        text = path.read_text() if path.exists() else ""
        for old, new in changes:
            assert old == text == "" or text.count(f"\n{old}") == 1, (path, old)
            text = text.replace(f"\n{old}", f"\n{new}") if text else new
        path.write_text(text)


def test_the_table_names_these_files() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (an? .+?) \| (.+) \|$", table, re.M))
    for name in ADDITIONS:
        assert set(re.findall(r"`(\S+\.py)`", rows[name])) == edits(name).keys(), name


def test_a_control_request_is_asked_described_and_merged(answers: Any) -> None:
    def counted(num_queued: int) -> dict[str, object]:
        return {"success": True, "message": "", "num_queued": num_queued, "num_ranks": 2}

    # Of two replicas of one rank; what is made of the replies of ranks: wire/test_merging.py.
    assert answers["posted"] == counted(6)
    assert answers["queried"] == counted(8)
    assert answers["called"] == counted(4)
    assert answers["step"] == counted(10)
    assert "Expected `int`, got `str` - at `$.at_least`" in answers["refused"]
    assert answers["summary"] == "Count what waits."


def test_a_sampling_parameter_is_checked_and_acts_in_every_dialect(answers: Any) -> None:
    stopped = answers["stopped"]
    ids = stopped["/generate"]["output_ids"]
    assert 1 < len(ids) < 99
    assert [token % 5 == 0 for token in ids] == [False] * (len(ids) - 1) + [True]
    assert stopped["/v1/completions"]["choices"][0]["token_ids"] == ids
    assert stopped["/inference/v1/generate"]["choices"][0]["token_ids"] == ids
    assert "stop_multiple: expected an integer ≥ 1, got 0" in answers["refused_too"]
    assert answers["minima"] == [1, 1, 1]


def test_a_number_in_meta_info_is_told_and_described(answers: Any) -> None:
    generated = answers["generated"]
    told = generated["meta_info"]["num_evens"]
    assert 0 < told == sum(token % 2 == 0 for token in generated["output_ids"])
    assert answers["num_evens"] == {"type": "integer"}


def test_a_model_and_an_attention_backend_serve(answers: Any) -> None:
    assert [run[:2] for run in answers["runs"]] == [
        ["Qwen3ForCausalLM", "torch_native"],
        ["FooForCausalLM", "torch_native"],
        ["Qwen3ForCausalLM", "foo"],
    ]
    # Each of the two changes what comes out.
    assert len({tuple(ids) for *_, ids in answers["runs"]}) == 3
