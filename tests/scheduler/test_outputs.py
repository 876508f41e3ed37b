"""`StepOutputs`: columns of single tokens, and the outputs that are anything else."""

import msgspec

from penstock.scheduler.batch import StepOutputs
from penstock.scheduler.types import Finish, FinishReason, RequestId, RequestOutput


def output(name: str, *token_ids: int, is_last: bool = False) -> RequestOutput:
    finish = Finish(FinishReason.LENGTH, None, 0.0, 0, 0) if is_last else None
    return RequestOutput(RequestId(name), 1, list(token_ids), None, finish, 16)


def a_step() -> StepOutputs:
    outputs = StepOutputs()
    for name, token_id in (("a", 5), ("b", 6), ("d", 7)):
        if name == "d":
            outputs.add(output("c", 8, 9, is_last=True))
        outputs.request_ids.append(RequestId(name))
        outputs.indices.append(1)
        outputs.token_ids.append(token_id)
        outputs.num_cached_tokens.append(16)
    outputs.add(output("e"))
    return outputs


def test_outputs_come_in_row_order_whatever_they_are() -> None:
    outputs = a_step()
    expected = [
        output("a", 5),
        output("b", 6),
        output("c", 8, 9, is_last=True),
        output("d", 7),
        output("e"),
    ]
    assert list(outputs) == expected
    assert list(StepOutputs.of(expected)) == expected
    assert len(outputs) == 5 and outputs.num_tokens == 5


def test_they_are_the_same_after_their_way_to_the_server() -> None:
    sent = msgspec.msgpack.encode(a_step())
    assert list(msgspec.msgpack.decode(sent, type=StepOutputs)) == list(a_step())
