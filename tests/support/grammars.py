"""Grammars for executors and tables that tests drive by hand."""

from itertools import count

from penstock.engine.sampling.grammar_table import GrammarTable
from penstock.scheduler.types import Request, RequestId, SamplingParams

_NUMBERS = count()


def prepare(table: GrammarTable, sampling: SamplingParams) -> RequestId:
    """Opens a request with this sampling, and waits for its grammar, if it has one."""
    request = Request(
        id=RequestId(f"prepared-{next(_NUMBERS)}"),
        prompt_token_ids=(7,),
        sampling=sampling,
        arrival_s=0.0,
    )
    if future := table.prepare(request):
        future.result()
    return request.id
