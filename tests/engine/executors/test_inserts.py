"""`CpuExecutor` and the scheduler with prompts that have images, whose rows an encoder makes."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from penstock.engine.config import Dtype
from penstock.engine.encoders.inserts import InsertTable
from penstock.engine.executors.cpu import CpuExecutor
from penstock.engine.step.executor import Executor
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.errors import NoEncoder
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.types import Request
from tests.support.executors import cpu_executor
from tests.support.image_models import logits_of_transformers, made_prompt, make_image_model
from tests.support.inserted_rows import InsertedPrompt
from tests.support.random_encoder import GivenRows
from tests.support.scheduling import make_request
from tests.support.tiny_models import engine_config, save
from tests.support.towers import encode, random_image, random_model, save_model

NUM_NEW = 4
FAMILIES = ["qwen3_vl", "qwen3_5_wrapped", "gemma3_wrapped"]


class Case(NamedTuple):
    """requests: two, with images of their own. answers: as transformers has them, greedily."""

    path: Path
    prompts: list[InsertedPrompt]
    requests: list[Request]
    answers: list[list[int]]


@pytest.fixture(params=FAMILIES, scope="module")
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    model = make_image_model(request.param)
    path = save(model, tmp_path_factory.mktemp("model"))
    ids = torch.randint(5, 96, (2, 70), generator=torch.Generator().manual_seed(1))
    hidden = model.config.get_text_config().hidden_size
    prompts = [made_prompt(request.param, hidden, first=first, seed=first + 1) for first in (5, 12)]
    for number, each in enumerate(prompts):
        inserts = [
            insert._replace(digest=bytes([number, at]) * 8, content=b"patches", operations=3)
            for at, insert in enumerate(each.inserts)
        ]
        prompts[number] = replace(each, inserts=tuple(inserts))
    requests, answers = [], []
    for number, (row, prompt) in enumerate(zip(ids, prompts, strict=True)):
        requests.append(
            make_request(str(number), row.tolist(), max_tokens=NUM_NEW, inserts=prompt.inserts)
        )
        for _ in range(NUM_NEW):
            best = logits_of_transformers(model, row, prompt)[-1].argmax()
            row = torch.cat((row, best[None]))
        answers.append(row[70:].tolist())
    return Case(path, prompts, requests, answers)


class Run:
    """A scheduler and an executor, until all requests have ended."""

    encoder: GivenRows

    def __init__(self, case: Case, **settings: Any) -> None:
        config = replace(
            engine_config(case.path, dtype=Dtype.FLOAT32),
            scheduler=SchedulerConfig(**{"max_num_seqs": 4, **settings}),
        )
        executor = cpu_executor(config, case.path)
        self.encoder = GivenRows.of(case.prompts)
        executor.info = replace(executor.info, encoder=self.encoder.info)
        executor._inserts = InsertTable(self.encoder)
        self._start(executor, config.scheduler)

    @classmethod
    def of(cls, executor: Executor, config: SchedulerConfig) -> "Run":
        """With an encoder of its own."""
        run = cls.__new__(cls)
        run._start(executor, config)
        return run

    def _start(self, executor: Executor, config: SchedulerConfig) -> None:
        self.executor = executor
        self.scheduler = Scheduler(
            config,
            groups=executor.info.kv_groups,
            block_size=executor.info.block_size,
            max_model_len=executor.info.max_model_len,
            encoder=executor.info.encoder_costs,
        )
        self.tokens: dict[str, list[int]] = {}

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.executor.prepare(request)

    def steps(self) -> Iterator[None]:
        while self.scheduler.has_work:
            batch = self.scheduler.schedule(0.0)
            assert batch is not None
            for output in self.scheduler.update(self.executor.execute(batch).wait()):
                self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
                if output.finish:
                    self.executor.release(output.request_id)
            yield

    def run(self) -> None:
        for _ in self.steps():
            pass


@pytest.mark.parametrize("budget", [32, 2048])
def test_answers_about_images_are_those_of_transformers(case: Case, budget: int) -> None:
    """In small chunks and large ones, in company, and with what is cached of the same prompts."""
    run = Run(case, max_num_batched_tokens=budget)
    for each in case.requests:
        run.add(each)
    run.run()
    assert run.tokens == dict(zip("01", case.answers, strict=True))
    assert len(run.encoder.begun) == 4
    again = replace(case.requests[0], id=type(case.requests[0].id)("again"))
    run.add(again)
    run.run()
    assert run.tokens["again"] == case.answers[0]
    assert len(run.encoder.begun) == 4  # found, or their rows are kept


def test_a_preempted_prompt_reads_its_rows_again(case: Case) -> None:
    run = Run(case, max_num_batched_tokens=64, enable_prefix_caching=False)
    run.add(case.requests[0])
    steps = run.steps()
    while len(run.tokens.get("0", ())) < 2:
        next(steps)
    [sequence] = run.scheduler._requests[case.requests[0].id]
    run.scheduler._preempt(sequence)
    run.run()
    assert run.tokens["0"] == case.answers[0]
    assert len(run.encoder.begun) == 2


def test_answers_of_one_prompt_and_a_text_beside_it(case: Case) -> None:
    run = Run(case, max_num_batched_tokens=48)
    run.add(replace(case.requests[1], n=2))
    text = make_request("text", 20, max_tokens=6)
    run.add(text)
    both: list[list[int]] = [[], []]
    while run.scheduler.has_work:
        batch = run.scheduler.schedule(0.0)
        assert batch is not None
        for output in run.scheduler.update(run.executor.execute(batch).wait()):
            if output.request_id == "text":
                run.tokens.setdefault("text", []).extend(output.token_ids)
            else:
                both[output.index] += output.token_ids
    assert both == [case.answers[1]] * 2
    alone = Run(case)
    alone.add(text)
    alone.run()
    assert run.tokens["text"] == alone.tokens["text"]


def test_without_an_encoder_images_are_refused(case: Case) -> None:
    executor = cpu_executor(engine_config(case.path, dtype=Dtype.FLOAT32), case.path)
    assert isinstance(executor, CpuExecutor)
    with pytest.raises(NoEncoder, match="send text alone"):
        executor.prepare(case.requests[0])


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5", "gemma3", "gemma4"])
def test_a_model_with_its_own_tower_answers_about_pixels_as_transformers(
    family: str, tmp_path: Path
) -> None:
    model = random_model(family)
    save_model(family, model, tmp_path)
    config = engine_config(tmp_path, dtype=Dtype.FLOAT32, takes_images=True)
    executor = cpu_executor(config, tmp_path)
    encoder = executor.info.encoder
    assert encoder is not None
    made = encode(family, model, random_image(64, 48))
    rows, columns = made.insert.patch_grid[1:]
    num = made.insert.num_tokens
    insert = made.insert._replace(
        start=4,
        grid=(1, rows // 2, columns // 2) if "qwen" in family else (1, 1, num),
        is_whole=encoder.is_whole,
        operations=encoder.operations(made.insert.patches[0]),
    )
    prompt = InsertedPrompt(inserts=(insert,), rows=made.rows, deepstack=made.deepstack)
    ids = torch.randint(5, 64, (num + 9,), generator=torch.Generator().manual_seed(1))
    run = Run.of(executor, config.scheduler)
    run.add(make_request("0", ids.tolist(), max_tokens=NUM_NEW, inserts=(insert,)))
    run.run()
    for token_id in run.tokens["0"]:
        logits = logits_of_transformers(model, ids, prompt)[-1]
        assert logits[token_id] > logits.max() - 1e-3
        ids = torch.cat((ids, torch.tensor([token_id])))
    assert len(run.tokens["0"]) == NUM_NEW
