"""SkyRL's Tinker server trains adapters and samples with an engine. Run it by `make test-tinker`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
import tinker
import torch
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from ebbtide.srt.hf_folder import folder_of

MODEL = str(folder_of("tiny"))
START_TIMEOUT_S = 300
NUM_TOKENS = 8
TEXTS = ("The tide comes in.", "The tide goes out.", "The moon pulls the sea.")
# SkyRL uses typing.TypedDict, but before Python 3.12 pydantic accepts only that of typing_extensions.
SHIM = "import typing, typing_extensions\ntyping.TypedDict = typing_extensions.TypedDict\n"


@contextmanager
def running(command: list[str], url: str, **environment: str) -> Iterator[str]:
    """Run a server; yields its base URL when it answers."""
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        until_s = time.monotonic() + START_TIMEOUT_S
        while not _answers(url):
            assert process.poll() is None, "the server did not start"
            assert time.monotonic() < until_s, "the server does not answer"
            time.sleep(0.2)
        yield url.rpartition("/api" if "/api" in url else "/")[0]
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=60).ok
    except requests.ConnectionError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder where the Tinker server unpacks adapters, and the engine finds them."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[str]:
    port = free_port()
    flags = ["--dtype", "float32", "--max-total-tokens", "8192", "--log-level", "error", "--device", "cpu"]
    # Fewer slots than adapters, so that unused ones are unloaded, and loaded again from the folder.
    lora = ["--lora-folder", str(folder), "--max-lora-rank", "8", "--max-loaded-loras", "2"]
    command = [sys.executable, "-m", "ebbtide", "serve", MODEL, "--port", str(port), *flags, *lora]
    with running(command, f"http://127.0.0.1:{port}/health") as url:
        yield url


@pytest.fixture(scope="module")
def service(
    engine: str, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tinker.ServiceClient]:
    own, port = tmp_path_factory.mktemp("tinker"), free_port()
    (own / "sitecustomize.py").write_text(SHIM if sys.version_info < (3, 12) else "")
    # The server needs uv, since it starts the training process by it.
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    assert uv is not None, "uv is missing: make test-tinker installs it"
    command = [uv, "run", "--no-project", "--python", sys.executable, "-m", "skyrl.tinker.api"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--base-model", MODEL, "--backend", "jax"]
    command += ["--backend-config", '{"max_lora_adapters": 2, "max_lora_rank": 8}']
    command += ["--checkpoints-base", str(own / "saved"), "--database-url", f"sqlite:///{own}/tinker.db"]
    command += ["--external-inference-url", engine, "--external-inference-lora-base", str(folder)]
    paths = os.pathsep.join(filter(None, (str(own), os.environ.get("PYTHONPATH"))))
    environment = {
        "PATH": f"{Path(uv).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": paths,
        "UV_OFFLINE": "1",
        "JAX_PLATFORMS": "cpu",
    }
    with running(command, f"http://127.0.0.1:{port}/api/v1/healthz", **environment) as url:
        yield tinker.ServiceClient(base_url=url, api_key="tml-local")


@dataclass(frozen=True)
class Trainer:
    client: tinker.TrainingClient

    @property
    def tokenize(self) -> Callable[[str], list[int]]:
        return self.client.get_tokenizer().encode

    def step(self, text: str) -> None:
        ids = self.tokenize(text)
        inputs: dict[str, Any] = {"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)}
        datum = types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)
        self.client.forward_backward([datum], "cross_entropy").result()
        self.client.optim_step(types.AdamParams(learning_rate=1e-2)).result()

    def save(self, name: str) -> str:
        path: str = self.client.save_weights_for_sampler(name=name).result().path
        return path


@pytest.fixture(scope="module")
def trainer(service: tinker.ServiceClient) -> Trainer:
    return Trainer(service.create_lora_training_client(base_model=MODEL, rank=8))


@dataclass(frozen=True)
class Said:
    tokens: list[int]
    logprobs: list[float]


def sample(client: tinker.SamplingClient, prompt: list[int]) -> Said:
    params = types.SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, seed=1)
    tokens = types.ModelInput.from_ints(prompt)
    [sequence] = client.sample(prompt=tokens, num_samples=1, sampling_params=params).result().sequences
    assert sequence.logprobs is not None
    return Said(list(sequence.tokens), list(sequence.logprobs))


def merged(adapter: Path | None) -> Any:
    """The base model in transformers, with an adapter merged into its weights; None: no adapter."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    if adapter is None:
        return model
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    scaling = config["lora_alpha"] / config["r"]
    for name, a in tensors.items():
        if ".lora_A." in name:
            module = name.removeprefix("base_model.model.").partition(".lora_A.")[0]
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            model.get_submodule(module).weight.data += scaling * (b.float() @ a.float())
    return model


def expected(model: Any, prompt: list[int]) -> Said:
    ids, logprobs = list(prompt), []
    with torch.no_grad():
        while len(logprobs) < NUM_TOKENS and (not logprobs or ids[-1] != model.config.eos_token_id):
            row = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)
            ids.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return Said(ids[len(prompt) :], logprobs)


def test_every_sampling_client_stays_with_the_adapter_of_its_path(
    service: tinker.ServiceClient, trainer: Trainer, folder: Path, engine: str
) -> None:
    prompt = trainer.tokenize("The tide")
    base = service.create_sampling_client(base_model=MODEL)
    clients, said = [base], [sample(base, prompt)]
    for index, text in enumerate(TEXTS):
        for _ in range(2):
            trainer.step(text)
        path = trainer.save(f"step-{index}")
        clients.append(service.create_sampling_client(model_path=path))
        said.append(sample(clients[-1], prompt))
    adapters = sorted(folder.iterdir())
    assert len(adapters) == len(TEXTS)
    references = [expected(merged(adapter), prompt) for adapter in (None, *adapters)]
    assert len({tuple(one.logprobs) for one in references}) == len(references), "training has changed nothing"
    for one, reference in zip(said, references, strict=True):
        assert one.tokens == reference.tokens
        assert one.logprobs == pytest.approx(reference.logprobs, abs=1e-3)
    # In an order that makes the engine, which may hold two, unload and reload each adapter.
    assert [sample(client, prompt) for client in clients] == said
    cards = requests.get(f"{engine}/v1/models", timeout=60).json()["data"]
    assert len(cards) == 1 + 2
