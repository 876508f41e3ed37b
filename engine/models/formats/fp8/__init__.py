"""FP8: e4m3, with a scale for all, each row or each block."""
