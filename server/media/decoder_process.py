"""The process that makes an encoder's input of images, each in a child with limits.

On stdin: a line of JSON, `num_bytes`, `is_base64`, `max_side` and `options`, and so many bytes. On
stdout: a line of JSON, with `error`; or `killed`, if something else ended the child; or `patches`
(the shape of what follows, in bytes), `patch_grid` and `grid` (frames, rows and columns of patches,
and of the rows that an encoder makes of them), and then the bytes.

Pixels are resized and cut into patches by transformers' own class for the model, without torch,
which nothing of it needs. They are left as the integers that they are: what divides them is the
encoder. The class is loaded once, before the first fork. A child can open no file or connection.
"""

import binascii
import gc
import importlib
import io
import json
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

import numpy as np
from PIL import Image, ImageOps

MAX_CPU_S = 10.0  # 50 million pixels take 3 s
MAX_MEMORY_BYTES = 1 << 30
MAX_PIXELS = 50_000_000  # of a file: those of a telephone have as many
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_WHITE = (255, 255, 255)

_TOO_LARGE = "it takes too much memory to decode; send a smaller one"
_TOO_SLOW = f"it takes more than {MAX_CPU_S:g} s to decode; send a smaller one"
_DAMAGED = "it is damaged, or not complete"


class Model(NamedTuple):
    """processor: an instance of transformers' class for the model. patch_size, num_tokens: see
    `penstock.server.media.families.ImageFamily`. max_bytes: of an image's patches."""

    processor: Any
    patch_size: int
    num_tokens: int | None
    max_bytes: int


class _BadImage(Exception):
    """Its message ends the sentence "the image cannot be read: ..."; it quotes no library, whose
    errors have had addresses of the process in them (CVE-2026-22778)."""


