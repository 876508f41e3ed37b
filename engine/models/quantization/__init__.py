"""Quantized checkpoints: what config.json says of them, and how their tensors are read.

A format's own file parses its settings into the `Scheme` of each layer, without tensors. The
readers turn what a scheme stores into a linear layer of penstock.engine.models.layers.
"""
