"""Sends requests, all at once, each on a connection of its own."""

import contextlib
import socket


def statuses(port: int, requests: list[bytes]) -> list[str]:
    """Of the answers; `-` where the connection ended without one."""
    connections = []
    with contextlib.ExitStack() as stack:
        for request in requests:
            connection = socket.create_connection(("127.0.0.1", port), timeout=300)
            connections.append(stack.enter_context(connection))
            # A body that is too large is refused before all of it is sent.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(request)
        return [_status(connection) for connection in connections]


def _status(connection: socket.socket) -> str:
    answer = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 16):
            answer = answer or chunk
    return answer[9:12].decode() or "-"
