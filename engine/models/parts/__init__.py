"""The parts that layers are made of, one room each: `config.py` declares a part's tensors once,
`layer.py` computes it with torch, `gpu.py` with few kernel launches, and `step.h` is its phase of
the compiled CPU step."""
