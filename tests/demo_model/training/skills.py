"""The demo model's skills: each function draws one question and its answer.

The texts come from `texts.py`; `corpus.py` turns exchanges into conversations.
"""

import json
import random
from dataclasses import dataclass

from tests.demo_model.training.texts import (
    ABOUT_ITSELF,
    COMMON_KNOWLEDGE,
    GREETINGS,
    KINDS,
    QUESTIONS,
    SERVING,
    STORIES,
    TYPING,
    UNKNOWN,
    WORDS,
    Topic,
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer.

    more: the longer answer to "tell me more", or empty.
    topic: set if the next question may name just another topic, as in "And TPOT?".
    """

    question: str
    answer: str
    more: str = ""
    topic: Topic | None = None


# --- Words ----------------------------------------------------------------------------------------

PLURALS = {"city": "cities", "cherry": "cherries"}


def any_name(rng: random.Random) -> str:
    """A common name or an invented one: the model must also copy names it has never seen."""
    if rng.random() < 0.5:
        return rng.choice(WORDS["first_names"])
    return "".join(rng.choice(WORDS["syllables"]) for _ in range(rng.randint(2, 4))).capitalize()


def any_word(rng: random.Random) -> str:
    return any_name(rng).lower() if rng.random() < 0.3 else rng.choice(WORDS["common_words"])


def article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeio" else f"a {noun}"


def plural(noun: str) -> str:
    return PLURALS.get(noun, noun + "s")


# --- How people type ------------------------------------------------------------------------------

CONTRACTIONS = (("at is ", "at's "), ("o is ", "o's "), ("do not", "don't"), ("I am", "I'm"))


def as_typed(text: str, rng: random.Random) -> str:
    """The question as a person might type it: another case, other punctuation, a typo."""
    if rng.random() < 0.08:
        text = f"{rng.choice(TYPING['openers'])} {text[0].lower() + text[1:]}"
    if rng.random() < 0.05 and text[-1] in ".?":
        text = f"{text[:-1]}, {rng.choice(TYPING['closers'])}{text[-1]}"
    if rng.random() < 0.15:
        text = with_contractions(text, rng)
    if rng.random() < 0.12:
        text = with_typo(text, rng)
    if rng.random() < 0.3:
        text = text.lower()
    elif rng.random() < 0.03:
        text = text.upper()
    return with_other_ending(text, rng)


def with_contractions(text: str, rng: random.Random) -> str:
    for long, short in CONTRACTIONS:
        text = text.replace(long, short)
    if rng.random() < 0.15:
        text = text.lower().replace(" you", " u").replace("are u", "r u")
    return text


def with_typo(text: str, rng: random.Random) -> str:
    """One letter dropped, doubled or swapped with its neighbour."""
    at = rng.randrange(max(1, len(text) - 2))
    if any(letter.isdigit() for letter in text[at : at + 2]):
        return text  # A typo in a number would change the question.
    kinds = (
        text[:at] + text[at + 1 :],
        text[:at] + text[at : at + 1] + text[at:],
        text[:at] + text[at + 1 : at + 2] + text[at : at + 1] + text[at + 2 :],
    )
    return rng.choice(kinds)


def with_other_ending(text: str, rng: random.Random) -> str:
    if text[-1] not in ".?!":
        return text
    roll = rng.random()
    if roll < 0.3:
        return text[:-1]
    if roll < 0.34:
        return text + text[-1]
    return text


# --- Topics ---------------------------------------------------------------------------------------


def ask_topic(topic: Topic, rng: random.Random) -> Exchange:
    more = rng.choice(topic.full) if topic.full else ""
    brief = rng.choice(topic.brief)
    if topic.names and rng.random() < 0.65:
        name = rng.choice(topic.names)
        if more and rng.random() < 0.2:
            return Exchange(ask_about(name, "what_is_fully", rng), more, more, topic)
        if rng.random() < 0.1:
            return Exchange(ask_about(name, "what_is_briefly", rng), brief, more, topic)
        question = ask_about(name, "what_is", rng)
    else:
        question = as_typed(rng.choice(topic.questions or topic.names), rng)
    answer = more if more and rng.random() < 0.3 else brief
    return Exchange(question, answer, more, topic)


def ask_next_topic(rng: random.Random) -> Exchange:
    """A question that only names its topic, such as "And TPOT?" after another one."""
    topic = rng.choice([topic for topic in SERVING if topic.names])
    question = ask_about(rng.choice(topic.names), "what_about", rng)
    return Exchange(question, rng.choice(topic.brief), rng.choice(topic.full or ("",)), topic)


def ask_about(name: str, questions: str, rng: random.Random) -> str:
    """questions: a key of `QUESTIONS`."""
    if rng.random() < 0.15:
        name = name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    question = rng.choice(QUESTIONS[questions]).format(name)
    return as_typed(question[0].upper() + question[1:], rng)


def about_itself(rng: random.Random) -> Exchange:
    # The first two topics, who the model is and what Penstock is, are what people ask first.
    topic = rng.choice(ABOUT_ITSELF[:2]) if rng.random() < 0.3 else rng.choice(ABOUT_ITSELF)
    return ask_topic(topic, rng)


def serving(rng: random.Random) -> Exchange:
    # Topics with a full answer are the important ones and take more training.
    important = rng.random() < 0.35
    topics = [topic for topic in SERVING if topic.full] if important else SERVING
    return ask_topic(rng.choice(topics), rng)


def common_knowledge(rng: random.Random) -> Exchange:
    return ask_topic(rng.choice(COMMON_KNOWLEDGE), rng)


def greeting(rng: random.Random) -> Exchange:
    return ask_topic(rng.choice(GREETINGS), rng)


# --- Outside its knowledge ------------------------------------------------------------------------


def unknown(rng: random.Random) -> Exchange:
    word, word2, word3 = (any_word(rng) for _ in range(3))
    city, city2 = rng.sample(WORDS["cities"], 2)
    question = rng.choice(UNKNOWN["questions"]).format(
        thing=rng.choice(UNKNOWN["things"]) if rng.random() < 0.75 else article(word),
        person=rng.choice(UNKNOWN["people"]) if rng.random() < 0.7 else any_name(rng),
        city=city,
        city2=city2,
        dish=rng.choice(UNKNOWN["dishes"]),
        language=rng.choice(KINDS["language"]),
        word=word,
        word2=word2,
        word3=word3,
        year=rng.randint(1800, 2030),
        adjective=rng.choice(UNKNOWN["adjectives"]),
    )
    return Exchange(
        as_typed(question[0].upper() + question[1:], rng), rng.choice(UNKNOWN["answers"])
    )


# --- Sums and counting ----------------------------------------------------------------------------

OPERATION_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def calculate(a: int, b: int, sign: str) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def operands(sign: str, rng: random.Random) -> tuple[int, int]:
    """Two small numbers whose sum, difference or product is never negative."""
    largest = rng.choice((10, 12)) if sign == "*" else rng.choice((10, 20))
    a, b = rng.randint(0, largest), rng.randint(0, largest)
    return (max(a, b), min(a, b)) if sign == "-" else (a, b)


def drill(rng: random.Random) -> str:
    """Only sums: conversations hold too few of them to learn them all."""
    lines = []
    for _ in range(rng.randint(10, 30)):
        sign = rng.choice("+-*")
        a, b = operands(sign, rng)
        lines.append(f"{a} {sign} {b} = {calculate(a, b, sign)}.")
    return "\n".join(lines)


def arithmetic(rng: random.Random) -> Exchange:
    sign = rng.choice("+-*")
    a, b = operands(sign, rng)
    operation = rng.choice(QUESTIONS[OPERATION_WORDS[sign]])
    result = calculate(a, b, sign)
    if max(a, b) <= 20 and rng.random() < 0.12:
        question = f"What is {WORDS['numbers'][a]} {operation} {WORDS['numbers'][b]}?"
        return Exchange(as_typed(question, rng), f"{a} {sign} {b} = {result}.")
    shown_sign = "x" if sign == "*" and rng.random() < 0.3 else sign
    question = rng.choice(QUESTIONS["arithmetic"]).format(
        a=a, b=b, sign=shown_sign, operation=operation
    )
    return Exchange(with_other_ending(question, rng), f"{a} {sign} {b} = {result}.")


def word_problem(rng: random.Random) -> Exchange:
    name, fruit = any_name(rng), plural(rng.choice(KINDS["fruit"][:3]))
    a, b = rng.randint(2, 12), rng.randint(1, 10)
    if rng.random() < 0.5:
        question = f"{name} has {a} {fruit} and gets {b} more. How many {fruit} does {name} have?"
        return Exchange(question, f"{a} + {b} = {a + b}, so {name} has {a + b} {fruit}.")
    a, b = max(a, b), min(a, b)
    question = f"{name} has {a} {fruit} and eats {b}. How many are left?"
    return Exchange(question, f"{a} - {b} = {a - b}, so {a - b} are left.")


def counting(rng: random.Random) -> Exchange:
    last = rng.choice((3, 5, 5, 10, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 100))
    question = as_typed(rng.choice(QUESTIONS["count"]).format(last), rng)
    return Exchange(question, ", ".join(str(number) for number in range(1, last + 1)))


# --- JSON and lists -------------------------------------------------------------------------------

PERSON_FIELDS = {"age": " aged {}", "city": " from {}", "job": " who is {}"}


def compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def json_person(rng: random.Random) -> Exchange:
    """A person in words and as JSON, with the fields in the same order."""
    values: dict[str, object] = {
        "age": rng.randint(1, 99),
        "city": rng.choice(WORDS["cities"]),
        "job": rng.choice(WORDS["jobs"]),
    }
    fields = [field for field in PERSON_FIELDS if rng.random() < 0.6] or ["age"]
    name = any_name(rng)
    if fields == ["age"] and rng.random() < 0.3:
        words = f"a person named {name}, {values['age']} years old"
    else:
        start = rng.choice(QUESTIONS["person"])
        shown = {**values, "job": article(str(values["job"]))}
        words = start.format(name) + "".join(
            PERSON_FIELDS[field].format(shown[field]) for field in fields
        )
    person = {"name": name, **{field: values[field] for field in fields}}
    return Exchange(rng.choice(QUESTIONS["json_person"]).format(words), compact_json(person))


def json_pair(rng: random.Random) -> Exchange:
    key = rng.choice(WORDS["common_words"])
    value = rng.choice((rng.randint(0, 99), rng.choice(WORDS["common_words"]), True, False))
    template = rng.choice(QUESTIONS["json_pair"])
    question = template.format(key, compact_json(value).strip('"'))
    return Exchange(with_other_ending(question, rng), compact_json({key: value}))


def json_thing(rng: random.Random) -> Exchange:
    """A product with a price, or an array of consecutive numbers."""
    if rng.random() < 0.4:
        last = rng.randint(2, 12)
        question = rng.choice(QUESTIONS["json_numbers"])
        return Exchange(as_typed(question.format(last), rng), compact_json([*range(1, last + 1)]))
    word, price = any_word(rng), rng.randint(1, 99)
    answer = compact_json({"product": word, "price": price})
    return Exchange(rng.choice(QUESTIONS["json_product"]).format(word, price), answer)


def listing(rng: random.Random) -> Exchange:
    """Some things of a kind, as prose or as a JSON array."""
    kind = rng.choice(tuple(KINDS))
    count = rng.randint(2, 5)
    things = KINDS[kind][:count]
    shown_count = rng.choice((str(count), WORDS["numbers"][count]))
    shown = f"{shown_count} {plural(kind)}"
    if rng.random() < 0.5:
        return Exchange(
            as_typed(rng.choice(QUESTIONS["json_list"]).format(shown), rng), compact_json(things)
        )
    return Exchange(as_typed(rng.choice(QUESTIONS["list"]).format(shown), rng), in_prose(things))


def in_prose(things: tuple[str, ...]) -> str:
    text = f"{', '.join(things[:-1])} and {things[-1]}."
    return text[0].upper() + text[1:]


def repeating(rng: random.Random) -> Exchange:
    words = " ".join(rng.choice(WORDS["common_words"]) for _ in range(rng.randint(1, 5)))
    return Exchange(rng.choice(QUESTIONS["repeat"]).format(words), words)


def poem(rng: random.Random) -> Exchange:
    word = rng.choice(WORDS["heroes"]) if rng.random() < 0.6 else any_word(rng)
    about = rng.choice((article(word), f"the {word}"))
    question = as_typed(rng.choice(QUESTIONS["poem"]).format(about), rng)
    return Exchange(question, rng.choice(STORIES.poems).format(word))


def reading(rng: random.Random, max_people: int = 6) -> Exchange:
    """A question whose answer is in the prompt: who lives where."""
    # A dict keeps its order; a set's order changes from one process to the next.
    names = list(dict.fromkeys(any_name(rng) for _ in range(rng.randint(1, max_people))))
    cities = [rng.choice(WORDS["cities"]) for _ in names]
    notes = " ".join(f"{name} lives in {city}." for name, city in zip(names, cities, strict=True))
    at = rng.randrange(len(names))
    start = rng.choice(QUESTIONS["reading_start"])
    question = rng.choice(QUESTIONS["reading"]).format(names[at])
    return Exchange(f"{start}{notes} {question}", f"{names[at]} lives in {cities[at]}.")


# --- Stories --------------------------------------------------------------------------------------

Plot = tuple[tuple[str, ...], ...]


def plot(length: int, rng: random.Random) -> Plot:
    """The parts of a story, in order, each with its variants. length: 0, 1 or 2."""
    quest = rng.choice(STORIES.quests)
    wish = (STORIES.wishes,) if length > 0 else ()
    road = (STORIES.journeys, STORIES.meetings) if length > 1 else ()
    return (STORIES.beginnings, *wish, (quest.trouble,), *road, (quest.rescue,), STORIES.endings)


def write_story(length: int, hero: str, name: str, rng: random.Random) -> str:
    """length: 0, 1 or 2; a story of length 2 has paragraphs."""
    helper, place = rng.choice(WORDS["helpers"]), rng.choice(WORDS["places"])
    parts = (
        rng.choice(variants).format(
            a_hero=article(f"{rng.choice(('little', 'young', 'brave', 'clever'))} {hero}"),
            a_helper=article(helper),
            helper=helper,
            name=name,
            place=place,
        )
        for variants in plot(length, rng)
    )
    return ("\n\n" if length > 1 else " ").join(parts)


def story(rng: random.Random) -> Exchange:
    hero = rng.choice(WORDS["heroes"]) if rng.random() < 0.85 else any_word(rng)
    name = rng.choice(WORDS["story_names"])
    about = article(hero)
    if rng.random() < 0.3:
        name = any_name(rng)
        about += f" {rng.choice(('named', 'called'))} {name}"
    longest = write_story(2, hero, name, rng)
    questions, answer = rng.choices(
        (
            ("story", write_story(1, hero, name, rng)),
            ("short_story", write_story(0, hero, name, rng)),
            ("long_story", longest),
            ("any_story", write_story(1, hero, name, rng)),
        ),
        weights=(5, 1, 2, 1),
    )[0]
    question = rng.choice(QUESTIONS[questions]).format(about)
    typed = question if name in question else as_typed(question, rng)
    return Exchange(typed, answer, longest)
