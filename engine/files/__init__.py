"""Files on the disk: JSON files, safetensors and GGUF headers, names of tensors."""