def load_model(given: dict[str, Any]) -> Model:
    """given: fields of an `ImageFamily`, and max_bytes."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # "not installed"
    module, name = given["processor"]
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    processor = kind.from_pretrained(given["directory"], local_files_only=True)
    return Model(processor, *(given[name] for name in Model._fields[1:]))


def _serve(model: Model) -> None:
    Image.MAX_IMAGE_PIXELS = None  # checked by `_opened`, which says how many are allowed
    Image.preinit()
    Image.init()
    prepared(model, _an_image(), None, {})  # imports all that is needed
    gc.freeze()
    _answer({"ready": True})
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        data = sys.stdin.buffer.read(asked["num_bytes"])
        _answer(*_prepared_in_child(model, data, asked))


def _prepared_in_child(
    model: Model, data: bytes, asked: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _be_child(model, data, asked, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        line, content = answer.readline(), answer.read(model.max_bytes + 1)
    _, status = os.waitpid(child, 0)
    if line.endswith(b"\n"):
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply or len(content) == math.prod(reply["patches"]):
            return reply, content
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"killed": True}, b""  # by the kernel, for the memory of all, or by a person
    is_late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
    return {"error": _TOO_SLOW if is_late else _TOO_LARGE}, b""


def _be_child(model: Model, data: bytes, asked: dict[str, Any], writing: int) -> NoReturn:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        num_bytes = _num_mapped_bytes() + MAX_MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # No file or socket can be opened any more, whatever a decoder is made to do.
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)  # RLIMIT_CPU counts whole seconds only
        with os.fdopen(writing, "wb") as answer:
            _write_prepared(model, data, asked, answer)
    finally:
        os._exit(0)


def _write_prepared(model: Model, data: bytes, asked: dict[str, Any], answer: BinaryIO) -> None:
    try:
        if asked["is_base64"]:
            data = binascii.a2b_base64(data.translate(None, b" \t\r\n"), strict_mode=True)
        head, content = prepared(model, data, asked["max_side"], asked["options"])
    except binascii.Error:
        head, content = {"error": "it is not valid base64"}, b""
    except _BadImage as error:
        head, content = {"error": str(error)}, b""
    except MemoryError:
        head, content = {"error": _TOO_LARGE}, b""
    answer.write(json.dumps(head).encode() + b"\n" + content)


def prepared(
    model: Model, data: bytes, max_side: int | None, options: dict[str, int]
) -> tuple[dict[str, Any], bytes]:
    """What is answered for an image file. max_side: the most pixels of each side, to which it is
    made smaller before the model's own rules apply. options: of these rules; see `sizes`. Raises
    _BadImage."""
    image = _opened(data)
    if max_side is not None:
        image.thumbnail((max_side, max_side), Image.Resampling.BICUBIC)
    try:
        made = model.processor(
            images=[image], do_rescale=False, do_normalize=False, **sizes(model.processor, options)
        )
    except ValueError:
        width, height = image.size
        raise _BadImage(f"this model takes none of {width} x {height} pixels") from None
    patches, patch_grid, grid = _patches(model, made)
    head = {"patches": list(patches.shape), "patch_grid": patch_grid, "grid": grid}
    return head, np.ascontiguousarray(patches.astype(np.uint8)).tobytes()


def sizes(processor: Any, options: dict[str, int]) -> dict[str, Any]:
    """The processor's arguments that say how large an image becomes. options: of them, or of the
    edges of its `size`; default_pixels is a longest edge that makes none longer."""
    if not options.keys() & {"shortest_edge", "longest_edge", "default_pixels"}:
        return dict(options)
    edges = dict(processor.size) | options
    longest = min(edges["longest_edge"], options.get("default_pixels", math.inf))
    shortest = min(edges["shortest_edge"], longest)
    return {"size": {"longest_edge": longest, "shortest_edge": shortest}}


def _opened(data: bytes) -> "Image.Image":
    """The first picture of the file, in RGB and the right way up; white where it is transparent."""
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except MemoryError:
        raise
    except Exception:
        raise _BadImage("it is no PNG, JPEG, WebP or GIF file that can be read") from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise _BadImage(f"it has {width} x {height} pixels, more than {MAX_PIXELS:,} together")
    try:
        image.load()
        turned = ImageOps.exif_transpose(image)
        return _in_rgb(turned)
    except MemoryError:
        raise
    except Exception:
        raise _BadImage(_DAMAGED) from None


def _in_rgb(image: "Image.Image") -> "Image.Image":
    if image.mode.startswith("I"):  # 16 bits: Pillow would cut off what is more than 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    opaque = Image.new("RGBA", image.size, _WHITE)
    opaque.alpha_composite(image.convert("RGBA"))
    return opaque.convert("RGB")


def _patches(model: Model, made: Any) -> tuple["np.ndarray[Any, Any]", list[int], list[int]]:
    """The patches, one a row; how many there are (frames, rows, columns); and the same of the rows
    that an encoder makes of them."""
    pixels = np.asarray(made["pixel_values"])
    if "image_grid_thw" in made:  # Qwen: (patches, bytes of one), rows of merge_size² neighbours
        frames, rows, columns = map(int, made["image_grid_thw"][0])
        merged = model.processor.merge_size
        return pixels, [frames, rows, columns], [frames, rows // merged, columns // merged]
    if "num_soft_tokens_per_image" in made:  # Gemma 4: (1, most patches, bytes of one), padded
        positions = np.asarray(made["image_position_ids"])[0]
        columns, rows = (int(most) + 1 for most in positions.max(axis=0))
        num_tokens = int(made["num_soft_tokens_per_image"][0])
        return pixels[0, : rows * columns], [1, rows, columns], [1, 1, num_tokens]
    # Gemma 3: (1, 3, height, width); a patch is (3, size, size), as a convolution reads it.
    (channels, height, width), size = pixels[0].shape, model.patch_size
    rows, columns = height // size, width // size
    cut = pixels[0].reshape(channels, rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    num_tokens = model.num_tokens or rows * columns
    return cut.reshape(rows * columns, -1), [1, rows, columns], [1, 1, num_tokens]


def _an_image() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64)).save(file, "PNG")
    return file.getvalue()


def _answer(reply: dict[str, Any], content: bytes = b"") -> None:
    sys.stdout.buffer.write(json.dumps(reply).encode() + b"\n" + content)
    sys.stdout.buffer.flush()


def _num_mapped_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(pages[0]) * resource.getpagesize()


if __name__ == "__main__":
    try:
        loaded = load_model(json.loads(sys.argv[1]))
    except Exception as error:
        _answer({"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]})
    else:
        _serve(loaded)
