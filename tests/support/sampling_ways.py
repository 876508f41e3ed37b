"""Requests that use every option of sampling."""

from typing import Any

# Fields of `SamplingParams`: all ways to sample, and all outputs of prompts.
WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_p": 0.9},
    {"top_k": 20, "min_p": 0.05},
    {"num_logprobs": 5},
    {"temperature": 0.0, "num_logprobs": 0, "num_prompt_logprobs": 3},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
    {"logit_bias": ((5, 2.0),), "min_tokens": 2, "stop_token_ids": (7, 8)},
    {"bad_words": ((5, 6),), "top_p": 0.8},
    {"bad_words": ((5, 6),), "allowed_token_ids": (5, 6, 7)},
    {"allowed_token_ids": (65, 66)},
    {"grammar": '{"grammars":[{"lark_grammar":"start: /[a-z]*/"}]}'},
    {"grammar": '{"grammars":[{"lark_grammar":"start: /[a-z]*/"}]}', "top_k": 5},
    {"grammar": '{"grammars":[{"lark_grammar":"start: /[a-z]*/"}]}', "logit_bias": ((5, 2.0),)},
)
