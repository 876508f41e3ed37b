"""--quantization: rounds the weights of an unquantized checkpoint when it is loaded."""
