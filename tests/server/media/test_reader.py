"""Which images are decoded again, how large they become, and how many are open at a time."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.engine.ipc.streams import OpenStreams
from penstock.engine.step.model_info import ModelInfo
from penstock.scheduler.types import Insert, Request, RequestId, SamplingParams
from penstock.server.errors import ImageQueueFull, InvalidRequest
from penstock.server.media import reader as readers
from penstock.server.media.decoder import ImageDecoder
from penstock.server.media.fetcher import ImageFetcher
from penstock.server.media.reader import ImagePart, ImageReader
from tests.server.media.test_processors import info, load_family
from tests.support.image_prompts import (
    GEMMA3,
    GEMMA4,
    QWEN,
    data_url,
    picture,
    png_of_zeros,
    write_prompt_files,
)

SMALL, LARGE = data_url(picture()), data_url(picture(640, 480))
T = TypeVar("T")


class Reading:
    """A reader on an event loop of its own."""

    def __init__(self, directory: Path, family: str) -> None:
        write_prompt_files(directory, family)
        loaded = load_family(directory)
        self.reader = ImageReader(loaded, ImageDecoder(loaded), ImageFetcher((), 1), 9)
        self.loop = asyncio.new_event_loop()
        self.info: ModelInfo = info()

    def close(self) -> None:
        self.reader.close()
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def read(self, *urls: str, detail: str | None = None, **options: Any) -> list[Any]:
        parts = [ImagePart(f"image[{i}]", url, detail) for i, url in enumerate(urls)]
        return self.run(self.reader.read(parts, self.info, options))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reading]:
    reading = Reading(tmp_path_factory.mktemp(QWEN), QWEN)
    yield reading
    reading.close()


@pytest.fixture
def qwen(shared: Reading) -> Reading:
    """With nothing in its cache, and the settings of a new one."""
    shared.reader = ImageReader(
        shared.reader.family, shared.reader.decoder, shared.reader.fetcher, 9
    )
    shared.info = info()
    return shared


def test_the_same_image_is_decoded_once(qwen: Reading) -> None:
    first, again = qwen.read(LARGE, LARGE)
    (later,) = qwen.read(LARGE)
    assert first is again is later


def test_an_image_that_is_read_otherwise_is_decoded_again(qwen: Reading) -> None:
    (first,) = qwen.read(LARGE)
    (smaller,) = qwen.read(LARGE, max_pixels=1 << 16)
    (low,) = qwen.read(LARGE, detail="low")
    assert first.num_tokens == 300 and smaller.num_tokens == 54
    assert low.num_tokens == 192 and len({each.digest for each in (first, smaller, low)}) == 3


def test_the_least_recently_used_images_leave_the_cache(
    qwen: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small,) = qwen.read(SMALL)
    monkeypatch.setattr(readers, "_CACHE_BYTES", 2 * len(small.content))
    others = [data_url(picture(64, 96)), data_url(picture(32, 192))]
    (other,) = qwen.read(others[0])
    assert qwen.read(SMALL)[0] is small
    qwen.read(others[1])
    assert qwen.read(SMALL)[0] is small and qwen.read(others[0])[0] is not other


def test_an_image_that_cannot_be_read_is_not_kept(qwen: Reading) -> None:
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="base64"):
            qwen.read(SMALL, "data:image/png;base64,\udc80")
    assert qwen.read(SMALL)


def test_images_beyond_what_is_open_at_a_time_are_refused(
    qwen: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    (small,) = qwen.read(SMALL)
    num_open = 0
    qwen.reader.num_open_bytes = lambda: num_open
    monkeypatch.setattr(readers, "_MAX_OPEN_BYTES", 2 * len(small.content))
    assert len(qwen.read(SMALL, SMALL, SMALL)) == 3
    with pytest.raises(ImageQueueFull):
        qwen.read(SMALL, SMALL, SMALL, SMALL)
    num_open = len(small.content)
    with pytest.raises(ImageQueueFull):
        qwen.read(SMALL, SMALL, SMALL)
    num_open = 0
    assert len(qwen.read(SMALL, SMALL, SMALL)) == 3  # what was refused holds nothing


async def test_open_requests_count_until_they_end() -> None:
    streams = OpenStreams(4, 4, lambda message: None)
    inserts = (Insert(0, 1, b"", (1, 1, 1), content=b"12345"), Insert(1, 1, b"", (1, 1, 1)))
    sampling = SamplingParams(max_tokens=1)
    requests = [
        Request(
            id=RequestId(name),
            prompt_token_ids=(1, 2),
            sampling=sampling,
            arrival_s=0.0,
            inserts=inserts,
        )
        for name in "ab"
    ]
    for each in requests:
        streams.submit_alike([each])
    assert streams.num_insert_bytes == 10
    streams.abort(requests[0].id)
    assert streams.num_insert_bytes == 5


def with_default(reading: Reading, num_patches: int) -> None:
    assert reading.info.encoder
    encoder = replace(reading.info.encoder, default_patches=num_patches)
    reading.info = replace(reading.info, encoder=encoder)


def test_an_engine_s_default_makes_images_smaller_unless_more_is_asked_for(qwen: Reading) -> None:
    with_default(qwen, 256)
    assert qwen.read(LARGE)[0].num_tokens == 54
    assert qwen.read(SMALL)[0].num_tokens == 6  # and none larger
    assert qwen.read(LARGE, size={"longest_edge": 1 << 18})[0].num_tokens == 234
    assert qwen.read(LARGE, min_pixels=64)[0].num_tokens == 54
    assert qwen.read(SMALL, min_pixels=1 << 14)[0].num_tokens == 20
    qwen.reader.options = {"longest_edge": 1 << 20}  # of --mm-processor-kwargs
    assert qwen.read(LARGE)[0].num_tokens == 300
    assert qwen.read(LARGE, max_pixels=1 << 14)[0].num_tokens == 12


def test_an_engine_s_default_does_not_pass_the_model_s_own(qwen: Reading) -> None:
    with_default(qwen, 1 << 20)
    assert qwen.read(data_url(png_of_zeros(2000, 1000)))[0].num_tokens <= 1024


@pytest.mark.parametrize(
    "options",
    [
        {"max_pixels": 0},
        {"max_pixels": True},
        {"max_pixels": "1"},
        {"max_pixels": 1 << 40},
        {"max_soft_tokens": 70},
        {"size": 5},
        {"size": {"height": 5}},
        {"do_resize": False},
    ],
    ids=str,
)
def test_options_that_the_model_has_not_are_refused(qwen: Reading, options: Any) -> None:
    with pytest.raises(InvalidRequest, match="longest_edge") as found:
        qwen.read(SMALL, **options)
    assert found.value.param == "mm_processor_kwargs"
    assert next(iter(options)) in str(found.value) or "height" in str(found.value)


@pytest.mark.slow
def test_images_of_gemma_4_have_the_tokens_that_are_asked_for(tmp_path: Path) -> None:
    gemma = Reading(tmp_path, GEMMA4)
    try:
        assert gemma.read(LARGE)[0].num_tokens == 63
        assert gemma.read(LARGE, max_soft_tokens=140)[0].num_tokens == 130
        assert gemma.read(LARGE, max_soft_tokens=1120)[0].num_tokens == 1064
        with pytest.raises(InvalidRequest, match=r"71.*\(70, 140, 280, 560, 1120\)"):
            gemma.read(LARGE, max_soft_tokens=71)
    finally:
        gemma.close()


@pytest.mark.slow
def test_images_of_gemma_3_have_one_size(tmp_path: Path) -> None:
    gemma = Reading(tmp_path, GEMMA3)
    with_default(gemma, 4)
    try:
        assert gemma.read(LARGE)[0].num_tokens == 4
        with pytest.raises(InvalidRequest, match="options are none"):
            gemma.read(LARGE, max_pixels=1 << 16)
    finally:
        gemma.close()
