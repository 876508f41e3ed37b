"""Gated delta nets: the convolution before the recurrence, and the recurrence of decodes and of
prefill chunks. `penstock.engine.models.parts.delta_net.layer` says what they compute."""
