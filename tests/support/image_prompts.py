"""Files of small models that take images, of each family: what a server reads of them. And images,
sound ones and others."""

import base64
import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel

from tests.support.tiny_models import made_config

# Of each family: the special tokens, and what config.json says of images.
QWEN = "qwen3_vl"
GEMMA3 = "gemma3"
GEMMA4 = "gemma4"
# Without these transformers' processor takes no images either.
_AUDIO = {"audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>"}
_SPECIAL: dict[str, tuple[str, ...]] = {
    QWEN: ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    GEMMA3: (
        *("<bos>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ),
    GEMMA4: (
        *("<bos>", "<|turn>", "<turn|>", "<|image>", "<image|>", "<|image|>"),
        *_AUDIO.values(),
    ),
}
_NAMES: dict[str, dict[str, str]] = {
    QWEN: {"image_token_id": "<|image_pad|>"},
    GEMMA3: {
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    GEMMA4: {
        "image_token_id": "<|image|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
    },
}
_PROCESSORS: dict[str, dict[str, Any]] = {
    QWEN: {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "size": {"shortest_edge": 4096, "longest_edge": 1 << 20},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
    GEMMA3: {
        "image_processor_type": "Gemma3ImageProcessor",
        "size": {"height": 56, "width": 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "do_convert_rgb": None,
        "do_pan_and_scan": None,
    },
    GEMMA4: {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 16,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    },
}
_TINY = {QWEN: "qwen3_vl", GEMMA3: "gemma3_wrapped", GEMMA4: "gemma4_small_wrapped"}
_PATCH_SIZES = {QWEN: 16, GEMMA3: 14, GEMMA4: 16}
_IMAGE_TEXTS = {
    QWEN: "<|vision_start|><|image_pad|><|vision_end|>",
    GEMMA3: "<start_of_image>",
    GEMMA4: "<|image|>",
}
# As the templates of these families are: a part of a message is text or an image.
_TEMPLATE = """{%- for message in messages %}<@TURN@>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}@IMAGE@{% elif part.type == 'text' %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<@END@>
{% endfor %}{% if add_generation_prompt %}<@TURN@>assistant
{% endif %}"""


def write_prompt_files(directory: Path, family: str, **options: Any) -> None:
    """Writes config.json, the tokenizer, the chat template and the image processor's settings.
    options: of the text model's settings."""
    tokenizer = _tokenizer(_SPECIAL[family])
    size = {"vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 4096}
    made_config(_TINY[family], **size, **options).save_pretrained(directory)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config |= {name: tokenizer.token_to_id(text) for name, text in _NAMES[family].items()}
    config["vision_config"]["patch_size"] = _PATCH_SIZES[family]
    if family == GEMMA3:
        config["mm_tokens_per_image"] = 4
        config["vision_config"]["image_size"] = 56
    turn, end = [text for text in _SPECIAL[family] if text != "<bos>"][:2]
    template = _TEMPLATE.replace("<@TURN@>", turn).replace("<@END@>", end)
    files = {
        "config.json": config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": end,  # which transformers' processor of Gemma 4 wants
            "chat_template": template.replace("@IMAGE@", _IMAGE_TEXTS[family]),
            "extra_special_tokens": (_AUDIO if family == GEMMA4 else {})
            | {
                name.replace("_index", "").replace("_id", ""): text
                for name, text in _NAMES[family].items()
            },
        },
        "preprocessor_config.json": _PROCESSORS[family],
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content), encoding="utf-8")


def _tokenizer(special: tuple[str, ...]) -> Tokenizer:
    """One of bytes, in which two newlines are one token: so that what stands around an image may
    join with it, as in the families' own."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    newline = "Ċ"
    vocab = {letter: i for i, letter in enumerate(letters)} | {newline * 2: len(letters)}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[(newline, newline)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return tokenizer


def picture(width: int = 96, height: int = 64, kind: str = "PNG", **options: Any) -> bytes:
    """An image file: colours that run from corner to corner, so that no two patches are equal."""
    image = Image.new("RGB", (width, height))
    image.putdata(
        [
            (x * 255 // width, y * 255 // height, (x + y) % 256)
            for y in range(height)
            for x in range(width)
        ]
    )
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def png_of_zeros(width: int, height: int) -> bytes:
    """A file of a few kilobytes, whatever its size in pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        checked = kind + content
        return struct.pack(">I", len(content)) + checked + struct.pack(">I", zlib.crc32(checked))

    packer, rows = zlib.compressobj(9), bytearray()
    for _ in range(height if width * height < 1 << 30 else 1):
        rows += packer.compress(bytes(1 + width))
    rows += packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", bytes(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts
