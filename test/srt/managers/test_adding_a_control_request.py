"""A control request costs three files: struct with row, handler, method. Done to a copy of the package."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ebbtide

STRUCTS = '''
class CountQueuedReqOutput(Reply, frozen=True, kw_only=True):
    num_queued: Annotated[int, merge.PER_REPLICA]
    num_ranks: Annotated[int, merge.SHARE]


class CountQueuedReqInput(ControlRequest, frozen=True):
    """Count what waits."""

    row = ControlRow(CountQueuedReqOutput, "/count_queued", POST_OR_GET, is_admin=False, op="count_queued")

    at_least: int = 0


# ---------------------------------------------------------------------------------------- generation state
'''
HANDLER = """
    def count_queued(self, request: io_struct.CountQueuedReqInput) -> AnyReply:
        num_queued = max(self._requests.num_queued, request.at_least)
        return io_struct.CountQueuedReqOutput(num_queued=num_queued, num_ranks=1)

    def resume(self,"""
METHOD = """
    async def async_count_queued(self, at_least: int = 0) -> dict[str, Any]:
        return await self._control(io_struct.CountQueuedReqInput, at_least=at_least)

    count_queued = blocking(async_count_queued)

    async def async_continue_generation(self)"""
SCRIPT = """
import asyncio, json, sys
import httpx
from ebbtide.srt.entrypoints.http_server import create_app
from ebbtide.srt.entrypoints.openapi import openapi_document
from ebbtide.testing.null_engine import NullEngine

class Engine(NullEngine):
    async def over_http(self):
        transport = httpx.ASGITransport(app=create_app(self._service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return {
                "posted": (await client.post("/count_queued", json={"at_least": 3})).json(),
                "queried": (await client.get("/count_queued?at_least=4")).json(),
                "paused": (await client.post("/pause_generation")).status_code,
                "refused": (await client.post("/count_queued", json={"at_least": "many"})).json()["message"],
            }

if __name__ == "__main__":
    with Engine(dp_size=2, admin_api_key="only for what changes something") as engine:
        answers = engine._wait(engine.over_http())
        answers["called"] = engine.count_queued(at_least=2)
        answers["step"] = engine.transition([{"op": "count_queued", "at_least": 5}])["steps"][0]["reply"]
    answers["described"] = openapi_document()["paths"]["/count_queued"]["post"]
    print(json.dumps(answers))
"""


def edit(path: Path, changes: dict[str, str]) -> None:
    text = path.read_text()
    for old, new in changes.items():
        assert text.count(old) == 1, (path, old)
        text = text.replace(old, new)
    path.write_text(text)


def test_it_is_asked_described_and_merged_with_no_further_edit(tmp_path: Path) -> None:
    package = tmp_path / "ebbtide"
    shutil.copytree(Path(ebbtide.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    edit(
        package / "srt/managers/io_struct.py",
        {
            f"\n{STRUCTS.splitlines()[-1]}\n": STRUCTS,
            "    | PingReqInput\n": "    | PingReqInput\n    | CountQueuedReqInput\n",
            "    | PingReqOutput\n": "    | PingReqOutput\n    | CountQueuedReqOutput\n",
        },
    )
    edit(
        package / "srt/managers/control/pause.py",
        {
            "\nfrom ebbtide.srt.managers.io_struct import": "\nfrom ebbtide.srt.managers import io_struct"
            "\nfrom ebbtide.srt.managers.io_struct import",
            "            AbortReq: self.abort,\n": "            AbortReq: self.abort,\n"
            "            io_struct.CountQueuedReqInput: self.count_queued,\n",
            "\n    def resume(self,": HANDLER,
        },
    )
    edit(
        package / "srt/entrypoints/engine.py",
        {"\n    async def async_continue_generation(self)": METHOD},
    )
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    answers = json.loads(done.stdout)

    def counted(num_queued: int) -> dict[str, object]:
        return {"success": True, "message": "", "num_queued": num_queued, "num_ranks": 2}

    # Of two replicas of one rank; what is made of the replies of ranks: wire/test_reply_merging.py.
    assert answers["posted"] == counted(6)
    assert answers["queried"] == counted(8)
    assert answers["called"] == counted(4)
    assert answers["step"] == counted(10)
    # Without the admin key, which this one does not need.
    assert answers["paused"] == 401
    assert "Expected `int`, got `str` - at `$.at_least`" in answers["refused"]
    assert answers["described"]["summary"] == "Count what waits."
