"""Drafts that are known to be right, or wrong."""

from dataclasses import replace
from random import Random
from typing import Any

from penstock.engine.executors.scripted import ScriptedExecutor, Slot
from penstock.engine.step.executor import CompletedStep, PendingTokens
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.cache.sequence import Sequence
from penstock.scheduler.drafts.drafter import Drafter
from penstock.scheduler.drafts.sources import Found
from penstock.scheduler.types import Request, RequestId, ScheduledBatch


class Oracle:
    """A source that knows every answer; of its drafts so many are right."""

    name = "oracle"

    def __init__(self, share: float) -> None:
        self._answers: dict[Request, list[list[int]]] = {}
        self._share, self._random = share, Random(3)

    def learn(self, request: Request, answers: list[list[int]]) -> None:
        """answers: by index."""
        self._answers[replace(request, id=RequestId(""))] = answers

    def right(self, sequence: Sequence) -> list[int]:
        """What follows, and then zeros."""
        request = replace(sequence.request, id=RequestId(""))
        answer = self._answers[request][sequence.index]
        num_known = len(sequence.token_ids) - sequence.num_prompt_tokens
        return answer[num_known:]

    def find(self, sequence: Sequence) -> Found:
        return Found(self._drafts(self.right(sequence)), 0, 16)

    def _drafts(self, right: list[int]) -> list[int]:
        return [
            each if self._random.random() < self._share else each ^ 1
            for each in (*right, *(0 for _ in range(32 - len(right))))
        ]

    def end(self, sequence: Sequence) -> None:
        pass


class OracleProposer(Oracle):
    """Proposes the same in a `ProposingExecutor`."""

    def __init__(self, share: float) -> None:
        super().__init__(share)
        self._answer_of: dict[tuple[object, ...], list[int]] = {}

    def learn(self, request: Request, answers: list[list[int]]) -> None:
        for index, answer in enumerate(answers):
            sequence = Sequence(request, index, 0, 0)
            key = request.prompt_token_ids, request.sampling, sequence.seed
            self._answer_of[key] = answer

    def __call__(self, slot: Slot, length: int, num: int) -> tuple[int, ...]:
        num_prompt = slot.num_prompt_tokens
        prompt = tuple(slot.token_ids[position] for position in range(num_prompt))
        answer = self._answer_of[prompt, slot.sampling, slot.seed]
        return tuple(self._drafts(answer[length - num_prompt :])[:num])


class ProposingExecutor(ScriptedExecutor):
    """With an oracle for a draft model."""

    def __init__(self, info: ModelInfo, propose: OracleProposer | None, **options: Any) -> None:
        """propose: None for a `ScriptedExecutor`."""
        super().__init__(info, **options)
        self._propose = propose

    def execute(self, batch: ScheduledBatch) -> PendingTokens:
        pending = super().execute(batch)
        if self._propose is None or not batch.wanted_drafts:
            return pending
        sampled, proposed = pending.wait(), {}
        assert batch.num_decodes == len(batch.slots) == len(batch.wanted_drafts)
        for row, (slot_id, num) in enumerate(zip(batch.slots, batch.wanted_drafts, strict=True)):
            if num:
                slot = self._slots[slot_id]
                proposed[row] = self._propose(slot, slot.length, num)
        return CompletedStep(sampled._replace(proposed=proposed))


class Adversary(Oracle):
    """Of its drafts each is right, or right one place before or after, or wrong."""

    def __init__(self) -> None:
        super().__init__(0.0)

    def find(self, sequence: Sequence) -> Found:
        right = [*self.right(sequence), *(0 for _ in range(32))]
        text = [
            self._random.choice((each, right[max(0, at - 1)], right[at + 1], each + 1))
            for at, each in enumerate(right[:-1])
        ]
        return Found(text, 0, 16)


class EveryDraft(Drafter):
    """Verifies as many drafts as there may be, whatever they cost; and wants as many."""

    def want(self, sequences):  # type: ignore[no-untyped-def]
        if self._proposals is None:
            return ()
        limits = ((each.max_length - len(each.token_ids) - 2, each) for each in sequences)
        return tuple(max(0, min(limit, self._most_of(each))) for limit, each in limits)

    def may_pay(self, decodes):  # type: ignore[no-untyped-def]
        return True

    def _worth_while(self, decodes, offers, most):  # type: ignore[no-untyped-def]
        nums = []
        for offer in offers:
            num = min(len(offer.token_ids), most) if offer else 0
            most -= num
            nums.append(num)
        return nums
