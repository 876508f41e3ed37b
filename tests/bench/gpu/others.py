"""One layer's attention on an H200, as others measured it, to judge our estimates by.

Microseconds with 32 query heads, 8 of keys and values, head size 128, bfloat16; from the tables
`generation_attention_perf` and `context_attention_perf` of the Python package aiconfigurator-core
0.12.0 (NVIDIA, Apache-2.0), whose collectors replay CUDA graphs.
"""

from tests.bench.gpu.launches import Step

# SGLang 0.5.14 and vLLM 0.24.0 with FlashAttention 3, TensorRT-LLM 1.3.0rc20 with its own kernels.
FRAMEWORKS = ("SGLang", "vLLM", "TensorRT-LLM")
YARDSTICK = "decode, batch 32, context 8,192"
MEASURED: dict[str, tuple[Step, tuple[float, float, float]]] = {
    "decode, batch 1, context 512": (Step(decodes=(512,)), (12.2, 13.2, 15.5)),
    YARDSTICK: (Step(decodes=(8192,) * 32), (248.2, 269.4, 259.9)),
    "decode, batch 256, context 512": (Step(decodes=(512,) * 256), (150.8, 177.1, 145.9)),
    "decode, batch 256, context 1,024": (Step(decodes=(1024,) * 256), (278.5, 272.5, 258.4)),
    "prefill, 16 of 128": (Step(chunks=((128, 0),) * 16), (35.2, 40.7, 53.4)),
    "prefill, 1 of 1,024": (Step(chunks=((1024, 0),)), (29.2, 35.3, 51.7)),
    "prefill, 1 of 8,192": (Step(chunks=((8192, 0),)), (888.1, 938.3, 1074.1)),
}
