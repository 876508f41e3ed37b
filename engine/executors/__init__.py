"""Executors run a scheduled batch on a device: CPU, CUDA, or a script without a model. They make
no scheduling decisions."""
