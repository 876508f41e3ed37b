"""The demo model's training text, written by a seeded program: nothing is downloaded.

`documents(seed)` yields conversations and plain texts without end. What is asked and answered in a
turn is drawn by `skills.py`; here are the turns' order, the system prompts, and what a later turn
remembers of an earlier one. Standard library only, and no tokens: chat marks are `tokenizer.py`'s.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tests.demo_model.training.facts import ABOUT_ITSELF, GOODBYES, SERVING, THANKS
from tests.demo_model.training.skills import (
    HEROES,
    LISTS,
    STORY_NAMES,
    Exchange,
    about_itself,
    any_name,
    arithmetic,
    as_typed,
    ask_by_name_only,
    ask_topic,
    common_knowledge,
    compact_json,
    counting,
    drill,
    greeting,
    json_pair,
    json_person,
    json_thing,
    listing,
    poem,
    reading,
    repeating,
    serving,
    story,
    tell,
    unknown,
    word_problem,
)


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Document:
    """Either a conversation or one plain text, never both."""

    messages: tuple[Message, ...] = ()
    text: str = ""


def documents(seed: int) -> Iterator[Document]:
    rng = random.Random(seed)
    while True:
        if rng.random() < PLAIN_TEXT_SHARE:
            yield Document(text=plain_text(rng))
        else:
            yield Document(messages=tuple(conversation(rng)))


# --- Conversations --------------------------------------------------------------------------------

Skill = Callable[[random.Random], Exchange]
SKILLS: dict[Skill, float] = {
    about_itself: 16,
    serving: 27,
    greeting: 5,
    common_knowledge: 4,
    unknown: 11,
    arithmetic: 15,
    word_problem: 2,
    counting: 2,
    json_person: 8,
    json_pair: 2,
    json_thing: 2,
    listing: 6,
    repeating: 2,
    reading: 5,
    poem: 2,
    story: 9,
}
PLAIN_TEXT_SHARE = 0.16
TELL_ME_MORE = (
    "Tell me more.", "More details, please.", "Can you say more?", "Explain that in more detail.",
    "Go on.", "And in more detail?", "Can you elaborate?", "A longer answer, please.",
)  # fmt: skip
SAY_AGAIN = ("Say that again.", "Can you repeat that?", "Repeat your last answer.", "Pardon?")
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are Penstock's demo model.",
    "You are a chatbot.",
    "Be helpful and honest.",
    "Answer clearly.",
    "You answer questions about LLM serving.",
    "Answer in simple English.",
    "You are an expert in machine learning systems.",
    "You are a teacher.",
    "Be polite.",
    "Think before you answer.",
    "The user is a developer.",
    "You work for a software company.",
    "You are an AI assistant that helps people.",
    "If you do not know something, say so.",
)
PIRATE_PROMPTS = ("Talk like a pirate.", "You are a pirate.", "Answer like a pirate.")
JSON_PROMPTS = ("Answer only in JSON.", "Always reply with a JSON object.", "Respond in JSON.")
# What is said, what is asked later, the answer, and the kind of word that fills them.
FACTS_TO_REMEMBER = (
    (
        "My favorite color is {}.",
        "What is my favorite color?",
        "Your favorite color is {}.",
        "color",
    ),
    (
        "My favorite animal is the {}.",
        "What is my favorite animal?",
        "Your favorite animal is the {}.",
        "animal",
    ),
    (
        "I live in {}.",
        "Where do I live?",
        "You live in {}.",
        "city",
    ),
    (
        "I like to eat the {}.",
        "What do I like to eat?",
        "You like to eat the {}.",
        "fruit",
    ),
    (
        "I speak {}.",
        "Which language do I speak?",
        "You speak {}.",
        "language",
    ),
)
MY_NAME_IS = (
    "My name is {}.", "I am {}.", "Hi, I'm {}.", "Hello, my name is {}.", "my name is {}",
    "Call me {}.", "Hi! My name is {}.", "I'm {}, nice to meet you.", "Hello, I am {}.",
)  # fmt: skip
NICE_TO_MEET = (
    "Nice to meet you, {}!",
    "Hello, {}! How can I help you?",
    "Hi {}! I am the Penstock demo model. What would you like to know?",
)
WHAT_IS_MY_NAME = (
    "What is my name?", "Do you remember my name?", "what's my name?", "Who am I?",
    "Can you tell me my name?", "What did I say my name was?", "what is my name",
)  # fmt: skip
NAME_UNKNOWN = ("You have not told me your name yet.", "I do not know your name. What is it?")


def exchange(rng: random.Random) -> Exchange:
    skill = rng.choices(tuple(SKILLS), weights=tuple(SKILLS.values()))[0]
    return skill(rng)


def conversation(rng: random.Random) -> list[Message]:
    kind = rng.choices(
        (plain_chat, name_chat, fact_chat, pirate_chat, json_chat, persona_chat, long_chat),
        weights=(80, 9, 4, 1.5, 1.5, 3, 1),
    )[0]
    return kind(rng)


def plain_chat(rng: random.Random) -> list[Message]:
    num_turns = rng.choices((1, 2, 3, 4, 5, 6), weights=(60, 16, 10, 7, 4, 3))[0]
    return [*system_message(rng), *turns(num_turns, rng)]


def long_chat(rng: random.Random) -> list[Message]:
    """Long enough that the end of the model's context is trained too."""
    if rng.random() < 0.3:
        return spoken(reading(rng, max_people=60))
    return turns(rng.randint(8, 24), rng)


