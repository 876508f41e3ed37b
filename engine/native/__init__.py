"""The CPU step in C++, compiled for the processor it finds."""
