"""E2M1, numbers of 4 bits: MXFP4, NVFP4 and the settings of ModelOpt."""
