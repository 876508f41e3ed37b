"""From the tensors of a quantized checkpoint to linear layers, one file a way of storing them."""
