"""The images of a request: where each comes from, and the rows that stand for it in a prompt."""

import asyncio
import contextlib
import hashlib
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from penstock.engine.client import ModelInfo
from penstock.scheduler.types import Insert
from penstock.server.errors import (
    CONTEXT_TOO_LONG,
    ImageQueueFull,
    InvalidRequest,
    UnsupportedParameter,
)
from penstock.server.media.decoder import BadImage, DecodedImage, ImageDecoder
from penstock.server.media.families import ImageFamily
from penstock.server.media.fetcher import ImageFetcher

_KINDS = ("image/png", "image/jpeg", "image/jpg", "image/webp", "image/gif")
_DATA = re.compile(r"data:([^,;]{0,64})((?:;[^,;]{0,64}){0,4}),", re.IGNORECASE)
# OpenAI's: the most pixels of a side where detail is "low".
_LOW_SIDE = 512
# Of the patches of a request's images. The engine gets them in one message.
_MAX_BYTES = 128 << 20
# Of those of all open requests, here; the engine has as many.
_MAX_OPEN_BYTES = 512 << 20
# Of those that may come again: a conversation sends its images with each turn.
_CACHE_BYTES = 128 << 20


class ImagePart(NamedTuple):
    """param: the field of the client that names it. url: it, or a data: URL."""

    param: str
    url: str
    detail: str | None = None


@dataclass(slots=True)
class ImageReader:
    """Reads images for one model. max_images: of a prompt. options: of the model's image processor,
    unless a request has its own. num_open_bytes: of the patches of all requests that were
    submitted."""

    family: ImageFamily
    decoder: ImageDecoder
    fetcher: ImageFetcher
    max_images: int
    options: Mapping[str, int] = field(default_factory=dict)
    num_open_bytes: Callable[[], int] = lambda: 0
    _num_read_bytes: int = field(default=0, init=False)  # of those that are not yet
    _cache: OrderedDict[bytes, DecodedImage] = field(default_factory=OrderedDict, init=False)

    def close(self) -> None:
        self.decoder.close()
        self.fetcher.close()

    async def read(
        self,
        images: Sequence[ImagePart],
        info: ModelInfo,
        own_options: Mapping[str, Any] | None = None,
    ) -> list[DecodedImage]:
        """One after the other, so that those of other requests have their turns between.
        own_options: the request's mm_processor_kwargs. Raises InvalidRequest, which names the part,
        and ImageQueueFull."""
        if len(images) > self.max_images:
            first = images[self.max_images].param
            message = f"{first} is one image too many: this server takes {self.max_images} a prompt"
            raise InvalidRequest(f"{message} (--limit-mm-per-prompt)", param=first)
        decoded: list[DecodedImage] = []
        options = self._options(info, own_options or {})
        try:
            for image in images:
                if self.num_open_bytes() + self._num_read_bytes > _MAX_OPEN_BYTES:
                    raise ImageQueueFull
                with _named(image):
                    decoded.append(await self._read(image, options))
                self._num_read_bytes += len(decoded[-1].content)
                _check_fits(image, decoded, info)
        finally:
            self._num_read_bytes -= _num_bytes(decoded)
        return decoded

    def _options(self, info: ModelInfo, own: Mapping[str, Any]) -> dict[str, int]:
        """Raises InvalidRequest."""
        try:
            options = {**self.options, **self.family.read_options(own)}
        except ValueError as error:
            name = "mm_processor_kwargs"
            raise InvalidRequest(f"{name}: {error}", param=name) from error
        default = info.encoder and info.encoder.default_patches
        if default and "longest_edge" in self.family.options.keys() - options.keys():
            options["default_pixels"] = default * self.family.patch_size**2
        return options

    async def _read(self, image: ImagePart, options: Mapping[str, int]) -> DecodedImage:
        """Raises BadImage and ImageQueueFull."""
        max_side = _LOW_SIDE if image.detail == "low" else None
        if image.url[:5].lower() != "data:":
            content = await self.fetcher.fetch(image.url)
            return await self._decoded(content, max_side, options)
        found = _DATA.match(image.url)
        if found is None or found[2].rpartition(";")[2].lower() != "base64":
            raise BadImage("its data: URL must begin like data:image/png;base64,")
        if found[1].lower() not in _KINDS:
            raise BadImage(f"its type is {found[1]!r}; it must be one of {', '.join(_KINDS)}")
        return await self._decoded(image.url[found.end() :], max_side, options)

    async def _decoded(
        self, file: str | bytes, max_side: int | None, options: Mapping[str, int]
    ) -> DecodedImage:
        """From the cache, whose last is the one that was used last. Raises as `decode`."""
        cache, key = self._cache, await asyncio.to_thread(_digest, file, f"{max_side}{options}")
        decoded = cache.pop(key, None)
        if decoded is None:
            decoded = await self.decoder.decode(file, max_side=max_side, options=options)
        cache[key] = decoded
        while _num_bytes(cache.values()) > _CACHE_BYTES:
            cache.popitem(last=False)
        return decoded

    def with_rows(
        self,
        text: str,
        encode: Callable[[str], tuple[int, ...]],
        images: Sequence[DecodedImage],
        info: ModelInfo,
    ) -> tuple[tuple[int, ...], tuple[Insert, ...]]:
        """The ids of a rendered prompt, with a token for each row of its images, and where these
        are. Raises InvalidRequest where the text has not as many marks as there are images."""
        family = self.family
        ids = encode(text.replace(family.marker, family.replacement))
        if (num_marks := ids.count(family.image_id)) != len(images):
            raise InvalidRequest(
                f"messages has {len(images)} images, and the prompt that the model's chat template "
                f"makes of it has {num_marks} marks for one ({family.marker}); leave out images "
                "where the model takes none, such as in results of tools, and this mark in texts",
                param="messages",
            )
        expanded: list[int] = []
        inserts = []
        left = iter(images)
        for token_id in ids:
            if token_id != family.image_id:
                expanded.append(token_id)
                continue
            image = next(left)
            inserts.append(_insert(image, len(expanded), info))
            expanded += [token_id] * image.num_tokens
        return tuple(expanded), tuple(inserts)


