"""OpenVINO GenAI behind HTTP, as `tests.bench.in_turns` needs it: it has no server of its own.

    python openvino_server.py MODEL_DIR --port 8000 --threads 2

It has POST /v1/completions (greedy and streamed), GET /v1/models and GET /health, and refuses by
name what it does not do. It runs in OpenVINO's environment, where nothing of Penstock is installed,
so it imports OpenVINO and the standard library alone.

All of it is one thread: the pipeline's step() keeps the interpreter lock, so that another thread
could send what a step brought only after the next step. Between two steps, this one sends and
receives all that there is.
"""

import argparse
import asyncio
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import openvino
import openvino_genai

_MAX_NGRAM = 3  # tokens that prompt lookup looks for; OpenVINO's examples have it
_MAX_HEAD_BYTES, _MAX_BODY_BYTES = 2**16, 2**24
# A character of UTF-8 has at most four bytes, so no more tokens wait for its end.
_MAX_WAITING_TOKENS = 4
# Turns of the event loop between two steps: from a new connection to its request it takes four.
_TURNS = 5
_FIELDS = ("model", "prompt", "max_tokens", "temperature", "stream", "stream_options", "ignore_eos")


class Refused(Exception):
    """A request that is not computed; the message says what to change."""

    def __init__(self, message: str, status: str = "400 Bad Request") -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What requests are checked against, because the pipeline does not."""

    name: str
    max_len: int
    vocab_size: int


@dataclass(slots=True, kw_only=True)
class Completion:
    """A request that is being computed. waiting_ids: tokens that end within a character."""

    connection: "Connection"
    handle: Any
    num_prompt_tokens: int
    wants_usage: bool
    num_tokens: int = 0
    waiting_ids: list[int] = field(default_factory=list)


class Service:
    """The pipeline, and the requests that it computes."""

    def __init__(self, pipeline: Any, facts: ModelFacts, num_drafts: int = 0) -> None:
        """num_drafts: of prompt lookup, with which the pipeline was made; 0 for none."""
        self.facts = facts
        self._num_drafts = num_drafts
        self._pipeline = pipeline
        self._tokenizer = pipeline.get_tokenizer()
        self._open: list[Completion] = []
        self._has_work = asyncio.Event()
        self._num_added = 0

    async def run(self) -> None:
        """Steps for ever."""
        while True:
            if not self._open:
                self._has_work.clear()
                await self._has_work.wait()
            self._pipeline.step()
            self._send_new()
            for _ in range(_TURNS):
                await asyncio.sleep(0)

    def add(self, fields: dict[str, Any], connection: "Connection") -> Completion:
        """Raises Refused."""
        max_tokens = _check(fields, self.facts)
        prompt_ids = self._prompt_ids(fields.get("prompt"))
        limit = self.facts.max_len
        if len(prompt_ids) + max_tokens > limit:
            raise Refused(
                f"a prompt of {len(prompt_ids)} tokens and {max_tokens} of max_tokens are more "
                f"than the {limit} of this model; ask for less"
            )
        config = self._pipeline.get_config()
        config.max_new_tokens = max_tokens
        config.ignore_eos = bool(fields.get("ignore_eos"))
        config.do_sample = False
        if self._num_drafts:
            config.num_assistant_tokens = self._num_drafts
            config.max_ngram_size = _MAX_NGRAM
        prompt = openvino.Tensor(numpy.array([prompt_ids], dtype=numpy.int64))
        completion = Completion(
            connection=connection,
            handle=self._pipeline.add_request(self._num_added, prompt, config),
            num_prompt_tokens=len(prompt_ids),
            wants_usage=bool((fields.get("stream_options") or {}).get("include_usage")),
        )
        self._num_added += 1
        self._open.append(completion)
        self._has_work.set()
        return completion

    def abort(self, completion: Completion) -> None:
        """Also of one that has ended."""
        if completion in self._open:
            self._open.remove(completion)
            completion.handle.cancel()

    def _prompt_ids(self, prompt: object) -> list[int]:
        if isinstance(prompt, str) and prompt:
            ids: list[int] = self._tokenizer.encode(prompt).input_ids.data[0].tolist()
            return ids
        if not (isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt)):
            raise Refused("prompt must be a text or a list of token ids, and not empty")
        if min(prompt) < 0 or max(prompt) >= self.facts.vocab_size:
            raise Refused(f"each token id must be from 0 to {self.facts.vocab_size - 1}")
        return prompt

    def _send_new(self) -> None:
        """What the last step brought. All texts are decoded in one call, which takes 0.2 ms."""
        new = [(each, *_read(each.handle)) for each in self._open]
        new = [(each, ids, reason) for each, ids, reason in new if ids or reason]
        for each, ids, _ in new:
            each.num_tokens += len(ids)
            each.waiting_ids += ids
        texts = self._tokenizer.decode([each.waiting_ids for each, *_ in new]) if new else []
        for (each, _, reason), text in zip(new, texts, strict=True):
            is_cut = reason is None and text.endswith("\N{REPLACEMENT CHARACTER}")
            if is_cut and len(each.waiting_ids) < _MAX_WAITING_TOKENS:
                text = ""
            else:
                each.waiting_ids = []
            each.connection.send_text(each, text, reason)
            if reason is not None:
                self._open.remove(each)
        for each in [*self._open]:
            if each.handle.get_status() != openvino_genai.GenerationStatus.RUNNING:
                self._open.remove(each)
                each.connection.send_failure(
                    "the KV cache is too small for this request; raise --cache-gb"
                )


def _read(handle: Any) -> tuple[list[int], str | None]:
    """The new tokens, and the finish reason if they are the last."""
    ids: list[int] = []
    reason = None
    while handle.can_read():
        for output in handle.read().values():
            ids += output.generated_ids
            if output.finish_reason != openvino_genai.GenerationFinishReason.NONE:
                reason = output.finish_reason.name.lower()
    return ids, reason


def _check(fields: dict[str, Any], facts: ModelFacts) -> int:
    """Returns max_tokens. Raises Refused."""
    for name in fields:
        if name not in _FIELDS:
            raise Refused(f"{name} is not supported here; leave it out")
    if (model := fields.get("model", facts.name)) != facts.name:
        raise Refused(f"there is no model {model}; it is {facts.name}", "404 Not Found")
    if fields.get("stream") is not True:
        raise Refused("stream must be true: this server only streams")
    if fields.get("temperature") != 0:
        raise Refused("temperature must be 0: this server only decodes greedily")
    max_tokens = fields.get("max_tokens", 16)
    if type(max_tokens) is not int or max_tokens < 1:
        raise Refused("max_tokens must be a whole number from 1")
    return max_tokens


class Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as much of it as a load generator sends: one request at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._transport: asyncio.Transport | None = None
        self._received = b""
        self._completion: Completion | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._completion is not None:
            self._service.abort(self._completion)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._completion is None:
            self._read_request()

    # What the service calls.

    def send_text(self, completion: Completion, text: str, reason: str | None) -> None:
        choice = {"index": 0, "text": text, "finish_reason": reason}
        events = _event(self._body([choice]))
        if reason is not None and completion.wants_usage:
            events += _event(self._body([]) | {"usage": _usage(completion)})
        if reason is not None:
            events += b"data: [DONE]\n\n"
        self._write(_chunk(events))
        if reason is not None:
            self._end_stream()

    def send_failure(self, message: str) -> None:
        self._write(_chunk(_event(_error(message))))
        self._end_stream()

    # One request.

    def _read_request(self) -> None:
        """Handles the request that has been received, if all of it has."""
        head, is_complete, rest = self._received.partition(b"\r\n\r\n")
        if len(head) > _MAX_HEAD_BYTES or (length := _content_length(head)) > _MAX_BODY_BYTES:
            self._answer("413 Content Too Large", _error("the request is too large"))
            self._close()
        elif is_complete and len(rest) >= length:
            self._received = rest[length:]
            method, _, target = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
            try:
                self._handle(method, target.partition(" ")[0], rest[:length])
            except Refused as error:
                self._answer(error.status, _error(str(error)))

    def _handle(self, method: str, path: str, body: bytes) -> None:
        facts = self._service.facts
        if (method, path) == ("GET", "/health"):
            self._answer("200 OK", {"status": "ok"})
        elif (method, path) == ("GET", "/v1/models"):
            model = {"id": facts.name, "object": "model", "max_model_len": facts.max_len}
            self._answer("200 OK", {"object": "list", "data": [model]})
        elif (method, path) == ("POST", "/v1/completions"):
            try:
                fields = json.loads(body)
            except ValueError as error:
                raise Refused(f"the body is not JSON: {error}") from error
            if not isinstance(fields, dict):
                raise Refused("the body must be a JSON object")
            self._completion = self._service.add(fields, self)
            self._write(_STREAM_HEAD)
        else:
            known = "POST /v1/completions, GET /v1/models and GET /health"
            raise Refused(f"there is no {method} {path}; there are {known}", "404 Not Found")

    def _end_stream(self) -> None:
        self._write(b"0\r\n\r\n")
        self._completion = None
        self._read_request()

    def _answer(self, status: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json"
        self._write(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)

    def _body(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = self._service.facts.name
        return {"object": "text_completion", "model": name, "choices": choices}

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return 0


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}


def _usage(completion: Completion) -> dict[str, int]:
    num_prompt, num_output = completion.num_prompt_tokens, completion.num_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
    }


def _load(options: argparse.Namespace) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = options.cache_gb
    scheduler.max_num_seqs = options.max_num_seqs
    scheduler.max_num_batched_tokens = options.max_num_batched_tokens
    scheduler.enable_prefix_caching = True
    properties = {
        "INFERENCE_NUM_THREADS": options.threads,
        "INFERENCE_PRECISION_HINT": options.precision,
        "KV_CACHE_PRECISION": options.kv_precision,
    }
    if options.prompt_lookup:
        properties["prompt_lookup"] = True
    model = str(options.model)
    return openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)


async def _serve(options: argparse.Namespace) -> None:
    config = json.loads((options.model / "config.json").read_text(encoding="utf-8"))
    facts = ModelFacts(
        name=options.model.name,
        max_len=config["max_position_embeddings"],
        vocab_size=config["vocab_size"],
    )
    service = Service(_load(options), facts, options.prompt_lookup)
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: Connection(service), options.host, options.port)
    print(f"{facts.name}: http://{options.host}:{options.port}", flush=True)
    await service.run()


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve an OpenVINO model to a load generator.")
    add = parser.add_argument
    add("model", type=Path, help="a directory that `optimum-cli export openvino` has written")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--threads", type=int, default=0, help="that compute; 0 leaves it to OpenVINO")
    add("--precision", choices=("bf16", "f16", "f32"), default="bf16", help="of the computation")
    add(
        "--kv-precision",
        choices=("bf16", "f16", "f32", "u8"),
        default="bf16",
        help="of the KV cache; OpenVINO's own default is u8",
    )
    add("--cache-gb", type=int, default=1, help="GiB of the KV cache")
    add("--max-num-seqs", type=int, default=16, help="sequences in a step")
    add("--max-num-batched-tokens", type=int, default=256, help="tokens in a step")
    add("--prompt-lookup", type=int, default=0, metavar="N", help="drafts of the prompt's text")
    options = parser.parse_args()
    if not (options.model / "openvino_model.xml").is_file():
        say = (
            f"{options.model} has no openvino_model.xml; write it by `optimum-cli export openvino`"
        )
        print(say, file=sys.stderr)
        return 2
    try:
        asyncio.run(_serve(options))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
