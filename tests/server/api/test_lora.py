"""LoRA adapters over HTTP: chosen by name, loaded and unloaded while requests run, and by whom."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.engine.models.config import ModelConfig
from tests.server.test_life import engine_pid
from tests.support.adapters import LinearShapes, change_settings, save_adapter
from tests.support.paths import DEMO_MODEL
from tests.support.serving import MODEL, RunningServer, wait_until

KEY = "a key of operators"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}
LONG = BODY | {"max_tokens": 200, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters a, b and c; those of other ranks are big."""
    model = LinearShapes(ModelConfig.from_dir(DEMO_MODEL))
    directory = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate("abc"):
        save_adapter(model, directory / name, rank=8, seed=seed)
    save_adapter(model, directory / "big", rank=17)
    return directory


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[RunningServer]:
    key = root.parent / "key"
    key.write_text(KEY + "\n")
    running = RunningServer(
        *("--dtype", "float32", "--enable-lora", "--max-loras", "3", "--num-threads", "1"),
        *("--lora-modules", f"a={root / 'a'}"),
        json.dumps({"name": "b", "path": str(root / "b"), "base_model_name": "parent"}),
        *("--lora-root", str(root), "--admin-key-file", str(key), "--metrics-alias", "vllm"),
    )
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


def admin(server: RunningServer, path: str, key: str | None = KEY, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"x-penstock-admin-key": key}
    return server.post(path, body, headers=headers)


def text_of(server: RunningServer, model: str, **fields: Any) -> str:
    text: str = server.post(COMPLETIONS, BODY | {"model": model} | fields).json()["choices"][0][
        "text"
    ]
    return text


def status_of(server: RunningServer, model: str) -> int:
    return server.post(COMPLETIONS, BODY | {"model": model}).status_code


def test_adapters_are_listed_with_their_parents_and_directories(
    server: RunningServer, root: Path
) -> None:
    cards = {card["id"]: card for card in server.get("/v1/models").json()["data"]}
    assert cards[MODEL]["parent"] is None
    assert (cards["a"]["parent"], cards["a"]["root"]) == (MODEL, str(root / "a"))
    assert (cards["b"]["parent"], cards["b"]["root"]) == ("parent", str(root / "b"))
    assert server.get("/v1/models/b").json() == cards["b"]


def test_each_api_takes_an_adapters_name_and_answers_with_it(server: RunningServer) -> None:
    talk = {"messages": [{"role": "user", "content": "Who are you?"}], "max_tokens": 12}
    bodies: dict[str, dict[str, Any]] = {
        COMPLETIONS: BODY,
        "/v1/chat/completions": talk | {"temperature": 0},
        "/v1/responses": {"input": "Who are you?", "max_output_tokens": 16, "temperature": 0},
        "/v1/messages": talk | {"temperature": 0},
        "/v1/embeddings": {"input": "Who are you?"},
    }
    for path, body in bodies.items():
        answers = {
            name: server.post(path, body | {"model": name}).json() for name in (MODEL, "a", "b")
        }
        assert [answer["model"] for answer in answers.values()] == [MODEL, "a", "b"], path
        key = next(k for k in ("choices", "output", "content", "data") if k in answers["a"])
        contents = {_without_ids(answer[key]) for answer in answers.values()}
        assert len(contents) == 3, (path, answers)
    tokenized = server.post("/tokenize", {"model": "a", "prompt": "Once"})
    assert tokenized.json() == server.post("/tokenize", {"prompt": "Once"}).json()


def _without_ids(content: Any) -> str:
    items = [{k: v for k, v in each.items() if k != "id"} for each in content]
    return json.dumps(items)


def test_an_unknown_name_is_answered_with_404(server: RunningServer) -> None:
    for path, body in ((COMPLETIONS, BODY), ("/tokenize", {"prompt": "Once"})):
        assert server.post(path, body | {"model": "nobody"}).status_code == 404
    assert server.get("/v1/models/nobody").status_code == 404


def test_a_prompts_cached_tokens_are_of_its_own_adapter_alone(server: RunningServer) -> None:
    body = BODY | {"prompt": "The same words again and again. " * 20}
    cached: dict[str, list[int]] = {}
    for name in (MODEL, "a", "b", "a", MODEL):
        usage = server.post(COMPLETIONS, body | {"model": name}).json()["usage"]
        cached.setdefault(name, []).append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached["b"] == [0] and cached["a"][0] == cached[MODEL][0] == 0
    assert cached["a"][1] > 0 and cached[MODEL][1] > 0


