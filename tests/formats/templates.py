"""Chat templates as the families have them, without tools and thoughts: the markup is theirs, the
sentences are ours."""

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_MISTRAL = (
    "<s>{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}"
    "[/SYSTEM_PROMPT]{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
_GEMMA = (
    "<bos>{% for m in messages %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_GEMMA4 = (
    "<bos>{% for m in messages %}"
    "<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
_EXAONE = (
    "{% for m in messages %}[|{{ m.role }}|]\n{{ m.content }}[|endofturn|]\n{% endfor %}"
    "{% if add_generation_prompt %}[|assistant|]\n<think>\n\n</think>\n\n{% endif %}"
)
# With calls and thoughts, of which earlier turns keep none.
_QWEN3_5 = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "Call one as <tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
# By the names of `MORE_FAMILIES`, `HYBRID_FAMILIES` and `LATENT_FAMILIES`.
TEMPLATES = {
    "youtu": _CHATML,
    "deepseek_v2_lite": "{% for m in messages %}{% if m.role == 'user' %}User: {{ m.content }}\n\n"
    "{% else %}Assistant: {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}",
    "mistral4_wrapped": _MISTRAL,
    "qwen3_5": _QWEN3_5,
    "qwen3_5_wrapped": _QWEN3_5,
    "qwen3_5_moe_wrapped": _QWEN3_5,
    "qwen2_moe": _CHATML,
    "qwen3_moe": _CHATML,
    "qwen3_vl": _CHATML,
    "qwen3_vl_moe": _CHATML,
    "gpt_oss": "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}",
    "glm4_moe": "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n<think></think>\n{% endif %}",
    "phi4": "{% for m in messages %}<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
    "phi4_mini": "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}<|endoftext|>{% endif %}",
    "smollm3": "<|im_start|>system\nReasoning Mode: /no_think<|im_end|>\n"
    + _CHATML.replace("assistant\n{%", "assistant\n<think>\n\n</think>\n{%"),
    "ministral3": _MISTRAL,
    "ministral3_wrapped": _MISTRAL,
    "mistral_small_wrapped": _MISTRAL,
    "granite": "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|start_of_role|>assistant<|end_of_role|>{% endif %}",
    "olmo2": "<|endoftext|>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "olmo3": _CHATML,
    "seed_oss": "{% for m in messages %}<seed:bos>{{ m.role }}\n{{ m.content }}<seed:eos>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<seed:bos>assistant\n{% endif %}",
    "cwm": _CHATML,
    "exaone4": _EXAONE,
    "gemma3": _GEMMA,
    "gemma3_wrapped": _GEMMA,
    "gemma4": _GEMMA4,
    "gemma4_moe": _GEMMA4,
    "gemma4_small_wrapped": _GEMMA4,
    "gemma4_unified_wrapped": _GEMMA4,
}
