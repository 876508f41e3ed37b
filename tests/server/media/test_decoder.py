"""Images in processes with limits: what is read of each kind of file, and what attacks bring."""

import asyncio
import base64
import io
import os
import signal
import struct
import time
import zlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image

from penstock.scheduler.errors import InvalidConfig
from penstock.server.config import bare_environment
from penstock.server.media import decoder as decoders
from penstock.server.media.decoder import BadImage, DecodedImage, ImageDecoder
from penstock.server.media.families import ImageFamily
from penstock.server.prompt.tokenizer import PromptEncoder
from tests.support.image_prompts import QWEN, picture, png_of_zeros, write_prompt_files

SIDE = 64
T = TypeVar("T")


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> ImageFamily:
    directory = tmp_path_factory.mktemp("qwen")
    write_prompt_files(directory, QWEN)
    return load_family(directory)


def load_family(directory: Path) -> ImageFamily:
    encoder = PromptEncoder.load(directory, None)
    family = ImageFamily.load(directory, lambda i: encoder.token_names([i])[0])
    assert family is not None
    return family


class Running:
    """A decoder on an event loop of its own, for tests that only ask."""

    def __init__(self, family: ImageFamily) -> None:
        self.loop = asyncio.new_event_loop()
        self.decoder = ImageDecoder(family)

    def close(self) -> None:
        self.decoder.close()
        self.loop.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(coroutine)

    def decode(self, file: str | bytes, **options: Any) -> DecodedImage:
        return self.run(self.decoder.decode(file, **options))


@pytest.fixture(scope="module")
def running(family: ImageFamily) -> Iterator[Running]:
    made = Running(family)
    yield made
    made.close()


def pixels(image: DecodedImage) -> "np.ndarray[Any, Any]":
    """The picture that its patches are of, (height, width, 3). Written anew from the layout of
    Qwen's: rows and columns of squares of 2 x 2 patches, each of two equal frames."""
    _, rows, columns = image.patch_grid
    cut = np.frombuffer(image.content, np.uint8).reshape(
        rows // 2, columns // 2, 2, 2, 3, 2, 16, 16
    )
    assert (cut[:, :, :, :, :, 0] == cut[:, :, :, :, :, 1]).all()
    whole = cut[:, :, :, :, :, 0].transpose(0, 2, 5, 1, 3, 6, 4)
    return whole.reshape(rows * 16, columns * 16, 3)


