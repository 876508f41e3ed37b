"""Quantized checkpoints of every family have the logits of transformers with the values that their
codes stand for, by torch and by the compiled CPU step."""

from pathlib import Path

import pytest
import torch

from tests.support.family_formats import FORMS, IN_CODES, save_in_codes
from tests.support.tiny_models import Harness

PROMPT = torch.randint(3, 96, (1, 24), generator=torch.Generator().manual_seed(1))
# float32 itself moves the logits of transformers' small Gemma 4 by 7e-5 here.
TOLERANCE = 3e-4


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", IN_CODES)
@torch.inference_mode()
def test_logits_are_those_of_the_values_in_chunks_and_decodes(
    family: str, form: str, tmp_path: Path
) -> None:
    expected = save_in_codes(family, form, tmp_path)(PROMPT).logits[0]
    for native in (False, True):
        harness = Harness(tmp_path, native=native, has_codes=native)
        harness.token_table[0, : PROMPT.shape[1]] = PROMPT[0]
        found = harness.run([(0, 0, 17)]) + harness.run([(0, 17, 6)])
        found += harness.run([(0, 23, 1)], num_decodes=1)
        torch.testing.assert_close(torch.cat(found), expected, atol=TOLERANCE, rtol=0)
