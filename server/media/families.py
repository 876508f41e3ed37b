"""How each family of models takes images: which class reads their pixels, and what stands for an
image in a prompt.

Which tokens these are is said by the ids of config.json. Source: the processors of transformers 5
(`processing_qwen3_vl`, `processing_gemma3`, `processing_gemma4`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock.engine.client import read_model_object
from penstock.scheduler.errors import InvalidConfig


class _Family(NamedTuple):
    """processor: the module and the class. marker: what a chat template writes for an image.
    replacement: what the prompt has in its place, whose {image} comes once for each of its rows.
    options: what of an image's size can be chosen, and from which numbers. has_fixed_number:
    whether each image has as many rows."""

    processor: tuple[str, str]
    marker: str
    replacement: str
    options: Mapping[str, Sequence[int]]
    has_fixed_number: bool = False


# vLLM's older names of a size's edges, which are numbers of pixels.
_OLDER_NAMES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
_QWEN = _Family(
    ("qwen2_vl.image_processing_pil_qwen2_vl", "Qwen2VLImageProcessorPil"),
    "{image}",
    "{image}",
    dict.fromkeys(_OLDER_NAMES.values(), range(1, 1 << 32)),
)
_FAMILIES = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN),
    "gemma3": _Family(
        ("gemma3.image_processing_pil_gemma3", "Gemma3ImageProcessorPil"),
        "{boi}",
        "\n\n{boi}{image}{eoi}\n\n",
        {},
        has_fixed_number=True,
    ),
    "gemma4": _Family(
        ("gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil"),
        "{image}",
        "{boi}{image}{eoi}",
        {"max_soft_tokens": (70, 140, 280, 560, 1120)},
    ),
}


@dataclass(frozen=True, slots=True)
class ImageFamily:
    """How one model takes images.

    processor: see `_Family`. patch_size: in pixels. num_tokens: of every image, None where that
    depends on its size. marker, replacement: texts; image_id: of the token of which an image's rows
    take the place. options: see `_Family`.
    """

    directory: Path
    processor: tuple[str, str]
    patch_size: int
    num_tokens: int | None
    marker: str
    replacement: str
    image_id: int
    options: Mapping[str, Sequence[int]]

    @classmethod
    def load(cls, directory: Path, token_name: Callable[[int], str]) -> "ImageFamily | None":
        """None for a model that takes no images. Raises InvalidConfig."""
        path = directory / "config.json"
        config = read_model_object(path)
        family, vision = _FAMILIES.get(str(config.get("model_type"))), config.get("vision_config")
        if family is None or not isinstance(vision, dict):
            return None
        ids = {
            name: _number(config, f"{name}_token_id", f"{name}_token_index", path=path)
            for name in ("image", "boi", "eoi")
            if f"{{{name}}}" in family.marker + family.replacement
        }
        texts = {name: token_name(token_id) for name, token_id in ids.items()}
        if missing := [name for name, text in texts.items() if not text]:
            raise InvalidConfig(
                f"{path}: the tokenizer has no token {ids[missing[0]]}, {missing[0]}_token_id"
            )
        num_tokens = None
        if family.has_fixed_number:
            num_tokens = _number(config, "mm_tokens_per_image", path=path)
        return cls(
            directory=directory,
            processor=family.processor,
            patch_size=_number(vision, "patch_size", path=path),
            num_tokens=num_tokens,
            marker=family.marker.format(**texts),
            replacement=family.replacement.format(**texts),
            image_id=ids["image"],
            options=family.options,
        )

    def read_options(self, given: Mapping[str, Any]) -> dict[str, int]:
        """What vLLM's mm_processor_kwargs say, by the names of `options`. Raises ValueError."""
        size, found = given.get("size", {}), {}
        if isinstance(size, dict):
            given = {name: value for name, value in given.items() if name != "size"} | size
        for name, value in given.items():
            option = _OLDER_NAMES.get(name, name)
            if type(value) is not int or value not in self.options.get(option, ()):
                options = dict(self.options) or "none"
                raise ValueError(f"{name!r:.80}: {value!r:.80}; this model's options are {options}")
            found[option] = value
        return found


def _number(config: dict[str, Any], *names: str, path: Path) -> int:
    """The first of these that there is. Raises InvalidConfig."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidConfig(f"{path}: {names[0]!r} must be an integer, not {value!r:.80}")
    return value