def test_who_has_no_admin_key_loads_and_unloads_nothing(server: RunningServer) -> None:
    for key in (None, "", "wrong"):
        assert admin(server, LOAD, key, lora_name="c", lora_path="c").status_code == 401
        assert admin(server, UNLOAD, key, lora_name="a").status_code == 401
    assert status_of(server, "a") == 200 and status_of(server, "c") == 404


def test_only_adapters_below_the_root_are_loaded_links_followed(
    server: RunningServer, root: Path, tmp_path: Path
) -> None:
    outside = Path(shutil.copytree(root / "c", tmp_path / "outside"))
    (root / "link").symlink_to(outside)
    half = Path(shutil.copytree(root / "c", root / "half"))
    (half / "adapter_model.safetensors").unlink()
    (half / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    for path in (str(outside), "link", "half", "../outside", "/etc", f"c/../../{outside.name}"):
        refused = admin(server, LOAD, lora_name="c", lora_path=path)
        assert refused.status_code == 400, path
        assert "leads out of --lora-root" in refused.json()["error"]["message"], path
    for path in ("nowhere", "c\0"):
        assert admin(server, LOAD, lora_name="c", lora_path=path).status_code == 400, path
    assert status_of(server, "c") == 404


def test_what_cannot_be_loaded_is_refused_with_the_reason(server: RunningServer) -> None:
    for body, reason in (
        ({"lora_name": "big", "lora_path": "big"}, "--max-lora-rank 17"),
        ({"lora_name": "a", "lora_path": "c"}, "set load_inplace to true"),
        ({"lora_name": MODEL, "lora_path": "c"}, "is a name of the model"),
        ({"lora_name": "", "lora_path": "c"}, "lora_name"),
        ({"lora_path": "c"}, "lora_name"),
    ):
        refused = admin(server, LOAD, **body)
        assert refused.status_code == 400 and reason in refused.text, body
    assert admin(server, UNLOAD, lora_name="nobody").status_code == 404
    nested = f'{{"lora_name": "c", "lora_path": "c", "more": {"[" * 2000}{"]" * 2000}}}'
    headers = {"x-penstock-admin-key": KEY}
    assert httpx.post(server.url + LOAD, content=nested, headers=headers).status_code == 400


def test_streams_go_on_while_a_hostile_pattern_is_matched(
    server: RunningServer, root: Path
) -> None:
    hostile = Path(shutil.copytree(root / "c", root / "hostile"))
    change_settings(hostile, target_modules=r"(\w+\.?)+!")
    with ThreadPoolExecutor() as pool:
        refused = pool.submit(admin, server, LOAD, lora_name="c", lora_path="hostile")
        num_answers = 0
        while not refused.done():
            assert status_of(server, "a") == 200
            num_answers += 1
    assert refused.result().status_code == 400 and num_answers > 3
    message = refused.result().json()["error"]["message"]
    assert "hostile/adapter_config.json: target_modules takes more than" in message
    (hostile / "adapter_config.json").write_text(" " * ((1 << 20) + 1))
    assert "more than 1048576 bytes" in admin(server, LOAD, lora_name="c", lora_path="hostile").text


@pytest.mark.parametrize("path", ["someone/adapter", "https://huggingface.co/someone/adapter"])
def test_a_name_of_the_hub_is_a_path_below_the_root_here(server: RunningServer, path: str) -> None:
    """Who has the admin key cannot make the server download anything."""
    refused = admin(server, LOAD, lora_name="c", lora_path=path)
    assert refused.status_code == 400
    assert f"there is no directory '{path}' below --lora-root" in refused.text


def test_an_adapter_is_loaded_and_unloaded_while_streams_of_others_go_on(
    server: RunningServer,
) -> None:
    names = (MODEL, "a")
    alone = {name: _stream(server, name) for name in names}
    with (
        httpx.stream("POST", server.url + COMPLETIONS, json=LONG | {"model": MODEL}) as first,
        httpx.stream("POST", server.url + COMPLETIONS, json=LONG | {"model": "a"}) as second,
    ):
        lines = [first.iter_lines(), second.iter_lines()]
        starts = [[next(each)] for each in lines]
        assert admin(server, LOAD, lora_name="c", lora_path="c").text.startswith("Success")
        of_c = text_of(server, "c")
        full = admin(server, LOAD, lora_name="d", lora_path="c")
        assert full.status_code == 400 and "--max-loras is 3" in full.text
        assert admin(server, UNLOAD, lora_name="c").status_code == 200
        assert status_of(server, "c") == 404
        streamed = [_joined(start + list(rest)) for start, rest in zip(starts, lines, strict=True)]
    assert streamed == [alone[name] for name in names]
    assert of_c not in (text_of(server, name) for name in ("a", "b", MODEL))


def _stream(server: RunningServer, name: str) -> str:
    return _joined(server.post(COMPLETIONS, LONG | {"model": name}).text.splitlines())


def _joined(lines: list[str]) -> str:
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert not any("error" in event for event in events), events[-1]
    return "".join(choice["text"] for event in events for choice in event["choices"])


def test_a_stream_finishes_with_an_adapter_that_was_unloaded_or_replaced_meanwhile(
    server: RunningServer,
) -> None:
    admin(server, LOAD, lora_name="c", lora_path="c")
    whole, first_of_b = _stream(server, "c"), text_of(server, "b")
    for replaces in (True, False):
        body = LONG | {"model": "c"}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            seen = [next(lines)]
            if replaces:
                path: dict[str, Any] = {"lora_name": "c", "lora_path": "b", "load_inplace": True}
                assert admin(server, LOAD, **path).status_code == 200
                assert text_of(server, "c") == first_of_b
                path = {"lora_name": "c", "lora_path": "c", "load_inplace": True}
                assert admin(server, LOAD, **path).status_code == 200
            else:
                assert admin(server, UNLOAD, lora_name="c").status_code == 200
                assert status_of(server, "c") == 404
            seen += lines
        assert _joined(seen) == whole


@pytest.mark.slow
def test_after_a_restart_of_the_engine_the_same_adapters_go_on(server: RunningServer) -> None:
    admin(server, LOAD, lora_name="c", lora_path="c")
    whole = _stream(server, "c")
    body = LONG | {"model": "c"}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=120) as response:
        lines = response.iter_lines()
        seen = [next(lines)]
        admin(server, UNLOAD, lora_name="c")  # it must go on with one that is no longer served
        os.kill(engine_pid(server), signal.SIGKILL)
        seen += lines
    assert _joined(seen) == whole
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert [status_of(server, name) for name in ("a", "b", "c")] == [200, 200, 404]


