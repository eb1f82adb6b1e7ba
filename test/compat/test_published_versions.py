"""Versions that a trainer publishes, served: by Stitch's Engine port, and by miles' contract over HTTP."""

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch
from fixtures.deadlines import HANG_S
from fixtures.published_deltas import publish
from fixtures.servers import Server
from safetensors.torch import load_file, save_file

PLUGIN = Path(__file__).parents[2] / "plugins" / "ebbtide-rollout"
PROMPT = [5, 6, 7]


class Kind(StrEnum):
    FULL, DELTA = "full", "delta"


@dataclass(frozen=True)
class Ref:
    """As Stitch's VersionRef."""

    run_id: str | None
    version: int

    @property
    def identity(self) -> str:
        return f"{self.run_id}/weight_v{self.version:06d}"


@dataclass(frozen=True)
class Manifest:
    ref: Ref
    kind: Kind


@pytest.fixture(scope="module")
def kind() -> Iterator[Any]:
    """The plugin's class, over a port of Stitch's that says nothing."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stitch", "stitch.engines", "stitch.engines.base"):
            patch.setitem(sys.modules, name, ModuleType(name))
        sys.modules["stitch.engines.base"].Engine = type("Engine", (), {})  # type: ignore[attr-defined]
        patch.syspath_prepend(PLUGIN)
        from ebbtide_stitch import EbbtideEngine

        yield EbbtideEngine


@pytest.fixture(scope="module")
def server(server_of_ids: Server) -> Server:
    return server_of_ids


@pytest.fixture
def engine(kind: Any, server: Server, tmp_path: Path) -> Any:
    engine = kind(str(server.client.base_url), str(tmp_path / "local"))
    asyncio.run(engine.reset())
    return engine


def moved(weights: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.where(torch.rand(one.shape, generator=generator) < 0.02, one + 1, one)
        for name, one in weights.items()
    }


@pytest.fixture(scope="module")
def store(checkpoints: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1, 2 and 4 are deltas, and 3 is whole. What 5 is a delta of was never there."""
    store, last = tmp_path_factory.mktemp("store"), load_file(checkpoints[0] / "model.safetensors")
    for version in range(1, 6):
        following = moved(last, version)
        if version == 3:
            folder = store / "weight_v000003"
            folder.mkdir()
            shutil.copy(checkpoints[0] / "config.json", folder)
            save_file(following, folder / "model.safetensors")
            index = {"metadata": {"version": "000003"}}
            index["weight_map"] = dict.fromkeys(following, "model.safetensors")
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        else:
            publish(store, version, moved(last, 9) if version == 5 else last, following)
        last = following
    return store


def stage(engine: Any, store: Path, version: int) -> Ref:
    ref = Ref("run", version)
    folder = store / f"weight_v{version:06d}"
    asyncio.run(engine.stage(Manifest(ref, Kind.FULL if version == 3 else Kind.DELTA), str(folder)))
    return ref


def commit(engine: Any, ref: Ref) -> None:
    async def commit() -> None:
        await engine.pause()
        try:
            await engine.commit(ref)
        finally:
            await engine.resume()

    asyncio.run(commit())


def generate(server: Server, **fields: Any) -> dict[str, Any]:
    params = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}
    answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": params, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def norm(server: Server) -> list[float]:
    asked = {"name": "model.layers.0.self_attn.k_proj.weight", "truncate_size": 1000}
    answer: list[float] = server.post("/get_weights_by_name", asked).json()
    return answer


def test_a_version_is_staged_while_the_old_one_serves_and_acknowledged_once_it_does(
    engine: Any, server: Server, store: Path
) -> None:
    before = norm(server)
    ref = stage(engine, store, 2)
    assert norm(server) == before
    assert generate(server)["meta_info"]["weight_version"] == "0"
    commit(engine, ref)
    assert norm(server) != before
    response = generate(server)
    engine.stamp_response(response, Ref("run", 1), Ref("run", 9))
    # What the engine knows goes before what the gate took it for.
    assert response["meta_info"]["weight_version_start"] == response["meta_info"]["weight_version_end"] == 2
    asyncio.run(engine.reset())
    assert norm(server) == before


def test_whole_checkpoints_and_deltas_on_top_of_them(engine: Any, server: Server, store: Path) -> None:
    commit(engine, stage(engine, store, 3))
    commit(engine, stage(engine, store, 4))
    one_by_one = norm(server)
    asyncio.run(engine.reset())
    # A replica that joins late.
    commit(engine, stage(engine, store, 4))
    assert norm(server) == one_by_one
    assert generate(server)["meta_info"]["weight_version"] == "4"


def test_another_lineage_and_missing_versions_are_refused_and_the_old_weights_serve(
    engine: Any, server: Server, store: Path
) -> None:
    commit(engine, stage(engine, store, 4))
    before = norm(server)
    with pytest.raises(RuntimeError, match="would be"):
        stage(engine, store, 5)
    with pytest.raises(RuntimeError, match="weight_v000006"):
        stage(engine, store, 6)
    with pytest.raises(RuntimeError, match="commit run/weight_v000006"):
        commit(engine, Ref("run", 6))
    assert norm(server) == before
    assert generate(server)["meta_info"]["weight_version"] == "4"


