"""A server's address as people type it."""

import pytest

from penstock.loadtest.command_line import root_url
from penstock.scheduler.errors import InvalidConfig


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://a.example/metrics", "http://a.example"),
        ("https://a.example/llm/v1/", "https://a.example/llm"),
        ("http://[::1]:8000", "http://[::1]:8000"),
    ],
)
def test_an_address_may_be_written_in_many_ways(given: str, url: str) -> None:
    assert root_url(given) == url


@pytest.mark.parametrize("given", ["ftp://a", "", "http://", "http://a:port", "http://a:99999"])
def test_an_invalid_address_is_refused_with_an_example(given: str) -> None:
    with pytest.raises(InvalidConfig, match=r"write it like http://127\.0\.0\.1:8000"):
        root_url(given)
