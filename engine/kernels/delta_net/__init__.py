"""Gated delta nets: the convolution before the recurrence, and the recurrence of decodes and of
prefill chunks. `penstock.engine.models.layers.delta_net` says what they compute."""
