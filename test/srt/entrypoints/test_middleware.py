"""Keys, and pages of other sites: which endpoint needs what, and that nothing is read or done without."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fixtures.application import Client, ask
from starlette.types import Message

from ebbtide.srt.argument_checks import PATH_FOLDERS
from ebbtide.srt.entrypoints.http_server import create_app
from ebbtide.srt.entrypoints.middleware import Access, access_of
from ebbtide.srt.entrypoints.routes import CONTROL_ROUTES, NOT_IMPLEMENTED
from ebbtide.srt.entrypoints.service import ControlAnswer
from ebbtide.srt.server_args import ServerArgs
from ebbtide.testing.null_engine import NullEngine

OPEN = ["/health", "/liveness", "/health_generate", "/ready", "/metrics"]
NORMAL = ["/generate", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/loads", "/get_load"]
NORMAL += ["/model_info", "/get_model_info", "/server_info", "/get_server_info"]
NORMAL += ["/get_weight_version", "/memory_occupation", "/tokenize", "/v1/tokenize", "/detokenize"]
NORMAL += ["/is_paused", "/is_sleeping", "/weight_info", "/get_world_size", "/get_world_size/", "/version"]
NORMAL += ["/load", "/inference/v1/generate", "/skyrl/v1/generate"]
CONTROL = [*CONTROL_ROUTES, "/transition", "/nowhere", "/weights_checker"]
CONTROL += ["/pause", "/sleep/", "/collective_rpc", "/inference/v1/abort_requests", "/update_weights"]
CONTROL += [path for path in NOT_IMPLEMENTED if not path.startswith("/v1/")]


class Service:
    """Stands in for `EngineService`: takes note of what gets through to it."""

    def __init__(self, **args: Any) -> None:
        self.is_down = False
        self.tracing = None
        self.config = SimpleNamespace(server_args=ServerArgs(model_path="none", **args))
        self.asked: list[str] = []
        self.manager = SimpleNamespace(prepare=lambda fields: self.ask("generate"))
        self.state = SimpleNamespace(weight_version="7")

    def ask(self, what: str) -> Any:
        self.asked.append(what)
        raise ZeroDivisionError

    async def answer(self, kind: type, fields: Any) -> ControlAnswer:
        self.asked.append(kind.__name__)
        return ControlAnswer({"success": True, "message": ""})


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def test_every_endpoint_has_the_access_that_it_should_have() -> None:
    assert {access_of(path) for path in OPEN} == {Access.OPEN}
    assert {access_of(path) for path in NORMAL} == {Access.NORMAL}
    assert {access_of(path) for path in CONTROL} == {Access.CONTROL}


@pytest.mark.parametrize("prefix", ["", "/engines/a"])
def test_a_path_below_that_of_a_proxy_is_the_path_without_it(prefix: str) -> None:
    args = {"root_path": "/engines/a", "api_key": "api", "admin_api_key": "admin"}
    for path, key, status in (
        ("/docs", None, 200),
        ("/dashboard/", None, 200),
        ("/get_weight_version", None, 401),
        ("/get_weight_version", "api", 200),
        ("/continue_generation", "api", 401),
        ("/nowhere", "admin", 404),
    ):
        method = "POST" if path == "/continue_generation" else "GET"
        assert ask(Service(**args), method, prefix + path, bearer(key)).status_code == status, path
    document = ask(Service(**args), "GET", f"{prefix}/openapi.json").json()
    assert document["servers"] == [{"url": "/engines/a"}]
    page = ask(Service(**args), "GET", "/engines/a")
    assert (page.status_code, page.headers["location"]) == (307, "/engines/a/")
    assert ask(Service(**args), "GET", "/engines/ab", bearer("admin")).status_code == 404


def test_the_servers_own_paths_are_those_that_a_proxy_may_not_have() -> None:
    paths = [route.path.split("/")[1:] for route in create_app(cast(Any, Service())).routes]  # type: ignore[attr-defined]
    assert {first for first, *others in paths if others} == set(PATH_FOLDERS)


@pytest.mark.parametrize("path", ["/get_weight_version", "/continue_generation", "/nowhere"])
def test_an_id_of_a_request_comes_back(path: str) -> None:
    service = Service(enable_request_id_headers=True, admin_api_key="admin")
    header, longest = "X-Request-Id", "a b~" * 32
    assert ask(service, "GET", path, {header: longest}).headers[header] == longest
    made = [ask(service, "GET", path, headers).headers[header] for headers in ({}, {header: ""})]
    assert len({*made, ""}) == 3
    assert header not in ask(Service(), "GET", path, {header: "a"}).headers
    for wrong in ("a" * 129, "caf\xe9", "a\tb"):
        refused = ask(service, "GET", path, {header: wrong.encode("latin-1")})
        assert (refused.status_code, header in refused.headers) == (400, False)
        assert "X-Request-Id: expected 1 to 128 printable ASCII characters" in refused.json()["message"]


# (api key, admin key) → per access, the key that is needed.
TABLE = [
    (None, None, None, None),
    ("api", None, "api", "api"),
    (None, "admin", None, "admin"),
    ("api", "admin", "api", "admin"),
]
PATHS = [("GET", "/docs/favicon.png"), ("GET", "/get_weight_version"), ("POST", "/continue_generation")]


@pytest.mark.parametrize(("api", "admin", "normal", "control"), TABLE)
def test_the_table_of_keys(
    api: str | None, admin: str | None, normal: str | None, control: str | None
) -> None:
    for (method, path), needed in zip(PATHS, (None, normal, control), strict=True):
        for given in (None, "None", "api", "admin", "wrong"):
            service = Service(api_key=api, admin_api_key=admin)
            response = ask(service, method, path, bearer(given))
            is_let_in = needed is None or given == needed
            assert response.status_code == (200 if is_let_in else 401), (path, given)
            if not is_let_in:
                assert service.asked == []
                assert response.headers["WWW-Authenticate"] == "Bearer"
                name = "API key" if needed == "api" else "admin key"
                message = f"{path} needs the {name}: Authorization: Bearer KEY"
                error = {"message": message, "type": "AuthenticationError", "param": None, "code": 401}
                assert response.json() == {"success": False, "message": message, "error": error}


@pytest.mark.parametrize(
    ("name", "header", "status"),
    [
        ("Authorization", "Bearer clé", 200),
        ("Authorization", "bearer  clé ", 200),
        ("Authorization", "Bearer cle", 401),
        ("Authorization", "Bearer clé2", 401),
        ("Authorization", "Bearer cl", 401),
        ("Authorization", "Bearer", 401),
        ("Authorization", "Basic clé", 401),
        ("Authorization", "clé", 401),
        ("Authorization", "", 401),
        # Anthropic's clients.
        ("X-Api-Key", "clé", 200),
        ("X-Api-Key", "cle", 401),
        ("X-Api-Key", "", 401),
    ],
)
def test_the_header_must_be_right_to_the_letter(name: str, header: str, status: int) -> None:
    headers: Any = [(name.encode(), header.encode())]
    assert ask(Service(api_key="clé"), "GET", "/get_weight_version", headers).status_code == status
    refused = ask(Service(api_key="key"), "POST", "/v1/messages", headers)
    assert refused.json()["error"]["type"] == "authentication_error"


def test_without_its_key_a_body_is_not_read() -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was asked for")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/pause_generation",
        "headers": [],
        "query_string": b"",
    }
    service: Any = Service(admin_api_key="admin")
    asyncio.run(create_app(service)(scope, receive, send))
    assert sent[0]["status"] == 401


CHROME = {"User-Agent": "Mozilla/5.0 (X11; Linux x86_64) Chrome/156.0"}
CURL, TRAINER = {"User-Agent": "curl/8.5.0"}, {"User-Agent": "python-requests/2.32.0"}
IMAGE = {**CHROME, "Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
NEIGHBOUR = {**CHROME, "Sec-Fetch-Site": "same-site", "Origin": "http://localhost:8888"}
FORM = {**CHROME, "Origin": "https://evil.example", "Content-Type": "text/plain"}
OWN_PAGE = {**CHROME, "Sec-Fetch-Site": "same-origin", "Origin": "http://localhost"}
TYPED = {**CHROME, "Sec-Fetch-Site": "none"}


@pytest.mark.parametrize(
    ("method", "headers", "status"),
    [
        *(("GET", headers, 200) for headers in (CURL, TRAINER, OWN_PAGE, TYPED)),
        *(
            ("POST", headers, 200)
            for headers in (CURL, TRAINER, OWN_PAGE, {**FORM, "Origin": "http://localhost"})
        ),
        *(("GET", headers, 403) for headers in (IMAGE, NEIGHBOUR, FORM, {**IMAGE, "Sec-Fetch-Site": "new"})),
        *(("POST", headers, 403) for headers in (IMAGE, NEIGHBOUR, FORM, {**FORM, "Origin": "null"})),
        # To an address of another machine a browser says nothing of where a GET comes from.
        ("GET", CHROME, 403),
        ("POST", CHROME, 200),
        *(("HEAD", headers, 405) for headers in (CURL, CHROME, IMAGE)),
    ],
)
def test_a_page_of_another_site_changes_nothing(method: str, headers: dict[str, str], status: int) -> None:
    path, service = "/flush_cache", Service()
    assert ask(service, method, path, headers).status_code == status
    assert bool(service.asked) == (status == 200)
    # It cannot bring a key, and whoever does is not such a page.
    service = Service(api_key="key")
    assert ask(service, method, path, headers).status_code == (405 if method == "HEAD" else 401)
    assert service.asked == []
    assert ask(service, method, path, {**headers, **bearer("key")}).status_code == (
        405 if method == "HEAD" else 200
    )


@pytest.mark.parametrize("path", ["/generate", "/dashboard", "/nowhere"])
def test_a_page_of_another_site_is_refused_everywhere(path: str) -> None:
    response = ask(Service(), "POST", path, IMAGE)
    assert response.status_code == 403
    assert response.json()["error"]["type"] == "PermissionDeniedError"


def test_a_page_of_a_host_that_is_allowed_may_ask() -> None:
    page = {**IMAGE, "Sec-Fetch-Site": "cross-site", "Origin": "https://Tools.example:8443"}
    for allowed, status in ((None, 403), (["*"], 403), (["tools.example"], 200), (["TOOLS.example"], 200)):
        service = Service(allowed_hosts=allowed)
        assert ask(service, "POST", "/pause_generation", page).status_code == status, allowed


ADDRESSES = ["10.0.3.7:80", "[::1]:30000", "localhost:5", "a.localhost", "LocalHost."]
OTHERS = ["evil.example:30000", "engine", "127.0.0.1.evil.example", "127.1", "[::1", "a@b@", "?"]


@pytest.mark.parametrize(
    ("args", "hosts", "status"),
    [
        ({}, ADDRESSES, 200),
        ({}, OTHERS, 403),
        ({"admin_api_key": "key"}, OTHERS, 403),
        # A page does not know the key.
        ({"api_key": "key"}, OTHERS, 200),
        # Services of Kubernetes, hosts of Ray: the operator has said that whoever reaches it is trusted.
        ({"host": "0.0.0.0", "allow_unauthenticated_control": True}, OTHERS, 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["Engine"]}, ["engine:80", "ENGINE", *ADDRESSES], 200),
        ({"host": "0.0.0.0", "allowed_hosts": ["engine"]}, ["engine.evil.example", "evil.example"], 403),
        ({"host": "Node-3"}, ["node-3:30000", "evil.example"], 200),
        ({"allowed_hosts": ["*"]}, OTHERS, 200),
    ],
)
def test_a_server_without_keys_is_asked_by_names_that_nobody_else_can_have(
    args: dict[str, Any], hosts: list[str], status: int
) -> None:
    for host in hosts:
        response = ask(Service(**args), "GET", "/get_weight_version", {"Host": host, **bearer("key")})
        assert response.status_code == status, (host, response.text)
        if status == 403:
            assert "--allowed-hosts" in response.json()["message"]


def test_whether_a_server_lives_is_told_to_anybody() -> None:
    service = Service()
    service.check_health = lambda: asyncio.sleep(0)  # type: ignore[attr-defined]
    assert ask(service, "GET", "/health", {**IMAGE, "Host": "evil.example"}).status_code == 200


def test_an_engine_keeps_its_keys_to_itself(capfd: pytest.CaptureFixture[str]) -> None:
    keys = ("reader-8f3a", "trainer-91cc")
    with NullEngine(api_key=keys[0], admin_api_key=keys[1], log_level="info") as engine:
        client = Client(engine)
        info = client.send("GET", "/server_info", headers=bearer(keys[0]))
        assert (info.json()["api_key"], info.json()["admin_api_key"]) == ("***", "***")
        assert client.send("POST", "/pause_generation", headers=bearer(keys[0])).status_code == 401
        assert client.send("POST", "/pause_generation", headers=bearer(keys[1])).status_code == 200
        logged = capfd.readouterr()
        for text in (info.text, logged.out, logged.err):
            assert not any(key in text for key in keys)
