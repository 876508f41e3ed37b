"""Every flag of `vllm bench serve` works, or is told from an unknown one with a sentence."""

import re

import pytest

from penstock.loadtest.bench.cli import main
from penstock.loadtest.bench.flags import make_parser
from penstock.loadtest.bench.vllm_flags import advice_on_flag
from tests.support.stub_server import answer_five, stub

# From its source: vllm/benchmarks/serve.py (009e6d4) and vllm/benchmarks/datasets/datasets.py
# (003cf02).
_FLAGS = """
    --asr-max-audio-len-sec --asr-min-audio-len-sec --append-result --backend --base-url
    --bfcl-categories --blazedit-max-distance --blazedit-min-distance --burstiness
    --chat-template-kwargs --custom-ensure-client-side-data --custom-output-len --dataset-name
    --dataset-path --disable-shuffle --disable-tqdm --enable-multimodal-chat --endpoint --extra-body
    --frequency-penalty --goodput --header --hf-name --hf-output-len --hf-split --hf-subset --host
    --ignore-eos --input-len --insecure --label --logprobs --lora-assignment --lora-modules
    --max-concurrency --metadata --metric-percentiles --min-p --model --no-oversample --no-reranker
    --no-self-timed --no-stream --num-prompts --num-warmups --output-len --percentile-metrics
    --plot-dataset-stats --plot-timeline --port --prefix-repetition-num-prefixes
    --prefix-repetition-output-len --prefix-repetition-prefix-len --prefix-repetition-suffix-len
    --presence-penalty --probe-request-rate --profile --ramp-up-end-rps --ramp-up-start-rps
    --ramp-up-strategy --random-batch-size --random-input-len --random-mm-base-items-per-request
    --random-mm-bucket-config --random-mm-limit-mm-per-prompt --random-mm-num-mm-items-range-ratio
    --random-output-len --random-prefix-len --random-range-ratio --ready-check-timeout-sec
    --repetition-penalty --request-id-prefix --request-rate --result-dir --result-filename
    --save-detailed --save-result --seed --self-timed --served-model-name --sharegpt-output-len
    --skip-chat-template --skip-tokenizer-init --sonnet-input-len --sonnet-output-len
    --sonnet-prefix-len --spec-bench-category --spec-bench-output-len --speed-bench-category
    --speed-bench-dataset-subset --speed-bench-output-len --temperature
    --timed-trace-chunk-hash-size --timed-trace-label-hash-ids --timed-trace-label-input-length
    --timed-trace-label-output-length --timed-trace-label-timestamp
    --timed-trace-sec-multiplier --timeline-itl-thresholds --tokenizer
    --tokenizer-mode --top-k --top-p --trust-remote-code --use-beam-search
"""
_DATASETS = """
    sharegpt burstgpt sonnet random random-mm random-rerank hf custom custom_audio custom_image
    prefix_repetition spec_bench speed_bench timed_trace
"""
_BACKENDS = """
    vllm openai openai-chat openai-audio openai-embeddings openai-embeddings-chat
    openai-embeddings-clip openai-embeddings-vlm2vec infinity-embeddings infinity-embeddings-clip
    vllm-pooling vllm-rerank
"""
FLAGS, DATASETS, BACKENDS = _FLAGS.split(), _DATASETS.split(), _BACKENDS.split()
FEW = ["--num-prompts", "4", "--random-input-len", "4", "--random-output-len", "5"]


@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_of_vllm_is_known_or_refused_with_advice(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if flag in make_parser()._option_string_actions:
        assert advice_on_flag(flag) is None
        return
    for typed in (flag, "--" + flag[2:].replace("-", "_")):
        assert main(["serve", typed]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"{flag} of vllm bench serve is not supported: \w+", line)


@pytest.mark.parametrize(
    ("flag", "name"),
    [("--dataset-name", name) for name in DATASETS] + [("--backend", name) for name in BACKENDS],
)
def test_a_name_of_vllm_is_known_or_refused_with_advice(
    flag: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name in (make_parser()._option_string_actions[flag].choices or ()):
        return
    for typed in ([flag, name], [f"{flag}={name}"]):
        assert main(typed) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"{flag} {name} of vllm bench serve is not supported: \w+", line)


@pytest.mark.parametrize("command", ["latency", "throughput", "startup", "mm-processor", "sweep"])
def test_another_command_of_vllm_bench_is_refused(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "--model", "m"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"vllm bench {command} has no counterpart" in line


def test_a_flag_with_underscores_is_the_flag_with_dashes() -> None:
    with stub(answer_five) as server:
        assert main(["--base_url", server.url, *FEW, "--num_prompts=2", "--num_warmups", "0"]) == 0
    assert len(server.exchanges) == 2


def test_prefix_repetition_sends_vllms_prompts() -> None:
    flags = ["--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "6"]
    flags += ["--prefix-repetition-suffix-len", "4", "--prefix-repetition-num-prefixes", "2"]
    flags += ["--prefix-repetition-output-len", "5", "--num-prompts", "20", "--num-warmups", "0"]
    with stub(answer_five) as server:
        assert main(["--base-url", server.url, *flags]) == 0
    prompts = [exchange.body["prompt"] for exchange in server.exchanges]
    assert {len(prompt) for prompt in prompts} == {10}
    assert len({tuple(prompt[:6]) for prompt in prompts}) == 2
    assert {exchange.body["max_tokens"] for exchange in server.exchanges} == {5}


def test_help_is_short_and_help_all_has_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    short = capsys.readouterr().out
    with pytest.raises(SystemExit, match="0"):
        main(["--help-all"])
    full = capsys.readouterr().out
    assert len(short.splitlines()) < 60 and "--help-all" in short
    flags = {f for f in make_parser()._option_string_actions if f.startswith("--")}
    assert all(re.search(rf"{flag}\b", full) for flag in flags)
    assert "--help-all describes" not in full