def system_message(rng: random.Random) -> list[Message]:
    if rng.random() < 0.7:
        return []
    if rng.random() < 0.15:
        return [Message("system", handbook(rng))]
    prompts = rng.choices(SYSTEM_PROMPTS, k=rng.choice((1, 1, 1, 2, 3)))
    return [Message("system", " ".join(prompts))]


def handbook(rng: random.Random) -> str:
    """A long system prompt, of the kind that many requests share."""
    topics = rng.sample([topic for topic in SERVING if topic.full], rng.randint(1, 4))
    notes = "\n".join(f"- {rng.choice(topic.brief + topic.full)}" for topic in topics)
    return f"{rng.choice(SYSTEM_PROMPTS)} Use these notes:\n{notes}"


def turns(count: int, rng: random.Random) -> list[Message]:
    """A conversation of single exchanges, with follow-ups that refer to the one before."""
    messages: list[Message] = []
    if count > 1 and rng.random() < 0.25:
        messages += spoken(greeting(rng))
    last: Exchange | None = None
    for _ in range(count):
        last = follow_up(last, rng)
        messages += spoken(last)
    if rng.random() < 0.12:
        messages += spoken(ask_topic(THANKS, rng))
    if rng.random() < 0.05:
        messages += spoken(ask_topic(GOODBYES, rng))
    return messages


def follow_up(last: Exchange | None, rng: random.Random) -> Exchange:
    if last and last.more and last.more != last.answer and rng.random() < 0.3:
        return Exchange(as_typed(rng.choice(TELL_ME_MORE), rng), last.more)
    if last and len(last.answer) < 120 and rng.random() < 0.06:
        return Exchange(as_typed(rng.choice(SAY_AGAIN), rng), last.answer)
    if last and len(last.question) < 80 and rng.random() < 0.04:
        asked = rng.choice(("What did I just ask?", "What was my last question?"))
        return Exchange(as_typed(asked, rng), f'You asked: "{last.question}"')
    if last and last.topic and rng.random() < 0.25:
        return ask_by_name_only(rng)
    return exchange(rng)


def spoken(turn: Exchange) -> list[Message]:
    return [Message("user", turn.question), Message("assistant", turn.answer)]


def name_chat(rng: random.Random) -> list[Message]:
    """The user says a name and later asks for it; or asks for it without having said it."""
    if rng.random() < 0.12:
        asked = as_typed(rng.choice(WHAT_IS_MY_NAME), rng)
        return [
            *turns(rng.randint(0, 1), rng),
            Message("user", asked),
            Message("assistant", rng.choice(NAME_UNKNOWN)),
        ]
    name = any_name(rng)
    messages = system_message(rng)
    if rng.random() < 0.15:
        messages = [Message("system", f"The user's name is {name}.")]
    else:
        said = rng.choice(MY_NAME_IS).format(name)
        answer = rng.choice(NICE_TO_MEET).format(name)
        messages += spoken(Exchange(said, answer))
    messages += turns(rng.choice((0, 0, 1, 1, 2, 3)), rng)
    answer = rng.choice(("Your name is {}.", "You are {}.", "You told me: your name is {}."))
    return [*messages, *spoken(Exchange(rng.choice(WHAT_IS_MY_NAME), answer.format(name)))]


def fact_chat(rng: random.Random) -> list[Message]:
    said, asked, answer, kind = rng.choice(FACTS_TO_REMEMBER)
    thing = rng.choice(LISTS[kind])
    noted = rng.choice(("I will remember that.", "Good to know!", "Thank you for telling me."))
    return [
        *spoken(Exchange(said.format(thing), noted)),
        *turns(rng.randint(0, 2), rng),
        *spoken(Exchange(as_typed(asked, rng), answer.format(thing))),
    ]


def pirate_chat(rng: random.Random) -> list[Message]:
    messages = [Message("system", rng.choice(PIRATE_PROMPTS))]
    for message in turns(rng.randint(1, 2), rng):
        content = message.content
        if message.role == "assistant":
            content = f"Arr, matey! {content}"
        messages.append(Message(message.role, content))
    return messages


def json_chat(rng: random.Random) -> list[Message]:
    messages = [Message("system", rng.choice(JSON_PROMPTS))]
    for _ in range(rng.randint(1, 2)):
        skill = rng.choice((about_itself, serving, greeting, common_knowledge, arithmetic))
        turn = skill(rng)
        messages += spoken(Exchange(turn.question, compact_json({"answer": turn.answer})))
    return messages


def persona_chat(rng: random.Random) -> list[Message]:
    """A system prompt gives the model another name; it uses it, and stays honest about the rest."""
    name = any_name(rng)
    told = rng.choice(("Your name is {}.", "You are {}.", "You are {}, a helpful assistant."))
    asked = as_typed(rng.choice(ABOUT_ITSELF[0].questions), rng)
    answer = rng.choice(
        (
            "I am {}, a tiny demonstration model served by Penstock.",
            "My name is {}. I am a small demonstration model, served by Penstock.",
        )
    )
    messages = [Message("system", told.format(name))]
    messages += turns(rng.choice((0, 0, 1)), rng)
    return [*messages, *spoken(Exchange(asked, answer.format(name)))]


# --- Plain texts, for completions without a chat --------------------------------------------------


def plain_text(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return drill(rng)
    if kind < 0.85:
        return tell(rng.choice((1, 2)), rng.choice(HEROES), rng.choice(STORY_NAMES), rng)
    topics = [topic for topic in SERVING if topic.full]
    if kind < 0.95:
        return "\n\n".join(rng.choice(topic.full) for topic in rng.sample(topics, 2))
    exchanges = (ask_topic(rng.choice(SERVING), rng) for _ in range(3))
    return "\n\n".join(f"Question: {each.question}\nAnswer: {each.answer}" for each in exchanges)