def test_prefixes_are_shared_within_a_version_only(engine: Any, server: Server) -> None:
    long = list(range(5, 70))

    def cached(version: int, **given: Any) -> int:
        request = {"input_ids": long, **given}
        engine.stamp_request(request, Ref("run", version))
        num: int = generate(server, **request)["meta_info"]["cached_tokens"]
        return num

    assert [cached(1) > 0, cached(1) > 0, cached(2) > 0] == [False, True, False]
    request = {"extra_key": ["a", None]}
    engine.stamp_request(request, Ref(None, 1))
    assert len(set(request["extra_key"])) == 2


def test_control_routes_are_not_for_clients_of_the_service(engine: Any) -> None:
    blocked = engine.blocked_routes()
    assert {"pause_generation", "update_weights_from_disk", "pull_weights", "sleep", "transition"} <= blocked
    assert not {"generate", "v1/completions", "health"} & blocked


class Service:
    """The rollout service over the server, without a socket. It looks for versions on request."""

    def __init__(self, server: Server, versions: Path) -> None:
        from ebbtide_rollout import RolloutService
        from ebbtide_versions import VersionedEngine

        self._url = str(server.client.base_url)
        self._make = lambda: RolloutService(VersionedEngine(self._url, str(versions / ".ebbtide")), versions)

    def play(self, *steps: Any) -> list[Any]:
        """Carry out steps: a coroutine function of the service, or the path and body of a request."""

        async def play() -> list[Any]:
            service, seen = self._make(), []
            transport = httpx.ASGITransport(service.application())
            async with httpx.AsyncClient(
                transport=transport, base_url="http://service", timeout=HANG_S
            ) as client:
                for step in steps:
                    if callable(step):
                        seen.append(await step(service))
                    else:
                        seen.append(await client.post(step[0], json=step[1]))
            return seen

        return asyncio.run(play())


GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


def asking(**accepted: int | None) -> tuple[str, dict[str, Any]]:
    given = {"weight_version": accepted} if accepted else {}
    return "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY, **given}


@pytest.fixture
def service(kind: Any, server: Server, tmp_path: Path, store: Path) -> Any:
    """Over a folder of its own, which versions 1 and 2 are in."""
    engine = kind(str(server.client.base_url), str(tmp_path / "notes"))
    asyncio.run(engine.reset())
    for version in (1, 2):
        shutil.copytree(store / f"weight_v{version:06d}", tmp_path / f"weight_v{version:06d}")
    return Service(server, tmp_path)


def test_requests_are_answered_by_versions_that_they_accept(service: Any) -> None:
    early, _, newest, exact, passed, ahead, chat = service.play(
        asking(),
        lambda service: service.catch_up(),
        asking(min_version=1),
        asking(exact_version=2, min_version=None),
        asking(exact_version=1),
        asking(min_version=3),
        (
            "/v1/completions",
            {"prompt": PROMPT, "max_tokens": 4, "weight_version": {"min_version": 2}},
        ),
    )
    # Nothing is sampled before it is known by what.
    assert (early.status_code, early.json()["error"]["retryable"]) == (409, True)
    meta = newest.json()["meta_info"]
    assert (meta["weight_version_start"], meta["weight_version_end"]) == (2, 2)
    assert exact.json()["output_ids"] == newest.json()["output_ids"]
    for refused, target in ((passed, 1), (ahead, 3)):
        error = refused.json()["error"]
        assert (refused.status_code, refused.headers["retry-after"]) == (409, "1")
        assert (error["type"], error["target_version"], error["applied"]) == (
            "WeightVersionNotReady",
            target,
            2,
        )
    assert (chat.status_code, chat.json()["weight_version_end"]) == (200, 2), chat.text


def test_what_the_service_cannot_answer_is_refused_in_a_line(service: Any) -> None:
    unknown = ("/generate", {"input_ids": PROMPT, "weight_version": {"version": 1}})
    words = ("/generate", {"input_ids": PROMPT, "weight_version": {"min_version": "1"}})
    answers = service.play(unknown, words, ("/generate", [1]), ("/generate", {"stream": True}))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert "min_version or exact_version" in answers[0].json()["error"]["message"]


def test_a_version_that_is_torn_or_published_twice_leaves_the_one_before_it(
    service: Any, server: Server, store: Path, tmp_path: Path
) -> None:
    async def tear(service: Any) -> str:
        shutil.copytree(store / "weight_v000004", tmp_path / "weight_v000004")
        with pytest.raises(RuntimeError, match="weight_v000003") as raised:
            await service.catch_up()
        return str(raised.value)

    async def publish_again(service: Any) -> str:
        shutil.rmtree(tmp_path / "weight_v000004")
        index = tmp_path / "weight_v000002" / "model.safetensors.index.json"
        index.write_text(index.read_text() + " ")
        with pytest.raises(RuntimeError, match="published twice") as raised:
            await service.catch_up()
        return str(raised.value)

    _, _, _, answer = service.play(
        lambda service: service.catch_up(), tear, publish_again, asking(exact_version=2)
    )
    assert answer.json()["meta_info"]["weight_version"] == "2"
