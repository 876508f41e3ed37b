"""Which of several GGUF files is served."""

import pytest

from penstock.engine.hub.gguf import Reference, choose, parse_reference
from penstock.engine.models.errors import InvalidModel

NAMES = (
    "README.md",
    "m-Q4_K.gguf",
    "m-Q4_K_M.gguf",
    "m-Q8_0-00001-of-00002.gguf",
    "m-Q8_0-00002-of-00002.gguf",
    "m-UD-Q2_K_XL.gguf",
    "BF16/m.BF16.gguf",
    "mmproj-F16.gguf",
    "imatrix_unsloth.gguf",
)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("a/b", Reference("a/b")),
        ("a/b:Q4_0", Reference("a/b", "Q4_0")),
        ("a/b-GGUF/b.Q4_0.gguf", Reference("a/b-GGUF", "b.Q4_0.gguf")),
        ("a/b/Q4/b.gguf", Reference("a/b", "Q4/b.gguf")),
        ("a/b.gguf", Reference("a/b.gguf")),
        ("b.gguf", Reference("b.gguf")),
        ("/a/b/c.gguf", Reference("/a/b/c.gguf")),
        ("gpt2", Reference("gpt2")),
    ],
)
def test_names_are_those_of_llama_cpp_and_vllm(model: str, expected: Reference) -> None:
    assert parse_reference(model) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ("Q4_K", ["m-Q4_K.gguf"]),
        ("q4_k_m", ["m-Q4_K_M.gguf"]),
        ("Q2_K_XL", ["m-UD-Q2_K_XL.gguf"]),
        ("UD-Q2_K_XL", ["m-UD-Q2_K_XL.gguf"]),
        ("BF16", ["BF16/m.BF16.gguf"]),
        ("BF16/m.BF16.gguf", ["BF16/m.BF16.gguf"]),
        ("Q8_0", ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]),
        (
            "m-Q8_0-00002-of-00002.gguf",
            ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"],
        ),
    ],
)
def test_a_quantization_or_a_file_is_found(wanted: str, expected: list[str]) -> None:
    assert choose("a/b", NAMES, wanted) == expected


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        (None, "a/b has 5 GGUF models; name one of its files, as in a/b/BF16/m.BF16.gguf: "),
        ("m", "a/b has 5 GGUF models; name one of its files"),
        ("Q3_K", "a/b has no GGUF model 'Q3_K'; name one of its files"),
        ("other.gguf", "a/b has no GGUF model 'other.gguf'; name one of its files"),
        ("mmproj-F16.gguf", "a/b has no GGUF model 'mmproj-F16.gguf'"),
    ],
)
def test_what_is_not_one_model_is_refused_with_those_there_are(
    wanted: str | None, expected: str
) -> None:
    with pytest.raises(InvalidModel) as refused:
        choose("a/b", NAMES, wanted)
    assert expected in str(refused.value)


def test_the_only_model_needs_no_name() -> None:
    assert choose("a/b", ["m.gguf", "mmproj-m.gguf", "config.json"], None) == ["m.gguf"]
    with pytest.raises(InvalidModel, match="a/b has no GGUF model"):
        choose("a/b", ["model.safetensors"], "Q4_0")


def test_a_missing_part_is_named() -> None:
    with pytest.raises(InvalidModel, match=r"a/b lacks m-00002-of-00002\.gguf, a part of"):
        choose("a/b", ["m-00001-of-00002.gguf"], None)
