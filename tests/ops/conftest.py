"""What the tests in browsers share."""

from collections.abc import Iterator

import pytest

from tests.support.browser import NewPage, running_browser


@pytest.fixture(scope="module")
def new_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewPage]:
    with running_browser(tmp_path_factory.mktemp("chromium")) as new_page:
        yield new_page
