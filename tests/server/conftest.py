"""Fixtures for tests of the server."""

import pytest

from penstock.server.config import ServeConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeConfig]:
    """The configurations that `penstock serve` would have started."""
    configs: list[ServeConfig] = []

    def serve(config: ServeConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr("penstock.server.app.serve", serve)
    return configs
