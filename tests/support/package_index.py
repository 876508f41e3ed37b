"""A package index of made-up wheels, over HTTP, that real pip installs from."""

import contextlib
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def package_index(directory: Path, *names: str) -> Iterator[str]:
    """The URL of an index with these wheels, as "torch-2.13.0+cpu", all of them empty."""
    for name in names:
        project = name.partition("-")[0]
        folder = directory / "simple" / project
        folder.mkdir(parents=True, exist_ok=True)
        empty_wheel(folder, name)
    directory.joinpath("simple").mkdir(parents=True, exist_ok=True)
    handler = partial(_Quiet, directory=str(directory))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/simple"
        finally:
            server.shutdown()
            thread.join()


def empty_wheel(directory: Path, name: str, requires: str | None = None) -> None:
    """name: as "torch-2.13.0+cpu". requires: what it depends on."""
    project, _, version = name.partition("-")
    info = f"{name}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {project}\nVersion: {version}\n"
    if requires:
        metadata += f"Requires-Dist: {requires}\n"
    tags = "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(directory / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", tags)
        wheel.writestr(f"{info}/RECORD", "")
