"""Special tokens apart from the texts: around these, they make what the tokenizer makes."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import BertProcessing, ByteLevel, RobertaProcessing, TemplateProcessing

from penstock.server.prompt.tokenizer import PromptEncoder

IDS = {"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "x": 3, "y": 4}
PROCESSORS = {
    "none": None,
    "bytes": ByteLevel(),
    "bert": BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "roberta": RobertaProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "begin": TemplateProcessing(
        single="[CLS] $A", pair="[CLS] $A $B:1", special_tokens=[("[CLS]", 1)]
    ),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_the_ids_around_texts_are_the_tokenizers(name: str) -> None:
    tokenizer = Tokenizer(models.WordLevel(IDS, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor := PROCESSORS[name]:
        tokenizer.post_processor = processor
    encoder = PromptEncoder(tokenizer, None)
    one, two = encoder.special_tokens(), encoder.special_tokens(are_two=True)
    assert [*one.before, 3, 4, *one.after] == tokenizer.encode("x y").ids
    encoding = tokenizer.encode("x y", "y")
    assert [*two.before, 3, 4, *two.between, 4, *two.after] == encoding.ids
    if two.num_first is None:
        assert not any(encoding.type_ids)
    else:
        first = len(two.before) + 2 + two.num_first
        assert encoding.type_ids == [0] * first + [1] * (len(encoding.ids) - first)
