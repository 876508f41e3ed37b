"""An encoder whose rows are given, in as many slices as an insert has operations."""

from collections.abc import Mapping

from penstock.engine.encoders.encoder import InsertRows
from penstock.engine.step.model_info import EncoderInfo
from penstock.scheduler.types import Insert
from tests.support.inserted_rows import InsertedPrompt


class _Encoding:
    def __init__(self, rows: InsertRows, num_slices: int) -> None:
        self.rows = rows
        self._left = num_slices

    def run(self, budget_s: float) -> bool:
        self._left -= 1
        return self._left <= 0


class GivenRows:
    """begun: the digests of inserts that it was given, in order."""

    info = EncoderInfo(
        weight_bytes=0, flops_per_patch=1, flops_per_pair=0, bytes_per_token=256, max_patches=99
    )

    def __init__(self, rows: Mapping[bytes, InsertRows]) -> None:
        """rows: by digest."""
        self._rows = rows
        self.begun: list[bytes] = []

    @classmethod
    def of(cls, prompts: list[InsertedPrompt]) -> "GivenRows":
        return cls({digest: rows for each in prompts for digest, rows in rows_of(each).items()})

    def begin(self, insert: Insert) -> _Encoding:
        self.begun.append(insert.digest)
        return _Encoding(self._rows[insert.digest], insert.operations)


def rows_of(prompt: InsertedPrompt) -> dict[bytes, InsertRows]:
    """By digest."""
    found, first = {}, 0
    for each in prompt.inserts:
        own = slice(first, first + each.num_tokens)
        deepstack = None if prompt.deepstack is None else prompt.deepstack[:, own]
        found[each.digest] = InsertRows(prompt.rows[own], deepstack)
        first = own.stop
    return found
