"""Servers started from Python: by a framework's own launcher (`own_launcher.py`), and by `Runtime`."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import psutil
import pytest
import sglang
from fixtures.checkpoints import make_checkpoint, make_pair
from fixtures.compat import COMPAT_ENVIRONMENT
from fixtures.deadlines import HANG_S
from fixtures.servers import free_port, is_alive, wait_until

LAUNCHER = Path(__file__).parent / "own_launcher.py"
PROMPT = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4}}


def test_it_starts_serves_sleeps_updates_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = make_pair(tmp_path)
    port = free_port()
    command = [sys.executable, str(LAUNCHER), "--model-path", str(first), "--port", str(port)]
    command += ["--skip-tokenizer-init", "--max-total-tokens", "1024", "--log-level", "error"]
    process = subprocess.Popen(command, env=COMPAT_ENVIRONMENT)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as client:

        def is_up() -> bool:
            assert process.poll() is None, "the launcher has ended"
            try:
                return client.get("/health").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(is_up, "the server answers")
            before = client.post("/generate", json=PROMPT).json()["output_ids"]
            refused = client.get("/call_scheduler", params={"method": "report_weights"}).json()
            assert refused["success"] is False
            assert "run_own_scheduler_process does not run" in refused["message"]

            assert client.post("/release_memory_occupation", json={}).json()["changed"]
            assert client.post("/resume_memory_occupation", json={}).json()["weights"]["content"] == "stale"
            update = {"model_path": str(second), "weight_version": "1"}
            assert client.post("/update_weights_from_disk", json=update).json()["success"]
            after = client.post("/generate", json=PROMPT).json()
            assert after["meta_info"]["weight_version"] == "1"
            assert after["output_ids"] != before

            children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
            assert children
            process.send_signal(signal.SIGTERM)
            assert process.wait() == 0
            assert not any(is_alive(pid) for pid in children)
        finally:
            process.kill()
            process.wait()


def test_a_runtime_is_a_server_until_it_is_shut_down(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "a", "Qwen3ForCausalLM")
    runtime = sglang.Runtime(model_path=str(model), max_total_tokens=1024)
    try:
        answer = json.loads(runtime.generate("hello", {"max_new_tokens": 3, "ignore_eos": True}))
        assert answer["meta_info"]["completion_tokens"] == 3
        assert runtime.get_server_info()["port"] == runtime.server_args.port
        runtime.flush_cache()
        assert runtime.get_tokenizer().decode(answer["output_ids"])
        children = psutil.Process(runtime.pid).children(recursive=True)
    finally:
        runtime.shutdown()
    assert not any(is_alive(child.pid) for child in children)
    with pytest.raises(RuntimeError, match="ended while it started: exit code 1"):
        sglang.Runtime(model_path=str(tmp_path / "nowhere"))
