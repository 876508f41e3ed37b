"""Whether the compiled step can be tested here."""

import os
import shutil

import pytest

HAS_COMPILER = shutil.which(os.environ.get("CXX", "g++")) is not None
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="there is no C++ compiler here")
