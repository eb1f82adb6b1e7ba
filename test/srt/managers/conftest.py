"""Tests on the scheduler harness hold with and without overlapping steps."""

import pytest

from ebbtide.testing import harness


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if any(hasattr(metafunc.module, name) for name in ("SchedulerHarness", "Harness")):
        metafunc.parametrize("overlap", [False, True], ids=["in-turn", "overlap"], indirect=True)


# Ahead of all fixtures that make a harness.
@pytest.fixture(autouse=True)
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the harness launches a step before it commits the one before."""
    monkeypatch.setattr(harness, "OVERLAP", getattr(request, "param", False))
