"""The part of `openvino` that a program passes to `openvino_genai`."""

from typing import Any


class Tensor:
    def __init__(self, array: Any) -> None:
        self.data = array
