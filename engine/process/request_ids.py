"""The engine's ids of requests: the id of the HTTP request, which the logs of both processes have,
and a part of our own.

Two clients may send the same X-Request-Id, and one HTTP request may have many prompts.
"""

import secrets

from penstock.scheduler.types import RequestId


def new_request_id(caller: str) -> RequestId:
    return RequestId(f"{caller}-{secrets.token_hex(6)}")


def caller_of(request_id: RequestId) -> str:
    return request_id.rpartition("-")[0] or request_id
