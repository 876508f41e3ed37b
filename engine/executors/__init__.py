"""What runs a scheduled batch on a device: CPU, CUDA, or a script without a model. They decide
nothing."""
