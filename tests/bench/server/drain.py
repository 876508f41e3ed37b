"""`python -m tests.bench.server.drain PORT COUNT < request`: a client with little CPU cost.

It sends one request on each of COUNT connections, and reads and discards data until the first of
them ends.
"""

import contextlib
import selectors
import socket
import sys


def main(port: int, num_connections: int, request: bytes) -> None:
    selector = selectors.DefaultSelector()
    for _ in range(num_connections):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ, connection)
    with contextlib.suppress(ConnectionResetError):  # an end too
        while True:
            for key, _ in selector.select():
                if not key.data.recv(65536):
                    return


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.stdin.buffer.read())
