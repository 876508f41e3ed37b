"""Whether the trained weights can be tested with here."""

import pytest

from tests.support.paths import STORIES

needs_stories = pytest.mark.skipif(
    not STORIES.exists(), reason="the stories260K weights are not beside the checkout"
)
