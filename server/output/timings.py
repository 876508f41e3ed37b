"""The times of one answer, under llama.cpp's names."""

from penstock.server.output.generation import Generation


def timings(generation: Generation, index: int) -> dict[str, float]:
    """Of an answer that has ended: its prompt from the first step to the first token, and from
    there on its tokens. A rate is 0 where no time has passed."""
    choice = generation.choices[index]
    num_prompt = len(generation.request.prompt_token_ids[index // generation.request.n])
    num_answer, first_s = choice.num_tokens, choice.first_token_s
    started_s = generation.started_s(choice) if num_answer else None
    prompt_s = 0.0 if started_s is None else first_s - started_s
    num_computed = num_prompt - choice.num_cached
    return {
        "cache_n": choice.num_cached,
        **_rates("prompt", num_computed, prompt_s, num_computed),
        **_rates("predicted", num_answer, choice.last_token_s - first_s, max(0, num_answer - 1)),
    }


def _rates(name: str, num_tokens: int, seconds: float, num_timed: int) -> dict[str, float]:
    """num_timed: the tokens that were computed in this time."""
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / num_timed if num_timed else 0.0,
        f"{name}_per_second": num_timed / seconds if seconds > 0 else 0.0,
    }
