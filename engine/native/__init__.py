"""The CPU step in C++, compiled for the processor that it runs on. It knows no requests."""
