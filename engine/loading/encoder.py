"""`EncoderLoading`: the encoder of images beside a model, where there is one: what it takes, and
its start."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from penstock.engine.config import EngineConfig, LoadFormat
from penstock.engine.encoders.blocks import Cut, EncoderWeights
from penstock.engine.encoders.vision.families import TOWERS
from penstock.engine.encoders.vision.pixels import image_settings
from penstock.engine.encoders.vision.tower import Tower, TowerSource
from penstock.engine.files.json_file import CONFIG, Fields
from penstock.engine.loading.weights import Counted
from penstock.engine.memory.hardware import widens_products
from penstock.engine.models.config import ModelConfig
from penstock.engine.models.parts.reader import WeightSource
from penstock.engine.models.weights import Checkpoint, RandomWeights
from penstock.engine.process.phases import Phases

# Of a slice, on each thread of a processor: some 3 ms with AVX2. On a core of AMD Zen 4, a tower of
# Qwen3-VL in bfloat16 is then computed at 0.7 of the rate of a plain product; with half as many
# rows or operations at 0.6.
_ROWS, _OPERATIONS = 256, 200_000_000
# Of an image, on a processor: 5 teraflops in the tower of Qwen3-VL-8B, or 90 s of a core of AMD
# Zen 4 with AVX2. All 12 million pixels of a telephone's picture are 320.
_CPU_PATCHES = 4096
# A GPU computes a layer of the largest image in less.
_GPU_CUT = Cut(2**30, 2**60)


@dataclass(frozen=True, slots=True)
class _Declared(WeightSource):
    """Notes what is read. names: of all tensors. num_bytes: of each read."""

    dtype: torch.dtype
    names: set[str] = field(default_factory=set)
    num_bytes: list[int] = field(default_factory=list)

    def read(self, shape: tuple[int, ...], *names: str, dtype: torch.dtype | None = None) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        self.names.update(names)
        self.num_bytes.append(tensor.nbytes)
        return tensor


class EncoderLoading:
    """info: of the encoder. names: of its tensors."""

    def __init__(
        self,
        kind: type[Tower],
        outer: Fields,
        directory: Path,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the model. Raises InvalidModel."""
        self._kind, self._outer, self._directory = kind, outer, directory
        self._model, self._dtype, self._device = model, dtype, device
        declared = _Declared(dtype)
        tower = self._tower(declared, _GPU_CUT, torch.device("meta"))
        self.names = frozenset(declared.names)
        self.info = tower.described(sum(declared.num_bytes))
        if device.type == "cpu":
            self.info = replace(self.info, default_patches=_CPU_PATCHES)

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        directory: Path,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "EncoderLoading | None":
        """See `EncoderLoading`. None where text alone is taken."""
        outer = Fields.read(directory / CONFIG)
        kind = TOWERS.get(outer.text("model_type") or "")
        if not config.takes_images or kind is None or not outer.mapping("vision_config"):
            return None
        return cls(kind, outer, directory, model, dtype, device)

    def load(self, load_format: LoadFormat, num_threads: int, phases: Phases) -> Tower:
        """phases: the current one is advanced by the bytes that are read. Raises InvalidModel."""
        empty = partial(torch.empty, dtype=self._dtype, device=self._device)
        source: WeightSource
        if load_format is LoadFormat.DUMMY:
            source = RandomWeights(empty)
        else:
            source = Checkpoint(self._directory, empty)
        cut = _GPU_CUT if self._device.type != "cpu" else Cut(_ROWS, _OPERATIONS * num_threads)
        tower = self._tower(Counted(source, phases), cut, self._device)
        tower.info = self.info
        return tower

    def _tower(self, source: WeightSource, cut: Cut, device: torch.device) -> Tower:
        is_widened = self._device.type == "cpu" and widens_products(self._dtype)
        computed = torch.float32 if is_widened else self._dtype
        vision = self._outer.mapping("vision_config")
        return self._kind(
            TowerSource(
                outer=self._outer,
                vision=Fields(f"{self._outer.path}: vision_config", vision),
                images=image_settings(self._directory),
                weights=EncoderWeights(source, computed, cut),
                device=device,
                dtype=self._dtype,
                hidden_size=self._model.hidden_size,
                is_whole=any(getattr(each, "has_spans", False) for each in self._model.attentions),
            )
        )
