"""LoRA adapters with random weights, as PEFT saves them, and their base model merged with one."""

import copy
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine.models.config import ModelConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OF_DELTA_NETS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


class LinearShapes:
    """The names and shapes of a model's linear layers, without the layers."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        for index in range(self._config.num_layers):
            for name, shape, _ in self._config.layers[index].tensors.quantizable():
                module = SimpleNamespace(in_features=shape[1], out_features=shape[0])
                yield f"model.layers.{index}.{name}", module


def save_adapter(
    model: Any,
    path: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    targets: Iterable[str] = ALL,
    layers: Iterable[int] | None = None,
    seed: int = 0,
    size: float = 0.1,
    **settings: Any,
) -> Path:
    """Of transformers' `model`, or its `LinearShapes`. rank, alpha: but for rank_pattern and
    alpha_pattern of `settings`, which are by the last part of a module's name here. layers: None
    for all."""
    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    ranks = settings.get("rank_pattern", {})
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if last not in targets or (layers is not None and int(name.split(".")[2]) not in layers):
            continue
        own = ranks.get(last, rank)
        shapes = {"A": (own, module.in_features), "B": (module.out_features, own)}
        for side, shape in shapes.items():
            noise = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = noise
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "lora_dropout": 0.05,
        "inference_mode": True,
        "layers_to_transform": None if layers is None else list(layers),
    } | settings
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def change_settings(adapter: Path, **settings: Any) -> Path:
    """Of its adapter_config.json."""
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return adapter


def merged(model: Any, adapter: Path) -> Any:
    """transformers' model with W + s B A, in float32, in place of each weight that is changed."""
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    config = json.loads((adapter / "adapter_config.json").read_text())
    result = copy.deepcopy(model)
    modules = dict(result.named_modules())
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        module_name = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        last = module_name.rpartition(".")[2]
        rank = config.get("rank_pattern", {}).get(last, config["r"])
        alpha = config.get("alpha_pattern", {}).get(last, config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        up = tensors[name.replace("lora_A", "lora_B")]
        modules[module_name].weight.data += scale * up @ down
    return result
