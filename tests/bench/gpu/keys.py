"""The name of what Triton compiles once, whether it is compiled or interpreted here."""

from typing import Any

import torch


def key(
    kernel: str,
    constants: dict[str, Any],
    types: dict[str, torch.dtype],
    options: dict[str, Any],
) -> str:
    """types: of the tensors, by parameter. Numbers' alignment is left out."""
    parts = (
        # None stands for a tensor that this launch has not.
        {k: getattr(v, "value", v) for k, v in sorted(constants.items()) if v is not None},
        {k: str(v).removeprefix("torch.") for k, v in sorted(types.items())},
        {k: v for k, v in sorted(options.items()) if k != "launch_pdl"},
    )
    return " ".join([kernel, *(str(part).replace("'", "") for part in parts)])