def file_of(image: "Image.Image", kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def square(colour: tuple[int, ...], mode: str = "RGB") -> "Image.Image":
    return Image.new(mode, (SIDE, SIDE), colour)


LARGE = png_of_zeros(3000, 3000)  # half a second
RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_pixels_are_those_of_the_file(running: Running, kind: str) -> None:
    content = picture(96, 64, kind, **({"lossless": True} if kind == "WEBP" else {}))
    image = running.decode(base64.b64encode(content).decode())
    expected = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
    assert (pixels(image) == expected).all()
    assert (image.patch_grid, image.grid, image.num_tokens) == ((1, 4, 6), (1, 2, 3), 6)


@pytest.mark.parametrize(
    ("content", "colour"),
    [
        (file_of(square(RED), "JPEG", quality=100), RED),
        (file_of(square((255,), "L"), "PNG"), WHITE),
        (file_of(square((0, 0, 255, 0), "RGBA"), "PNG"), WHITE),
        (file_of(square((0, 0, 255, 255), "RGBA"), "PNG"), BLUE),
        (file_of(square((0, 0), "LA"), "PNG"), WHITE),
        (file_of(square((0, 0, 0, 0), "CMYK"), "JPEG"), WHITE),
        (
            file_of(
                square(RED), "GIF", save_all=True, append_images=[square(BLUE)], duration=9, loop=0
            ),
            RED,
        ),
        (file_of(square(RED), "PNG", save_all=True, append_images=[square(BLUE)]), RED),
        (
            file_of(
                square(RED), "WEBP", save_all=True, append_images=[square(BLUE)], lossless=True
            ),
            RED,
        ),
    ],
    ids=["jpeg", "grey", "clear", "opaque", "clear grey", "cmyk", "gif", "apng", "webp"],
)
def test_every_kind_of_file_becomes_rgb_of_its_first_picture(
    running: Running, content: bytes, colour: tuple[int, ...]
) -> None:
    found = pixels(running.decode(content)).astype(int)
    assert np.abs(found - np.array(colour)).max() <= 2


def test_sixteen_bits_of_grey_keep_their_shades(running: Running) -> None:
    shades = np.tile(np.linspace(0, 65535, SIDE).astype(np.uint16), (SIDE, 1))
    found = pixels(running.decode(file_of(Image.fromarray(shades), "PNG")))
    assert (found[0, :, 0] == shades[0] >> 8).all()


def test_a_picture_that_was_taken_sideways_is_turned(running: Running) -> None:
    image = Image.new("RGB", (96, 64), BLUE)
    image.paste(RED, (0, 0, 32, 64))
    exif = Image.Exif()
    exif[0x0112] = 6  # its right is the top
    found = pixels(running.decode(file_of(image, "PNG", exif=exif)))
    assert found.shape == (96, 64, 3)
    assert (found[:32] == RED).all() and (found[32:] == BLUE).all()


def test_low_detail_is_512_pixels_a_side_at_most(running: Running) -> None:
    content = picture(900, 300)
    assert running.decode(content, max_side=512).patch_grid == (1, 10, 32)
    assert running.decode(content).patch_grid == (1, 18, 56)


def test_equal_pixels_have_equal_digests_and_others_do_not(running: Running) -> None:
    image = running.decode(picture(96, 64))
    assert running.decode(picture(96, 64, "WEBP", lossless=True)).digest == image.digest
    assert running.decode(picture(64, 96)).digest != image.digest


def damaged(change: Callable[[bytearray], None], kind: str = "PNG") -> bytes:
    content = bytearray(picture(300, 200, kind))
    change(content)
    return bytes(content)


def half(kind: str) -> bytes:
    content = picture(300, 200, kind)
    return content[: len(content) // 2]


def chunk(kind: bytes, content: bytes) -> bytes:
    head = struct.pack(">I", len(content)) + kind + content
    return head + struct.pack(">I", zlib.crc32(kind + content))


def png(*chunks: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks) + chunk(b"IEND", b"")


def header(width: int, height: int) -> bytes:
    return chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


SVG = b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>'
BOMB = zlib.compress(bytes(1 << 28), 9)
ATTACKS: dict[str, tuple[bytes | str, str]] = {
    "no bytes": (b"", "it is no PNG"),
    "a text": (b"hello", "it is no PNG"),
    "SVG that names a file": (SVG, "it is no PNG"),
    "HTML": (b"<!doctype html><img src=x onerror=alert(1)>", "it is no PNG"),
    "PDF": (b"%PDF-1.7\n1 0 obj", "it is no PNG"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "it is no PNG"),
    "TIFF": (file_of(square(RED), "TIFF"), "it is no PNG"),
    "BMP": (file_of(square(RED), "BMP"), "it is no PNG"),
    "JPEG 2000": (b"\x00\x00\x00\x0cjP  \r\n\x87\n" + bytes(64), "it is no PNG"),
    "half a PNG": (half("PNG"), "it is damaged"),
    "half a JPEG": (half("JPEG"), "it is damaged"),
    "half a WebP": (half("WEBP"), "it is "),
    "a PNG's first bytes": (picture()[:20], "it is no PNG"),
    "a wrong sum": (damaged(lambda c: c.__setitem__(60, c[60] ^ 255)), "it is "),
    "3.6 billion pixels": (png_of_zeros(60_000, 60_000), "more than 50,000,000 together"),
    "the widest": (png(header(2**31 - 1, 1)), "more than 50,000,000 together"),
    "no width": (png(header(0, 5)), "it is "),
    "a row of pixels": (picture(2000, 2), "this model takes none of 2000 x 2 pixels"),
    "a bomb of text": (png(header(8, 8), chunk(b"zTXt", b"k\0\0" + BOMB)), "it is "),
    "a bomb of a profile": (png(header(8, 8), chunk(b"iCCP", b"k\0\0" + BOMB)), "it is "),
    "no base64": ("%%%%", "it is not valid base64"),
    "base64 of URLs": ("_-__", "it is not valid base64"),
    "base64 with letters beyond": ("ééé=", "it is not valid base64"),
    "base64 without its end": (base64.b64encode(picture()).decode()[:-1], "it is not valid base64"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_in_a_sentence(running: Running, name: str) -> None:
    content, reason = ATTACKS[name]
    with pytest.raises(BadImage) as raised:
        running.decode(content)
    assert reason in str(raised.value)
    # No address of memory, object or path: see CVE-2026-22778.
    assert "0x" not in str(raised.value) and "<" not in str(raised.value)
    assert running.decode(picture()).num_tokens == 6


@pytest.mark.parametrize(("width", "height"), [(1, 1), (3, 3), (1, 3), (3, 40), (4, 3), (16, 1)])
def test_the_smallest_pictures_are_served(running: Running, width: int, height: int) -> None:
    """One of 1 x 1 ended vLLM's engine (CVE-2026-22773); one whose height may be its channels too
    is read otherwise by a guess."""
    content = file_of(Image.new("RGB", (width, height), BLUE), "PNG")
    found = pixels(running.decode(content))
    assert (found == BLUE).all()


@pytest.mark.slow
def test_memory_of_an_image_is_limited(
    family: ImageFamily, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited = limited_decoder(family, monkeypatch, tmp_path, "MAX_MEMORY_BYTES = 32 << 20")
    try:
        with pytest.raises(BadImage, match="too much memory"):
            limited.decode(png_of_zeros(6000, 6000))
        assert limited.decode(picture()).num_tokens == 6
    finally:
        limited.close()


@pytest.mark.slow
def test_time_of_an_image_is_limited(
    family: ImageFamily, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limited = limited_decoder(family, monkeypatch, tmp_path, "MAX_CPU_S = 0.1")
    try:
        with pytest.raises(BadImage, match=r"0\.1 s to decode"):
            limited.decode(png_of_zeros(6000, 6000))
        assert limited.decode(picture()).num_tokens == 6
    finally:
        limited.close()


def limited_decoder(
    family: ImageFamily, monkeypatch: pytest.MonkeyPatch, directory: Path, setting: str
) -> Running:
    """One whose processes have another limit: a module in front of the package's own sets it."""
    name = setting.partition(" ")[0]
    code = (
        "from penstock.server.media import decoder_process as p\n"
        "import json, sys\n"
        f"assert hasattr(p, {name!r})\n"
        f"p.{name} = {setting.partition('= ')[2]}\n"
        "p._TOO_SLOW = f'it takes more than {p.MAX_CPU_S:g} s to decode'\n"
        "p._serve(p.load_model(json.loads(sys.argv[1])))\n"
    )
    (directory / "limited_decoder.py").write_text(code, encoding="utf-8")
    environment = bare_environment()
    environment["PYTHONPATH"] += os.pathsep + str(directory)
    monkeypatch.setattr(decoders, "bare_environment", lambda: environment)
    monkeypatch.setattr(decoders, "_MODULE", "limited_decoder")
    return Running(family)


def process_ids(decoder: ImageDecoder) -> list[int]:
    return [each._process.pid for each in decoder._all if each._process]


def test_a_process_that_is_killed_is_replaced(running: Running) -> None:
    running.decode(picture())
    before = process_ids(running.decoder)
    for each in before:
        os.killpg(each, signal.SIGKILL)
    assert running.decode(picture()).num_tokens == 6
    assert not set(before) & set(process_ids(running.decoder))


def test_one_that_is_killed_while_it_decodes_is_replaced(running: Running) -> None:
    async def killed() -> DecodedImage:
        decoding = asyncio.create_task(running.decoder.decode(LARGE))
        while not (  # noqa: ASYNC110
            busy := [each for each in process_ids(running.decoder) if children(each)]
        ):
            await asyncio.sleep(0.001)
        os.killpg(busy[0], signal.SIGKILL)
        image = await decoding
        assert busy[0] not in process_ids(running.decoder)
        return image

    assert running.run(killed()).num_tokens == 1024


def children(process_id: int) -> list[str]:
    path = Path(f"/proc/{process_id}/task/{process_id}/children")
    return path.read_text(encoding="ascii").split()


def test_the_event_loop_goes_on_while_images_are_decoded(running: Running) -> None:
    """Measured by what the loop's thread has used: other processes may have the CPUs."""

    async def longest() -> float:
        text = base64.b64encode(LARGE).decode()
        before_s, longest_s = time.thread_time(), 0.0
        images = (text, picture(), text)
        work = [asyncio.create_task(running.decoder.decode(each)) for each in images]
        while not all(task.done() for task in work):
            await asyncio.sleep(0.001)
            now_s = time.thread_time()
            before_s, longest_s = now_s, max(longest_s, now_s - before_s)
        assert [task.result().num_tokens for task in work] == [1024, 6, 1024]
        return longest_s

    assert running.run(longest()) < 0.06


def test_a_small_image_does_not_wait_for_a_large_one(running: Running) -> None:
    async def small_first() -> None:
        await asyncio.gather(*(running.decoder.decode(picture()) for _ in range(2)))
        large = asyncio.create_task(running.decoder.decode(LARGE))
        await asyncio.sleep(0.01)
        await running.decoder.decode(picture())
        assert not large.done()
        await large

    running.run(small_first())


def test_too_many_waiting_images_are_refused(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoders, "MAX_WAITING", 2)

    async def three() -> list[str]:
        work = (running.decoder.decode(picture()) for _ in range(3))
        done = await asyncio.gather(*work, return_exceptions=True)
        return [type(each).__name__ for each in done]

    assert running.run(three()).count("ImageQueueFull") == 1


@pytest.mark.slow
async def test_a_model_without_its_processor_is_refused_at_the_start(tmp_path: Path) -> None:
    write_prompt_files(tmp_path, QWEN)
    (tmp_path / "preprocessor_config.json").write_text("{", encoding="utf-8")
    broken = ImageDecoder(load_family(tmp_path))
    try:
        with pytest.raises(InvalidConfig, match="--language-model-only"):
            await broken.start()
    finally:
        broken.close()
