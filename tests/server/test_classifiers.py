"""Classifiers and cross-encoders, served: their probabilities and scores are those of transformers'
classes, of pairs as transformers' tokenizers join and cut them."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.support.encoder_models import save_encoder, write_encoder_tokenizer
from tests.support.serving import RunningServer
from tests.support.starts import write_tokenizer
from tests.support.tiny_models import make_model, save

NEAR = 1e-4
QUERY = "what is it"
DOCUMENTS = ["it is this", "a longer text about something else", "x"]
LABELS = {0: "no", 1: "perhaps", 2: "yes"}


class Served:
    """A server, and transformers' model and tokenizer of its directory."""

    def __init__(self, path: Path, model: Any) -> None:
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        self.model = model.eval()
        self.server = RunningServer(str(path), "--dtype", "float32", "--served-model-name", "m")

    def ask(self, path: str, **fields: Any) -> Any:
        response = self.server.post(path, {"model": "m", **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def refusal(self, path: str, **fields: Any) -> Any:
        response = self.server.post(path, {"model": "m", **fields})
        assert response.status_code == 400, response.text
        return response.json()["error"]

    def logits(self, *texts: str, **options: Any) -> torch.Tensor:
        """options: of the tokenizer."""
        inputs = self.tokenizer(*texts, return_tensors="pt", **options)
        with torch.no_grad():
            logits: torch.Tensor = self.model(**inputs).logits[0]
        return logits


def serve(served: Served) -> Iterator[Served]:
    try:
        served.server.wait_until_ready()
        yield served
    finally:
        served.server.stop()


def save_classifier(family: str, path: Path, **options: Any) -> Served:
    head = "ForSequenceClassification"
    model = save_encoder(family, path, head=head, vocab_size=300, **options)
    write_encoder_tokenizer(path, segments=family == "bert")
    return Served(path, model)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    labels = {"id2label": LABELS, "label2id": {label: i for i, label in LABELS.items()}}
    yield from serve(save_classifier("bert", tmp_path_factory.mktemp("classifier"), **labels))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(save_classifier("bert", tmp_path_factory.mktemp("scorer"), num_labels=1))


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_classes_are_the_softmax_of_transformers_logits(classifier: Served, path: str) -> None:
    texts = [QUERY, *DOCUMENTS] * 10
    body = classifier.ask(path, input=texts)
    assert (body["object"], body["model"]) == ("list", "m")
    assert body["usage"]["prompt_tokens"] == sum(len(text) + 2 for text in texts)
    for index, (text, entry) in enumerate(zip(texts, body["data"], strict=True)):
        expected = classifier.logits(text).softmax(0)
        assert entry["probs"] == pytest.approx(expected.tolist(), abs=NEAR)
        assert entry["label"] == LABELS[int(expected.argmax())]
        assert (entry["index"], entry["num_classes"]) == (index, 3)


def test_without_activation_the_logits_themselves_are_returned(classifier: Served) -> None:
    (entry,) = classifier.ask("/classify", input=QUERY, use_activation=False)["data"]
    assert entry["probs"] == pytest.approx(classifier.logits(QUERY).tolist(), abs=NEAR)


def test_invocations_of_a_classifier_are_not_taken_for_embeddings(classifier: Served) -> None:
    assert classifier.ask("/invocations", input=QUERY)["data"][0]["num_classes"] == 3


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/embeddings", {"input": "a"}),
        ("/v2/embed", {"texts": ["a"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
def test_a_classifier_of_several_labels_names_the_route_that_works(
    classifier: Served, path: str, fields: dict[str, Any]
) -> None:
    error = classifier.refusal(path, **fields)
    assert error["code"] == "pooling_not_served"
    assert error["message"].endswith("use /classify")


def test_what_generates_text_is_refused(classifier: Served) -> None:
    error = classifier.refusal("/v1/completions", prompt="a")
    assert error["code"] == "model_generates_no_text" and "/classify" in error["message"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_sigmoid_of_each_pairs_logit(scorer: Served, path: str) -> None:
    body = scorer.ask(path, query=QUERY, documents=DOCUMENTS * 5)
    expected = [float(scorer.logits(QUERY, text).sigmoid()) for text in DOCUMENTS]
    for result in body["results"]:
        index = result["index"] % 3
        assert result["relevance_score"] == pytest.approx(expected[index], abs=NEAR)
        assert result["document"]["text"] == DOCUMENTS[index]
    scores = [result["relevance_score"] for result in body["results"]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 15
    assert max(expected) - min(expected) > 10 * NEAR
    num_tokens = sum(len(QUERY) + len(text) + 3 for text in DOCUMENTS)
    assert body["usage"]["total_tokens"] == 5 * num_tokens


def test_pairs_are_scored_one_by_one_or_against_one(scorer: Served) -> None:
    pairs = [(QUERY, DOCUMENTS[0]), (DOCUMENTS[1], DOCUMENTS[2])]
    firsts, seconds = ([pair[side] for pair in pairs] for side in (0, 1))
    expected = [float(scorer.logits(*pair)) for pair in pairs]
    fields = {"text_1": firsts, "text_2": seconds, "use_activation": False}
    data = scorer.ask("/v1/score", **fields)["data"]
    assert [entry["score"] for entry in data] == pytest.approx(expected, abs=NEAR)
    data = scorer.ask("/score", queries=firsts[0], documents=seconds)["data"]
    expected = [float(scorer.logits(QUERY, text).sigmoid()) for text in seconds]
    assert [entry["score"] for entry in data] == pytest.approx(expected, abs=NEAR)


@pytest.mark.parametrize("sizes", [(40, 40), (5, 80), (80, 5), (33, 30), (30, 31)])
@pytest.mark.parametrize("most", [-1, 33, 32])
def test_a_pair_that_is_too_long_is_cut_as_transformers_cuts_it(
    scorer: Served, sizes: tuple[int, int], most: int
) -> None:
    texts = [
        "".join(chr(97 + i * step % 26) for i in range(n))
        for n, step in zip(sizes, (1, 3), strict=True)
    ]
    options = {"truncation": "longest_first", "max_length": 64 if most < 0 else most}
    expected = float(scorer.logits(*texts, **options).sigmoid())
    pair = {"text_1": texts[0], "text_2": texts[1], "truncate_prompt_tokens": most}
    (entry,) = scorer.ask("/score", **pair)["data"]
    assert entry["score"] == pytest.approx(expected, abs=NEAR)


@pytest.mark.parametrize(
    ("fields", "size"),
    [({}, 64), ({"max_tokens_per_doc": 7}, len(QUERY) + 3 + 7), ({"max_tokens_per_doc": 500}, 64)],
)
def test_of_a_long_document_the_beginning_is_scored(
    scorer: Served, fields: dict[str, int], size: int
) -> None:
    document = "".join(chr(97 + i % 26) for i in range(200))
    body = scorer.ask("/rerank", query=QUERY, documents=[document], **fields)
    options = {"truncation": "only_second", "max_length": size}
    expected = float(scorer.logits(QUERY, document, **options).sigmoid())
    assert body["results"][0]["relevance_score"] == pytest.approx(expected, abs=NEAR)
    assert body["usage"]["total_tokens"] == size


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/rerank", {"query": "a" * 70, "documents": ["b"]}, "query"),
        (
            "/rerank",
            {"query": "a", "documents": ["b", "b" * 70], "max_tokens_per_doc": 0},
            "documents[1]",
        ),
        ("/score", {"text_1": "a", "text_2": "b" * 70}, "text_2"),
        ("/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
    ],
)
def test_a_pair_that_cannot_be_scored_is_refused_by_its_field(
    scorer: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    assert scorer.refusal(path, **fields)["param"] == param


def test_a_scorers_embeddings_are_refused_with_the_routes_that_work(scorer: Served) -> None:
    message = scorer.refusal("/v1/embeddings", input="a")["message"]
    assert "/score or /rerank" in message


@pytest.mark.slow
@pytest.mark.parametrize("named", [None, "torch.nn.modules.linear.Identity"])
def test_a_model_without_segments_and_with_an_activation_of_its_own(
    tmp_path: Path, named: str | None
) -> None:
    options: dict[str, Any] = {"sentence_transformers": {"activation_fn": named}} if named else {}
    made = save_classifier("xlm-roberta", tmp_path, num_labels=1, **options)
    for served in serve(made):
        results = served.ask("/rerank", query=QUERY, documents=DOCUMENTS)["results"]
        for result in results:
            logit = served.logits(QUERY, DOCUMENTS[result["index"]])
            expected = float(logit if named else logit.sigmoid())
            assert result["relevance_score"] == pytest.approx(expected, abs=NEAR)


TASK = "Given a web search query, retrieve relevant passages that answer the query"
# As Qwen3-Reranker's model card writes them.
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model of Qwen3 that answers yes or no."""
    path = tmp_path_factory.mktemp("judge") / "Tiny-Qwen3-Reranker"
    path.mkdir()
    model = make_model("qwen3", vocab_size=300, max_position_embeddings=600)
    save(model, path)
    write_tokenizer(path)
    file = path / "tokenizer.json"
    vocabulary = json.loads(file.read_text())
    vocabulary["model"]["vocab"] |= {"yes": 256, "no": 257}
    tokenizer = Tokenizer.from_str(json.dumps(vocabulary))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(file))
    yield from serve(Served(path, model))


def judged(served: Served, query: str, document: str, task: str = TASK) -> float:
    """As the model card computes it."""
    encode, limit = served.tokenizer.encode, 600
    before, after = encode(PREFIX), encode(SUFFIX)
    text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
    ids = before + encode(text)[: limit - len(before) - len(after)] + after
    with torch.no_grad():
        logits = served.model(torch.tensor([ids])).logits[0, -1]
    no, yes = served.tokenizer.convert_tokens_to_ids(["no", "yes"])
    return float(logits[[no, yes]].softmax(0)[1])


@pytest.mark.slow
def test_qwen3_reranker_scores_by_yes_and_no(judge: Served) -> None:
    documents = [*DOCUMENTS, "abc " * 200]
    for fields in ({}, {"instruction": "find poems"}):
        body = judge.ask("/rerank", query=QUERY, documents=documents, **fields)
        for result in body["results"]:
            task = fields.get("instruction", TASK)
            expected = judged(judge, QUERY, documents[result["index"]], task)
            assert result["relevance_score"] == pytest.approx(expected, abs=NEAR)
    data = judge.ask("/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=False)["data"]
    for entry, document in zip(data, DOCUMENTS, strict=True):
        score = judged(judge, QUERY, document)
        assert entry["score"] == pytest.approx(math.log(score / (1 - score)), abs=1e-3)


@pytest.mark.slow
def test_a_chat_template_that_knows_documents_words_the_pairs(
    judge: Served, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}\n{% endfor %}"
        "{% if 'document' in messages | map(attribute='role') %}end{% endif %}"
    )
    path = judge.tokenizer.name_or_path
    server = RunningServer(path, "--served-model-name", "m", "--chat-template", str(template))
    try:
        server.wait_until_ready()
        pair = {"model": "m", "text_1": QUERY, "text_2": DOCUMENTS[0], "instruction": "do"}
        usage = server.post("/score", pair).json()["usage"]
        text = f"<system>\ndo\n<query>\n{QUERY}\n<document>\n{DOCUMENTS[0]}\nend"
        assert usage["prompt_tokens"] == len(judge.tokenizer.encode(text))
    finally:
        server.stop()