def _digest(file: str | bytes, how: str) -> bytes:
    kind = how.encode() + b" of base64" * isinstance(file, str)
    data = file.encode("utf-8", "surrogatepass") if isinstance(file, str) else file
    return hashlib.blake2b(data, key=hashlib.blake2b(kind).digest()).digest()


def _num_bytes(images: Iterable[DecodedImage]) -> int:
    return sum(len(each.content) for each in images)


def _check_fits(image: ImagePart, decoded: Sequence[DecodedImage], info: ModelInfo) -> None:
    """decoded: a request's images up to this one. Raises InvalidRequest."""
    num_tokens = sum(each.num_tokens for each in decoded)
    if num_tokens > info.max_model_len:
        raise InvalidRequest(
            f"the images up to {image.param} are {num_tokens} tokens; this model's context "
            f"has {info.max_model_len}; send fewer or smaller ones, or detail: low",
            param=image.param,
            code=CONTEXT_TOO_LONG,
        )
    encoder = info.encoder
    is_large = encoder and decoded[-1].patches[0] > encoder.max_patches
    if is_large or _num_bytes(decoded) > _MAX_BYTES:
        message = f"{image.param} is too large for this server; send it smaller"
        raise InvalidRequest(f"{message}, or with detail: low", param=image.param)


def _insert(image: DecodedImage, start: int, info: ModelInfo) -> Insert:
    assert info.encoder, "a model without an encoder has no images"
    return Insert(
        start=start,
        num_tokens=image.num_tokens,
        digest=image.digest,
        grid=image.grid,
        content=image.content,
        patches=image.patches,
        patch_grid=image.patch_grid,
        operations=info.encoder.operations(image.patches[0]),
        is_whole=info.encoder.is_whole,
    )


@contextlib.contextmanager
def _named(image: ImagePart) -> Iterator[None]:
    try:
        yield
    except BadImage as error:
        message = f"the image {image.param} cannot be read: {error}"
        raise InvalidRequest(message, param=image.param, code="invalid_image") from error


def not_supported(image: ImagePart) -> UnsupportedParameter:
    """Of a model that takes no images, or of which the text alone is served."""
    return UnsupportedParameter(
        image.param,
        "it serves text alone, as this model takes no images, or its images are not supported, or "
        "it was started with --language-model-only",
    )
