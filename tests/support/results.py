"""Requests' results, made by hand."""

from penstock.loadtest.report.report import RequestResult


def result(
    index: int = 0,
    *,
    sent: float = 0.0,
    arrivals: tuple[float, ...] = (),
    tokens: int | None = None,
    status: int = 200,
    error: str | None = None,
) -> RequestResult:
    return RequestResult(
        index=index,
        scheduled_s=sent,
        sent_s=sent,
        ended_s=arrivals[-1] if arrivals else sent + 0.01,
        num_prompt_tokens=100,
        num_output_tokens=len(arrivals) if tokens is None else tokens,
        arrivals_s=list(arrivals),
        status=status,
        error=error,
    )
