"""Shared by tests of tools and reasoning: answers with a given text, without an engine.

Their ids are those of a tokenizer of single bytes with a few special tokens. They pass through
everything from the request to the bytes of the response, except the engine.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import openai
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.step_model.amounts import AttentionGroup
from penstock.scheduler.types import Finish, FinishReason, RequestId, RequestOutput
from penstock.server.api.openai.chat_writer import ChatWriter
from penstock.server.api.openai.writer import Head, encode
from penstock.server.output.choice import Choice
from penstock.server.output.delta import OutputDelta, Usage
from penstock.server.output.detokenizer import TextDecoder
from penstock.server.output.generation import GenerationRequest
from penstock.server.prompt.constraints import constrain
from penstock.server.prompt.model import ServedModel
from penstock.server.prompt.prompts import chat_prompts, completion_prompts
from penstock.server.prompt.request_builder import Arrival, build_generation_request
from penstock.server.prompt.tokenizer import GenerationDefaults, PromptEncoder
from penstock.server.protocol.chat import ChatCompletionRequest
from penstock.server.protocol.openai import CompletionRequest
from penstock.server.tools.chat_format import ChatFormat

SPECIAL = ("<eos>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/small"}, "b": {"$ref": "#/$defs/small"}},
            "required": ["a", "b"],
            "$defs": {"small": {"type": "integer", "minimum": 0, "maximum": 99}},
        },
    },
}
# Plain, and one like that of Qwen3, with tools, tool_calls and reasoning.
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
QWEN = (
    "{% if tools %}# Tools\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>\n"
    "{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}\n</tool_call>"
    "{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)


def make_model(
    directory: Path, template: str, special: tuple[str, ...] = (), **flags: Any
) -> ServedModel:
    """special: more special tokens. flags: of `ChatFormat.detect`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIAL, *special)])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    options = {"tool_parser": None, "reasoning_parser": None} | flags
    return ServedModel(
        names=("m",),
        created_s=0,
        info=ModelInfo(
            architecture="llama",
            dtype="float32",
            kv_cache_dtype="float32",
            device="cpu",
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=1,
            pooled_size=1,
            max_model_len=100_000,
            block_size=16,
            num_blocks=1,
            eos_token_ids=(tokenizer.token_to_id("<eos>") or 0,),
            num_parameters=1,
            weight_bytes=1,
            attention=(AttentionGroup(window=None, kv_bytes_per_token=1, flops_per_pair=1),),
            flops_per_token=1,
            flops_per_sampled_token=1,
            peak_bandwidth_bytes_per_s=None,
            measured_bandwidth_bytes_per_s=1.0,
            peak_flops_per_s=None,
            load_seconds={},
        ),
        encoder=PromptEncoder.load(directory, None),
        defaults=GenerationDefaults(),
        chat_format=ChatFormat.detect(template, **options),
    )


def request(**fields: Any) -> ChatCompletionRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
    return ChatCompletionRequest.parse(json.dumps(body).encode())


def ask(model: ServedModel, **fields: Any) -> GenerationRequest:
    return asyncio.run(prepared(request(**fields), model))


async def prepared(
    fields: CompletionRequest | ChatCompletionRequest, model: ServedModel
) -> GenerationRequest:
    """Rendered, tokenized, constrained and built, as the server's pipeline does it."""
    if isinstance(fields, ChatCompletionRequest):
        prompts = await chat_prompts(fields, model)
    else:
        prompts = await completion_prompts(fields, model)
    answer = await constrain(fields.answer_rules, prompts.reasoning, model)
    arrival = Arrival(tenant="", arrival_s=0.0, http_id="req")
    return build_generation_request(fields, prompts, answer, model, arrival)


def prompt_of(model: ServedModel, **fields: Any) -> str:
    """What the model gets, as text."""
    ids = ask(model, **fields).requests[0].prompt_token_ids
    return model.encoder.vocabulary.text_of(ids, shows_special=True)


class Answer:
    """One answer, token by token: its deltas, and the responses made of them."""

    def __init__(
        self,
        model: ServedModel,
        text: str,
        reason: FinishReason = FinishReason.STOP,
        **fields: Any,
    ) -> None:
        self.request = ask(model, **fields)
        with_usage = {"stream": True, "stream_options": {"include_usage": True}}
        told = {"messages": [{"role": "user", "content": "?"}]} | with_usage
        self._writer = ChatWriter(
            Head("chatcmpl-1", "m", "fp"),
            model.encoder.vocabulary,
            ChatCompletionRequest.of(told, num_bytes=0),
        )
        make = self.request.make_reader
        decoder = TextDecoder(model.encoder.vocabulary, is_whole=True, shown=self.request.markup)
        self.choice = Choice(0, decoder, None, False, reader=make() if make else None)
        ids = list(model.encoder.encode(text, add_special_tokens=False))
        self.deltas: list[OutputDelta] = []
        for token_id in ids:
            self._take([token_id], None)
        if reason is FinishReason.STOP:
            eos = model.info.eos_token_ids[0]
            self._take([eos], Finish(reason, eos, None, 0, 0))
        else:
            self._take([], Finish(reason, None, None, 0, 0))

    def _take(self, ids: list[int], finish: Finish | None) -> None:
        if self.choice.finish_reason:
            return
        output = RequestOutput(RequestId("r"), 0, ids, None, finish, 0)
        if delta := self.choice.take(output):
            self.deltas.append(delta)

    @property
    def usage(self) -> Usage:
        return Usage(1, self.choice.num_tokens, 0, self.choice.num_reasoning)

    @property
    def sse(self) -> bytes:
        writer = self._writer
        events = b"".join(map(writer.delta, self.deltas))
        return writer.openings(1) + events + writer.end(self.usage)

    def streamed(self) -> Any:
        """A completion, as the client's own helper accumulates it."""
        headers = {"content-type": "text/event-stream"}
        with (
            client_of(httpx.Response(200, headers=headers, content=self.sse)) as client,
            client.chat.completions.stream(
                model="m", messages=[{"role": "user", "content": "Hi"}]
            ) as stream,
        ):
            return stream.get_final_completion()

    def plain(self) -> Any:
        parts = [part for delta in self.deltas for part in delta.parts or ()]
        text = "".join(delta.text for delta in self.deltas)
        has_parts = self.request.make_reader is not None
        whole = OutputDelta(
            0, text, [], self.choice.finish_reason, (), parts if has_parts else None
        )
        body = encode(self._writer.content([whole], self.usage))
        return openai.types.chat.ChatCompletion.model_validate_json(body)


def client_of(response: httpx.Response) -> openai.OpenAI:
    """The real client, and a wire that carries one answer."""
    wire: Any = httpx.Client(transport=httpx.MockTransport(lambda _: response))
    return openai.OpenAI(
        base_url="http://localhost/v1",
        api_key="x",
        http_client=wire,
        _strict_response_validation=True,
    )
