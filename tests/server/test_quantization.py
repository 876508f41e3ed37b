"""`penstock serve --quantization`: its flags, and what a client sees of it."""

from collections.abc import Iterator

import pytest

from penstock.engine.config import Quantization
from penstock.engine.native import compiler
from penstock.server.command_line.cli import main
from penstock.server.config import ServeConfig
from tests.support.serving import RunningServer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    cache = tmp_path_factory.mktemp("cache")
    (cache / "penstock").mkdir()
    compiled = compiler.cache_directory()
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "penstock" / "native").symlink_to(compiled)  # to compile it takes seconds
    running = RunningServer(
        *("--device", "cpu", "--quantization", "int8", "--quantization-report"),
        env={"XDG_CACHE_HOME": str(cache)},
    )
    try:
        running.wait_until_ready()
        yield running
    finally:
        running.stop()


@pytest.mark.slow
def test_a_quantized_model_answers_as_well_as_before(server: RunningServer) -> None:
    answer = server.chat(temperature=0, max_tokens=40).json()
    assert "Penstock" in answer["choices"][0]["message"]["content"]


def test_its_card_has_the_figures(server: RunningServer) -> None:
    (card, _) = server.get("/v1/models").json()["data"]
    figures = card["quantization"]
    assert (figures["method"], figures["bits"], figures["group_size"]) == ("int8", 8, 32)
    assert figures["bits_per_weight"] == 8.5
    assert 0 < figures["kl_divergence"] < 4e-4
    assert 0.98 < figures["top1_agreement"] <= 1


def test_its_metrics_have_them_too(server: RunningServer) -> None:
    (card, _) = server.get("/v1/models").json()["data"]
    figures = card["quantization"]
    assert server.metric("quantization_kl_divergence") == pytest.approx(figures["kl_divergence"])
    assert server.metric("quantization_top1_agreement_ratio") == figures["top1_agreement"]
    info = 'quantization_info{bits="8",bits_per_weight="8.500",group_size="32",method="int8"}'
    assert server.metric(info) == 1
    assert server.metric('startup_seconds{phase="quantize"}') > 0


def test_the_report_is_in_the_log(server: RunningServer) -> None:
    log = server.log()
    assert "int8 against the unquantized model: mean KL divergence" in log
    assert "quantization report: perplexity of the text" in log


def test_a_model_that_is_not_quantized_says_so(exact_server: RunningServer) -> None:
    (card, _) = exact_server.get("/v1/models").json()["data"]
    assert card["quantization"] is None
    assert "penstock_quantization" not in exact_server.get("/metrics").text


@pytest.mark.parametrize("flag", ["-q", "--quantization"])
def test_the_flag_has_the_names_of_vllm(
    flag: str, served: list[ServeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["serve", flag, "int4"]) == 0
    assert served[0].engine.quantization is Quantization.INT4
    monkeypatch.setenv("PENSTOCK_QUANTIZATION", "int8")
    assert main(["serve"]) == 0
    assert served[1].engine.quantization is Quantization.INT8


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("int8_per_channel_weight_only", "use int8, which loses less"),
        ("fp8_per_block", "use int8 or int4 or fp8"),
        ("fp8_per_channel", "use fp8, which has a scale for each row"),
        ("awq", "leave it out, or use int8 or int4 or fp8 with an unquantized checkpoint"),
        ("int5", "it must be int8 or int4 or fp8"),
    ],
)
def test_other_values_are_refused_with_what_to_use(
    value: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--quantization", value])
    error = capsys.readouterr().err
    assert ended.value.code == 2 and error.count("\n") == 1
    assert f"{value!r} cannot be used: " in error and reason in error
