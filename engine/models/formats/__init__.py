"""How weights are stored, one room a format: its settings, its tensors, and how they are divided.

A room's `config` parses settings into the `Scheme` of each layer, without tensors; its `layer`
reads what a scheme stores into one of the linear layers of penstock.engine.models.layers.
"""
