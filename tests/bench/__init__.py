"""Micro-benchmarks, each a program of its own. They may import everything.

    program                         measures
    receive_rate                    events per second that a load generator's HTTP client receives
    scheduler_step                  one scheduling step, and the admission of a prompt
    server.batching                 continuous, dynamic and static batching on the same requests
    server.front_end                tokens per second that the server streams, without a model
    server.sse_event                CPU time of one streamed token, by layer of the server
    server.demo_draft               the demo model's answers with its draft and without
    server.metrics                  cost of metrics per step, request and scrape
    server.structured               throughput with a JSON schema, relative to plain text
    engine cpu-decode               a decode step on the CPU against its memory bandwidth
    engine cpu-prefill              a prefill step on the CPU against oneDNN's products
    engine cpu-delta-nets           Qwen3.5 on the CPU against a Llama of as many bytes
    engine device|kernels|steps|offline|ranks    the parts of gpu.suite, one at a time
    gpu.suite                       everything on one GPU, from kernels to HTTP

Run each with `python -m tests.bench.NAME`; the Makefile's bench-* targets name the usual flags.
"""
