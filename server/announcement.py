"""What the server prints for whoever started it: its address and a request to try, or why it ends.

With a JSON log these are lines of the log. Nobody may read them any more; that ends nothing.
"""

import logging
import sys

from penstock.engine.client import LogFormat, say
from penstock.server.config import ServerConfig
from penstock.server.prompt.model import ServedModel

logger = logging.getLogger("penstock")


def url_of(server: ServerConfig) -> str:
    """Where this machine reaches it."""
    host = "127.0.0.1" if server.host in ("0.0.0.0", "::") else server.host
    scheme = "https" if server.ssl_certfile else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def announce_ready(server: ServerConfig, model: ServedModel) -> None:
    url = url_of(server)
    what = (
        f"penstock serves {model.name} ({model.info.architecture}, {model.info.dtype}, "
        f"{model.info.device}, context {model.info.max_model_len}) on {url}"
    )
    if server.log_format is LogFormat.JSON:
        logger.info("%s", what)
        return
    # No secret in a log.
    key = "-H 'Authorization: Bearer YOUR_KEY' " if server.api_keys else ""
    path, body = "/v1/completions", '"prompt": "Once upon a time", "max_tokens": 64'
    if model.encoder.template_source is not None:
        path = "/v1/chat/completions"
        body = '"messages": [{"role": "user", "content": "Who are you?"}]'
    say(
        f"{what}\n\n"
        f"  curl {url}{path} {key}-H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model.name}", {body}}}\'\n',
        sys.stdout,
    )


def announce_failure(server: ServerConfig, message: str) -> None:
    if server.log_format is LogFormat.JSON:
        logger.error("%s", message)
    else:
        say(f"penstock: error: {message}", sys.stderr)
