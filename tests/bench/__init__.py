"""Micro-benchmarks, each a program. They may import everything."""
