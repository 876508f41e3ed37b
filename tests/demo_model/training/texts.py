"""The texts that the corpus is drawn from, read from texts/: topics, templates and words."""

from pathlib import Path
from typing import TypeVar

import msgspec

_FOLDER = Path(__file__).with_name("texts")
T = TypeVar("T")
Phrases = dict[str, tuple[str, ...]]


class Topic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One thing to know.

    names: what goes into "What is {name}?"; empty when only `questions` name the topic.
    questions: further ways to ask, whole sentences.
    brief, full: answers of a sentence or two, and ones long enough to watch them being streamed;
    the corpus draws one.
    """

    names: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()
    brief: tuple[str, ...]
    full: tuple[str, ...] = ()


class Quest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong in a story, and what puts it right."""

    trouble: str
    rescue: str


class Stories(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The parts of poems and stories; one of each kind is drawn."""

    poems: tuple[str, ...]
    beginnings: tuple[str, ...]
    wishes: tuple[str, ...]
    journeys: tuple[str, ...]
    meetings: tuple[str, ...]
    endings: tuple[str, ...]
    quests: tuple[Quest, ...]


class UserFact(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Something that a user says and asks for later. kind: of `KINDS`, fills the templates."""

    statement: str
    question: str
    answer: str
    kind: str


def _read(name: str, shape: type[T]) -> T:
    return msgspec.toml.decode((_FOLDER / f"{name}.toml").read_bytes(), type=shape)


def _topics(name: str) -> tuple[Topic, ...]:
    return _read(f"topics/{name}", dict[str, tuple[Topic, ...]])["topics"]


ABOUT_ITSELF = _topics("about_itself")
SERVING = _topics("serving")
COMMON_KNOWLEDGE = _topics("common_knowledge")
GREETINGS = _topics("greetings")
(THANKS,) = _topics("thanks")
(GOODBYES,) = _topics("goodbyes")

QUESTIONS = _read("questions", Phrases)
CONVERSATION = _read("conversation", Phrases)
USER_FACTS = _read("user_facts", dict[str, tuple[UserFact, ...]])["user_facts"]
UNKNOWN = _read("unknown", Phrases)
TYPING = _read("typing", Phrases)
STORIES = _read("stories", Stories)
WORDS = _read("words", Phrases)
KINDS = _read("kinds", Phrases)
