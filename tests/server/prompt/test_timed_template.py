"""A model's chat template that takes too long ends the request, not the streams of others."""

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.server.errors import InvalidRequest
from penstock.server.prompt.prompts import render_chat
from penstock.server.prompt.timed_template import (
    RENDER_ERRORS,
    TemplateTooSlow,
    at_most,
    environment,
    timed,
)
from penstock.server.prompt.tokenizer import ChatTemplate, PromptEncoder
from tests.support.chatting import QWEN, WEATHER, request
from tests.support.neighbour import streaming
from tests.support.paths import DEMO_MODEL
from tests.support.serving import RunningServer, running_server, wait_until

USER = {"role": "user", "content": "Who are you?"}
# Within a loop of 90,000 rounds, each of which does this.
ROUND = "{{% for i in range(90000) %}}{}{{% endfor %}}"
FIBONACCI = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
ENDLESS = {
    "a loop within a loop": ROUND.format(ROUND.format("x")),
    "a round that takes long": ROUND.format("{{ range(9999) | list | length }}"),
    "a loop of the messages": "{% for m in messages %}"
    + ROUND.format(ROUND.format("{{ m.role }}"))
    + "{% endfor %}",
    "a loop with a condition": "{% for i in range(90000) if i %}{{ loop.length }}"
    + ROUND.format("x")
    + "{% endfor %}",
    "a macro that calls itself twice": FIBONACCI + "{{ f(60) }}",
    "a loop that calls itself": "{% for i in range(90000) recursive %}"
    "{% if loop.depth < 3 %}{{ loop(range(90000)) }}{% endif %}x{% endfor %}",
    "a block that is called": "{% macro f() %}{{ caller() }}{% endmacro %}"
    "{% for i in range(90000) %}{% call f() %}" + ROUND.format("x") + "{% endcall %}{% endfor %}",
}
MAX_STALL_S = 5.0


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_goes_on_and_on_is_ended(name: str) -> None:
    template = timed(environment(), ENDLESS[name])
    began_s = time.thread_time()
    with at_most(0.02), pytest.raises(TemplateTooSlow):
        template.render(messages=[USER])
    assert time.thread_time() - began_s < 2


@pytest.mark.parametrize(
    "expression", ["{{ 10 ** (10 ** n) }}", "{{ 'a' * 10 ** n }}", "{{ 10 ** n * ['a'] }}"]
)
def test_an_operation_with_a_result_of_any_size_is_refused(expression: str) -> None:
    with pytest.raises(OverflowError, match="has more than"):
        timed(environment(), expression).render(n=11)
    with pytest.raises(OverflowError):
        timed(environment(), expression.replace("n", "11")).render()
    assert timed(environment(), expression).render(n=0)


DEMO = PromptEncoder.load(DEMO_MODEL, None).template_source or ""
LOOPS = """{%- macro show(a, b=2) -%}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{{ caller() }}
{%- endmacro %}
{%- for m in messages -%}
{%- if loop.first %}{% continue %}{% endif -%}{{ loop.index }}{{ loop.last }}{{ loop.length }}
{{ loop.previtem.role }}{{ loop.cycle('a', 'b') }}{% if loop.index > 2 %}{% break %}{% endif -%}
{%- else -%}none{%- endfor %}
{% for m in messages if m.role == 'user' %}{{ m.content }}{{ loop.revindex }}{% endfor %}
{% for k, v in messages[0] | dictsort recursive %}{{ k }}{% endfor %}
{% for m in [] %}{% else %}empty{% endfor %}
{% call(x) show(1, 3, 4, c=5) %}called{% endcall %}"""


@pytest.mark.parametrize("source", [DEMO, QWEN, LOOPS], ids=["demo", "Qwen", "loops"])
def test_a_timed_template_makes_the_same_text(source: str) -> None:
    answer = {"role": "assistant", "content": "Yes."}
    for messages in ([], [USER], [USER, answer] * 3):
        variables = {"messages": messages, "tools": [WEATHER], "add_generation_prompt": True}
        texts = [_text(make(environment(), source), variables) for make in (_untimed, timed)]
        assert texts[0] == texts[1]


def _untimed(rules: Any, source: str) -> Any:
    return rules.from_string(source)


def _text(template: Any, variables: dict[str, Any]) -> str:
    try:
        return str(template.render(variables))
    except RENDER_ERRORS as error:
        return repr(error)


def test_the_time_of_other_threads_does_not_count() -> None:
    template = timed(environment(), "{% for i in range(10) %}{{ wait(0.01) }}{% endfor %}")
    with at_most(0.02):
        assert template.render(wait=time.sleep) == "None" * 10


def test_a_template_that_is_isolated_gives_the_same_text_and_the_same_errors() -> None:
    own = ChatTemplate(QWEN, {"bos_token": "<s>"})
    fields = request(messages=[USER], tools=[WEATHER])
    assert render_chat(fields, own.isolated) == render_chat(fields, own, math.inf)
    refusing = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    errors = []
    for template in (refusing, refusing.isolated):
        with pytest.raises(InvalidRequest) as caught:
            template.render([USER])
        errors.append((str(caught.value), caught.value.param))
    assert errors[0] == errors[1]


def test_a_template_that_joins_arguments_to_strings_may_be_isolated() -> None:
    """As DeepSeek's, which expects them as text."""
    source = "{% for m in messages %}{% for c in m.tool_calls %}{{ 'f' + c.function.arguments }}"
    template = ChatTemplate(source + "{% endfor %}{% endfor %}", {})
    function = {"name": "f", "arguments": '{"a": 1}'}
    call = {"id": "call_f", "type": "function", "function": function}
    fields = request(messages=[USER, {"role": "assistant", "tool_calls": [call]}])
    assert render_chat(fields, template.isolated)[0] == 'f{"a": 1}'


# It loops for ever over a message that says so.
OF_MESSAGES = (
    "{% for m in messages %}{{ m.content }}{% if 'for ever' in m.content %}"
    + ROUND.format(ROUND.format("x"))
    + "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(OF_MESSAGES)
    with running_server("--chat-template", str(file)) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize("padding", ["", "and so on " * 400], ids=["short", "long"])
def test_a_conversation_on_which_the_template_loops_is_refused_while_streams_go_on(
    server: RunningServer, padding: str
) -> None:
    with streaming(server) as longest_gap_s:
        answer = server.chat(messages=[USER | {"content": f"for ever {padding}"}])
        assert server.get("/health").status_code == 200
        time.sleep(0.05)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert "fewer or shorter messages" in error["message"]
    assert "--chat-template" in error["message"]
    assert longest_gap_s() < MAX_STALL_S
    assert server.chat(messages=[USER]).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [ENDLESS["a loop within a loop"], "{{ messages | slice(10 ** 9) | list }}"],
    ids=["a loop", "a filter"],
)
def test_a_template_that_always_loops_is_reported_at_the_start(tmp_path: Path, source: str) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text(source)
    with running_server("--chat-template", str(file)) as server:
        wait_until(lambda: "chat template takes too long for a single word" in server.log())
        with streaming(server) as longest_gap_s:
            answer = server.chat(messages=[USER])
            time.sleep(0.05)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert longest_gap_s() < MAX_STALL_S
        assert server.complete().status_code == 200