@pytest.mark.slow
def test_an_adapter_whose_files_changed_is_not_served_after_a_restart(
    server: RunningServer, root: Path
) -> None:
    copy = Path(shutil.copytree(root / "c", root / "copy"))
    assert admin(server, LOAD, lora_name="c", lora_path="copy").status_code == 200
    change_settings(copy, lora_alpha=99)
    os.kill(engine_pid(server), signal.SIGKILL)
    wait_until(lambda: server.get("/ready").status_code == 503)
    wait_until(lambda: server.get("/ready").status_code == 200)
    assert [status_of(server, name) for name in ("a", "c")] == [200, 404]
    assert "the adapter c is no longer served: the files in" in server.log()


def test_metrics_count_requests_by_adapter_and_name_those_that_run(server: RunningServer) -> None:
    counter = 'lora_adapter_requests_total{adapter="a"}'
    before = server.metric(counter)
    labels = '{max_lora="3",running_lora_adapters="a",waiting_lora_adapters=""}'
    body = LONG | {"model": "a", "max_tokens": 1900}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body):
        wait_until(lambda: f"penstock_lora_requests_info{labels}" in server.get("/metrics").text)
    assert "vllm:lora_requests_info{" in server.get("/metrics").text
    assert server.metric(counter) == before + 1


def test_without_the_flags_the_routes_say_which_are_needed(scripted_server: RunningServer) -> None:
    for path in (LOAD, UNLOAD):
        refused = admin(scripted_server, path, lora_name="a", lora_path="a")
        assert refused.status_code == 403
        assert "--lora-root and --admin-key-file" in refused.json()["error"]["message"]
