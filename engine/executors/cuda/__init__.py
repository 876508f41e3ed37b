"""The CUDA executor: how it is built, its graphs, and the tables it keeps on the device."""
