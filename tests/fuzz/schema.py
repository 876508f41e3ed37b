"""`python -m tests.fuzz.schema`: schemathesis sends what the OpenAPI schema allows.

It must find no server error, and no status, content type or body that the schema does not list. It
takes half a minute and needs `pip install schemathesis`, so `make test` does not include it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.serving import running_server

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def main(arguments: list[str]) -> int:
    program = Path(sys.executable).with_name("schemathesis")
    with running_server(
        "--max-model-len", "200"
    ) as server:  # overrides the default, since the last one counts
        command = [str(program), "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS)]
        command += ["--phases", "examples,fuzzing", "-n", "60", *arguments]
        with tempfile.TemporaryDirectory() as scratch:  # it writes into its working directory
            return subprocess.run(command, check=False, cwd=scratch).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
