"""Where the values of flags come from, and what is said of wrong ones."""

import contextlib
import json
from pathlib import Path

import pytest
import torch

from penstock.engine.client import KVCacheDtype
from penstock.engine.loading.devices import choose_dtype
from penstock.scheduler.errors import InvalidConfig
from penstock.server.command_line import cli
from penstock.server.command_line.cli import main
from penstock.server.config import ServeConfig
from penstock.server.flags.flag_parser import FlagParser, set_defaults
from penstock.server.flags.flag_values import size
from penstock.server.flags.serve_flags import add_serve_flags
from penstock.server.flags.vllm_flags import ALREADY, REFUSED


@pytest.mark.parametrize(
    ("text", "value"),
    [("4096", 4096), ("4k", 4000), ("4K", 4096), ("1.5M", 1572864), ("2g", 2 * 10**9)],
)
def test_sizes_have_the_suffixes_of_vllm(text: str, value: int) -> None:
    assert size(text) == value


@pytest.mark.parametrize("text", ["4kb", "-1", "", "1.5", "four", "0.0001k"])
def test_what_is_not_a_size_is_refused_in_one_line(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--max-model-len={text}"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert "--max-model-len" in error and "4K (4,096)" in error


@pytest.mark.parametrize("text", ["nan", "inf", "1_000", "\u0663", " 5", "1e999", "five", ""])
@pytest.mark.parametrize("flag", ["request-timeout", "itl-target-ms", "max-loras", "port"])
def test_what_is_not_a_plain_number_is_refused_in_one_line(
    flag: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(json.dumps({flag: text}))
    with pytest.raises(SystemExit) as ended:
        main(["serve", f"--{flag}={text}"])
    assert ended.value.code == 2 == main(["serve", "--config", str(file)])
    first, second = capsys.readouterr().err.splitlines()
    assert f"argument --{flag}: invalid" in first
    assert f"{flag} cannot be {text!r}; it must be a " in second and second.endswith("number")


def test_the_flag_that_was_probably_meant_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--max-modle-len", "4096"])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert "unknown flag --max-modle-len; did you mean --max-model-len?" in error
    assert error.endswith("see penstock serve --help\n")


@pytest.mark.parametrize("flag", REFUSED)
def test_flags_of_vllm_that_we_lack_say_why(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = FlagParser()
    add_serve_flags(parser)
    assert flag not in parser._option_string_actions
    with contextlib.suppress(SystemExit):
        assert main(["serve", flag, "another"]) == 2
    error = capsys.readouterr().err
    assert f"{flag} is a flag of vLLM; {REFUSED[flag]}" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ALREADY)
def test_what_is_so_anyway_is_accepted_with_a_line(
    flag: str, served: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    values = ALREADY[flag].values
    value = ["some/model"] if flag == "--tokenizer" else ("any",) if values is None else values[:1]
    assert main(["serve", "some/model", flag, *value, "--max-num-seqs", "4"]) == 0
    assert capsys.readouterr().err == f"penstock: {flag} has no effect: {ALREADY[flag].why}\n"
    assert served[0].engine.model == "some/model"
    assert served[0].engine.scheduler.max_num_seqs == 4


def test_underscores_in_a_flag_are_hyphens_and_in_its_value_they_stay(
    served: list[ServeConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--max_model_len=512", "--served_model_name", "my_model", "--trust_remote_code"]
    assert main(["serve", "--model", "a/model", *line]) == 0
    assert (served[0].engine.max_model_len, served[0].server.served_model_names) == (
        512,
        ("my_model",),
    )
    assert "--trust-remote-code has no effect" in capsys.readouterr().err


def test_a_config_file_of_vllm_may_have_what_is_so_anyway(
    served: list[ServeConfig], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text("model: a/model\nenable-auto-tool-choice: true\nmax_logprobs: 20\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert capsys.readouterr().err.count(" has no effect: ") == 2
    file.write_text("max-logprobs: 21\n")
    assert main(["serve", "--config", str(file)]) == 2


def test_the_model_may_be_a_flag_as_in_vllm(served: list[ServeConfig]) -> None:
    assert main(["serve", "--model", "some/model"]) == 0
    assert served[0].engine.model == "some/model"
    assert served[0].server.served_model_names == ("some/model",)


def test_the_model_may_come_from_the_file_or_a_variable(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("model: of/file\n")
    assert main(["serve", "--config", str(file)]) == 0
    monkeypatch.setenv("PENSTOCK_MODEL", "of/variable")
    assert main(["serve", "--config", str(file)]) == 0
    assert main(["serve", "--config", str(file), "of/command-line"]) == 0
    models = [config.engine.model for config in served]
    assert models == ["of/file", "of/variable", "of/command-line"]


def test_two_models_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "one/model", "--model", "another/model"])
    assert "argument --model: not allowed with argument MODEL" in capsys.readouterr().err


def test_each_name_of_a_flag_is_a_name_in_the_file(
    served: list[ServeConfig], tmp_path: Path
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("enable-log-requests: true\n")
    assert main(["serve", "--config", str(file)]) == 0
    assert served[0].server.log_requests


def test_an_abbreviated_flag_is_read_as_the_whole_one(
    served: list[ServeConfig], tmp_path: Path
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("port: 1111\n")
    assert main(["serve", "--conf", str(file)]) == 0
    assert served[0].server.port == 1111


def test_what_is_null_in_the_file_or_an_empty_variable_is_the_default(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("root-path:\nrequest-timeout: null\n")
    monkeypatch.setenv("PENSTOCK_HOST", "")
    monkeypatch.setenv("PENSTOCK_API_KEY", "")
    assert main(["serve", "--config", str(file)]) == 0
    server = served[0].server
    assert (server.root_path, server.request_timeout_s) == ("", None)
    assert (server.host, server.api_keys) == ("127.0.0.1", ())


def test_json_may_be_indented_with_tabs(served: list[ServeConfig], tmp_path: Path) -> None:
    file = tmp_path / "penstock.json"
    file.write_text('{\n\t"port": 1111\n}\n')
    assert main(["serve", "--config", str(file)]) == 0
    assert served[0].server.port == 1111


def test_hosts_of_the_command_line_override_those_of_a_variable_and_these_those_of_the_file(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("allowed-hosts: [of.file, another]\n")
    serve = ["serve", "--config", str(file)]
    assert main(serve) == 0
    monkeypatch.setenv("PENSTOCK_ALLOWED_HOSTS", "of.variable another")
    assert main(serve) == 0
    assert main([*serve, "--allowed-hosts", "a", "b", "--allowed-hosts", "c"]) == 0
    hosts = [config.server.allowed_hosts for config in served]
    assert hosts == [("of.file", "another"), ("of.variable", "another"), ("a", "b", "c")]


def test_keys_of_the_command_line_override_those_of_a_variable_and_these_those_of_the_file(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text("api-key: [of-the-file, another]\n")
    serve = ["serve", "--config", str(file)]
    assert main(serve) == 0
    monkeypatch.setenv("PENSTOCK_API_KEY", "with a space")
    assert main(serve) == 0
    assert main([*serve, "--api-key", "a", "b", "--api-key", "c"]) == 0
    keys = [config.server.api_keys for config in served]
    assert keys == [("of-the-file", "another"), ("with a space",), ("a", "b", "c")]


@pytest.mark.parametrize(
    ("name", "computed"),
    [
        ("half", torch.float16),
        ("float16", torch.float16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
        ("float32", torch.float32),
    ],
)
def test_a_type_has_each_name_that_vllm_has_for_it(
    name: str, computed: torch.dtype, served: list[ServeConfig]
) -> None:
    assert main(["serve", "--dtype", name]) == 0
    assert choose_dtype(served[0].engine.dtype, torch.device("cpu")) is computed


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("auto", KVCacheDtype.AUTO),
        ("int8", KVCacheDtype.INT8),
        ("int8_per_token_head", KVCacheDtype.INT8),
        ("fp8", KVCacheDtype.FP8),
        ("fp8_e4m3", KVCacheDtype.FP8),
        ("fp8_per_token_head", KVCacheDtype.FP8),
    ],
)
def test_a_type_of_the_kv_cache_has_each_name_that_vllm_has_for_it(
    name: str,
    expected: KVCacheDtype,
    served: list[ServeConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["serve", "--kv-cache-dtype", name]) == 0
    file = tmp_path / "penstock.yaml"
    file.write_text(f"kv-cache-dtype: {name}", encoding="utf-8")
    assert main(["serve", "--config", str(file)]) == 0
    monkeypatch.setenv("PENSTOCK_KV_CACHE_DTYPE", name)
    assert main(["serve"]) == 0
    assert [config.engine.kv_cache_dtype for config in served] == [expected] * 3


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("fp8_e5m2", "choose int8 or fp8 (e4m3)"),
        ("turboquant_4bit_nc", "choose int8 or fp8 (e4m3)"),
        ("bfloat16", "leave the flag out"),
    ],
)
def test_other_types_of_the_kv_cache_are_refused_in_one_line(
    name: str, advice: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--kv-cache-dtype", name])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert "--kv-cache-dtype" in error and name in error and advice in error


def test_the_command_line_overrides_variables_and_these_the_file(
    served: list[ServeConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "port: 1111\nmax-model-len: 4k\nmax_num_seqs: 7\nenforce-eager: true\n"
        'served-model-name: [a, b]\nallowed-origins: ["https://a.example"]\n'
        "enable-prefix-caching: false\n"
    )
    monkeypatch.setenv("PENSTOCK_PORT", "2222")
    monkeypatch.setenv("PENSTOCK_MAX_NUM_SEQS", "8")
    assert main(["serve", "--config", str(file), "--max-num-seqs", "9"]) == 0
    server, engine = served[0].server, served[0].engine
    assert (server.port, engine.max_model_len, engine.scheduler.max_num_seqs) == (2222, 4000, 9)
    assert engine.enforce_eager and not engine.scheduler.enable_prefix_caching
    assert server.served_model_names == ("a", "b")
    assert server.cors.allowed_origins == ("https://a.example",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot: 1", "unknown flag, 'prot'; did you mean port?"),
        ("port: x", "port cannot be 'x'; it must be a whole number"),
        ("shutdown-timeout: soon", "shutdown-timeout cannot be 'soon'; it must be a number"),
        ("log-level: loud", "choose from debug, info"),
        ("enforce-eager: 7", "enforce-eager must be true or false"),
        ("- port", "must hold flags and values"),
        ("port: 1\na: [", "line 2 is not valid YAML: expected the node content"),
    ],
)
def test_a_wrong_file_is_refused_by_the_name_of_its_flag(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(text)
    assert main(["serve", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def typed_flags() -> list[str]:
    """The flags that do not take any text."""
    parser = FlagParser()
    add_serve_flags(parser)
    return [
        action.dest
        for action in parser._actions
        if action.option_strings and action.dest not in ("help", "api_key")
        if action.type not in (None, Path) or action.choices or action.nargs == 0
    ]


@pytest.mark.parametrize("dest", typed_flags())
def test_a_variable_of_any_flag_is_read_as_the_flag_is(dest: str) -> None:
    parser = FlagParser()
    add_serve_flags(parser)
    with pytest.raises(InvalidConfig, match=f"PENSTOCK_{dest.upper()}"):
        set_defaults(parser, {f"PENSTOCK_{dest.upper()}": "no such value"}, None)


def test_a_wrong_variable_ends_the_start_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DTYPE", "float8")
    assert cli.main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "PENSTOCK_DTYPE cannot be 'float8'; choose from auto" in error
    assert error.count("\n") == 1


def test_a_variable_of_kubernetes_that_has_our_name_is_told_as_such(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", "tcp://10.0.0.1:8000")
    assert cli.main(["serve"]) == 2
    error = capsys.readouterr().err
    assert "PENSTOCK_PORT cannot be 'tcp://10.0.0.1:8000'" in error
    assert "enableServiceLinks: false" in error and error.count("\n") == 1
