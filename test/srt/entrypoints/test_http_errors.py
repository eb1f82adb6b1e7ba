"""What the application answers when the engine behind it fails, without an engine."""

from types import SimpleNamespace
from typing import Any

import pytest
from fixtures.application import ask

from ebbtide.srt.errors import EngineError
from ebbtide.srt.server_args import ServerArgs


class FailingService:
    """Stands in for `EngineService`: everything that is asked of it raises."""

    def __init__(self, error: Exception, *, is_down: bool) -> None:
        self.is_down = is_down
        self.tracing = None
        self.config = SimpleNamespace(server_args=ServerArgs(model_path="none"))
        self.manager = SimpleNamespace(prepare=self.fail)
        self._error = error

    def fail(self, *arguments: Any, **named: Any) -> Any:
        raise self._error

    async def answer(self, *arguments: Any) -> Any:
        raise self._error

    check_health = check_generation = memory_occupation = server_info = answer


PATHS = [
    ("POST", "/generate"),
    ("POST", "/pause_generation"),
]


@pytest.mark.parametrize(("method", "path"), PATHS)
@pytest.mark.parametrize(
    ("is_down", "status", "kind"),
    [(False, 500, "InternalServerError"), (True, 503, "ServiceUnavailableError")],
)
def test_a_failure_of_the_engine_is_500_and_503_once_it_is_down(
    method: str, path: str, is_down: bool, status: int, kind: str
) -> None:
    service = FailingService(EngineError("rank 0: it broke"), is_down=is_down)
    response = ask(service, method, path)
    error = {"message": "rank 0: it broke", "type": kind, "param": None, "code": status}
    assert response.status_code == status
    assert response.json() == {"success": False, "message": "rank 0: it broke", "error": error}


@pytest.mark.parametrize(("method", "path"), PATHS)
def test_an_error_of_ours_is_500_in_the_one_shape(method: str, path: str) -> None:
    response = ask(FailingService(ZeroDivisionError("by zero"), is_down=False), method, path)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == f"{path} failed: ZeroDivisionError: by zero"


@pytest.mark.parametrize("path", ["/health", "/health_generate"])
def test_an_engine_that_does_not_answer_is_unhealthy(path: str) -> None:
    response = ask(FailingService(EngineError("no reply within 20 s"), is_down=False), "GET", path)
    assert response.status_code == 503
    assert response.json()["message"] == "no reply within 20 s"
