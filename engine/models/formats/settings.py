"""A checkpoint's settings of quantization, as its files have them: fields, and what is refused."""

from dataclasses import dataclass

from penstock.engine.files.json_file import Fields, shown
from penstock.engine.models.errors import InvalidModel

_ADVICE = (
    "use a version of the model in FP8, AWQ, GPTQ or compressed-tensors, or the float32, float16 "
    "or bfloat16 one"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """path: of the file. key: in it, for messages. fields: of that key's object."""

    path: str
    key: str
    fields: Fields

    @classmethod
    def of(cls, path: object, key: str, content: dict[str, object]) -> "Settings":
        return cls(str(path), key, Fields(f"{path}: {key}", content))

    def unsupported(self, name: str) -> InvalidModel:
        """name: of the format, and what about it is not supported."""
        return InvalidModel(
            f"{self.path} has a {self.key}, so the weights are quantized in the format {name}, "
            f"which is not supported; {_ADVICE}",
            brief=f"{name} weights are not supported",
        )

    def only(self, name: str, allowed: tuple[object, ...], of_format: str) -> None:
        """Raises InvalidModel unless the field is absent or has one of these values."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise self.unsupported(f"{of_format} with {name} {shown(value)}")

    def group_size(self, name: str = "group_size") -> int | None:
        """None for -1 or null, which mean the whole row."""
        if self.fields.get(name) in (None, -1):
            return None
        return self.fields.count(name)
