"""Who a request comes from, to those who share what is scarce among clients."""

from types import SimpleNamespace

import pytest
from starlette.requests import Request

from penstock.server.api.common import client_of
from penstock.server.config import ServerConfig
from penstock.server.http.access import TENANT


@pytest.mark.parametrize(
    ("api_keys", "tenant", "client"),
    [((), "", "10.0.0.1"), ((), "invented", "10.0.0.1"), (("k",), "of k", "of k")],
)
def test_a_client_is_told_by_a_key_only_where_keys_are_checked(
    api_keys: tuple[str, ...], tenant: str, client: str
) -> None:
    config = SimpleNamespace(server=ServerConfig(served_model_names=("m",), api_keys=api_keys))
    app = SimpleNamespace(state=SimpleNamespace(service=SimpleNamespace(config=config)))
    scope = {"type": "http", "app": app, "client": ("10.0.0.1", 5), TENANT: tenant}
    assert client_of(Request(scope)) == client
