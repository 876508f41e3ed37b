"""`Pixels`: how the bytes of an image become numbers."""

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.engine.files.json_file import Fields, read_object

_FILES = ("preprocessor_config.json", "processor_config.json")
_CHANNELS = 3
# Means and deviations of families whose files say none.
Normalisation: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
HALVES: Normalisation = ((0.5,) * _CHANNELS, (0.5,) * _CHANNELS)
CLIP: Normalisation = (
    (0.48145466, 0.4578275, 0.40821073),
    (0.26862954, 0.26130258, 0.27577711),
)


def image_settings(directory: Path) -> Fields:
    """What the model's image processor is told; empty where no file says."""
    for name in _FILES:
        fields = Fields(directory / name, read_object(directory / name))
        if name == _FILES[1]:
            fields = Fields(directory / name, fields.mapping("image_processor"))
        if fields.content:
            return fields
    return fields


@dataclass(frozen=True, slots=True)
class Pixels:
    """factor: what bytes are multiplied by. mean, deviation: by channel; all None where that is not
    done."""

    factor: float | None
    mean: tuple[float, ...] | None
    deviation: tuple[float, ...] | None

    @classmethod
    def read(cls, fields: Fields, default: Normalisation | None) -> "Pixels":
        """default: means and deviations; None where images are not normalised unless the file says
        so. Raises InvalidModel."""
        factor = mean = deviation = None
        if fields.flag("do_rescale", default=True):
            factor = fields.number("rescale_factor", 1 / 255)
        if fields.flag("do_normalize", default=default is not None):
            means, deviations = default or HALVES
            mean = _channels(fields, "image_mean", means)
            deviation = _channels(fields, "image_std", deviations)
            if 0 in deviation:
                raise fields.wrong("image_std", "other than 0", deviation)
        return cls(factor, mean, deviation)

    def numbers(self, patches: Tensor, *, has_channels_last: bool) -> Tensor:
        """patches: (rows, bytes) uint8, each by channel, or where these are last by pixel. Returns
        the same in float32, as the image processors of transformers compute it from an image."""
        x = patches.float()
        if self.factor is not None:
            x = patches.double().mul_(self.factor).float()
        if self.mean is not None and self.deviation is not None:
            order = (-1, _CHANNELS) if has_channels_last else (_CHANNELS, -1)
            mean, deviation = (
                torch.tensor(each, device=x.device).view([abs(size) for size in order])
                for each in (self.mean, self.deviation)
            )
            x = ((x.view(len(x), *order) - mean) / deviation).flatten(1)
        return x


def _channels(fields: Fields, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
    value = fields.get(name, default)
    numbers = value if isinstance(value, list | tuple) else (value,) * _CHANNELS
    if len(numbers) != _CHANNELS or not all(type(each) in (int, float) for each in numbers):
        raise fields.wrong(name, "a number for each of 3 channels", value)
    return tuple(map(float, numbers))
