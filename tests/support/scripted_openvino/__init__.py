"""OpenVINO GenAI's interface without a model: each request's output repeats its prompt.

A program that is started with this folder in PYTHONPATH imports `openvino` and `openvino_genai`
from here. A token is a byte, 0 is the token that ends a text, and what is added and computed is
printed.
"""
