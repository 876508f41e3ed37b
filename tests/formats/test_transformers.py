"""transformers itself reads some of the checkpoints that the tests write, with their packages."""

from pathlib import Path

import pytest
import torch
import transformers

from tests.formats.packages import imported
from tests.support.quantized_checkpoints import FORMATS, save_quantized
from tests.support.tiny_models import make_model

# It reads no packed zeros, computes FP4 in bfloat16 alone, and in W8A8 rounds activations too.
READ = ("ct-fp8-tensor", "ct-fp8-channel", "ct-fp8-block", "ct-w4a16", "ct-w8a16")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READ)
def test_transformers_reads_the_same_values(name: str, tmp_path: Path) -> None:
    imported("compressed_tensors")
    model = save_quantized(make_model("llama2", intermediate_size=96), tmp_path, FORMATS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    ids = torch.arange(1, 30)[None]
    with torch.inference_mode():
        found, expected = theirs(ids).logits, model(ids).logits
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
