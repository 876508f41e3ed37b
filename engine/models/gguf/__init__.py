"""The weights of a GGUF file as tensors and linear layers; its header is `penstock.engine.gguf`."""
