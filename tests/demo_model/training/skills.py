"""What the demo model can do: each skill draws one question and its answer.

The ways people ask and type are here, and so are stories, sums, JSON, counting and reading; what
there is to know is data in `facts.py`, and how exchanges become conversations is in `corpus.py`.
"""

import json
import random
from dataclasses import dataclass

from tests.demo_model.training.facts import (
    ABOUT_ITSELF,
    COMMON_KNOWLEDGE,
    GREETINGS,
    SERVING,
    Topic,
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer.

    more: the longer answer that "tell me more" would get, or nothing.
    topic: what it was about, if a next question may be as short as "And TPOT?".
    """

    question: str
    answer: str
    more: str = ""
    topic: Topic | None = None


# --- Words ----------------------------------------------------------------------------------------


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def phrases(text: str) -> tuple[str, ...]:
    return tuple(text.split("; "))


FIRST_NAMES = words(
    "Ada Alan Alice Amir Anna Ben Bob Carla Carlos Chen Clara Dana David Elena Emma Eva Felix Finn "
    "Grace Hana Hugo Ines Iris Jack James Jana John Jonas Julia Kai Karen Kim Lena Leo Lily Linus "
    "Lucas Maria Mark Mary Max Maya Mia Mila Nadia Nina Noah Nora Oliver Omar Oscar Otto Paul Pia "
    "Priya Rosa Ruth Sam Sara Sofia Theo Tim Tom Uma Vera Victor Wei Yuki Zara Zoe"
)
SYLLABLES = words(
    "ba be bo da de di do fa fi ga go ha jo ka ke ki ko la le li lo lu ma me mi mo na ne ni no pa "
    "pe ra re ri ro ru sa se si so ta te ti to va ve vi wa ya yo za ze zo ia el ber nor ul ith son "
    "ton chris pher stein ald wig mund gar tha ris quin xan der bel lyn ah bria ov ski ett ine"
)
CITIES = words(
    "Paris London Berlin Rome Madrid Tokyo Oslo Vienna Lisbon Dublin Prague Athens Cairo Lima "
    "Boston Chicago Delhi Seoul Sydney Toronto"
)
JOBS = words(
    "teacher doctor engineer baker farmer pilot painter nurse writer lawyer cook singer student "
    "programmer gardener driver"
)
LISTS = {
    "fruit": words("apple banana cherry grape lemon mango orange peach pear plum"),
    "color": words("red green blue yellow orange purple black white brown pink"),
    "animal": words("dog cat horse cow sheep fox bear wolf lion tiger"),
    "city": CITIES[:10],
    "planet": words("Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune"),
    "vegetable": words("carrot potato onion tomato pea bean cabbage leek"),
    "bird": words("robin owl eagle crow swan duck sparrow hawk"),
    "tree": words("oak pine birch maple willow ash elm cedar"),
    "instrument": words("piano violin flute drum guitar harp trumpet cello"),
    "language": words("English French German Spanish Italian Chinese Japanese Arabic"),
}
PLURALS = {"city": "cities", "cherry": "cherries"}
HEROES = words(
    "fox robot cat dog bear rabbit mouse owl dragon hedgehog turtle wolf princess knight wizard "
    "pirate girl boy penguin frog snail bird whale elephant lion squirrel computer train king "
    "farmer fish horse duck monkey star cloud"
)
PLACES = (
    "a quiet forest",
    "a small village by the sea",
    "an old house on a hill",
    "a green valley",
    "a city full of lights",
    "a deep cave under a mountain",
    "a garden behind a wall",
    "a little town by a river",
)
WORDS = words(
    "river stone apple window silver garden paper mountain candle yellow bridge winter music ocean "
    "pencil summer rabbit table cloud letter coffee orange forest mirror engine water happy hello "
    "world quick brown lazy jumps over small green light night"
)

POEMS = (
    "Little {0}, so quiet, so small,\nI saw you beside the old garden wall.\nThe evening came, "
    "the sun went down,\nand you were the brightest thing in town.",
    "Morning light arrives.\nThe {0} waits beside the road.\nNothing else to do.",
    "The {0} was up before the day,\nand sang the last of the night away.\nNow all of the stars "
    "have gone to bed,\nand there is the sun, all round and red.",
)
NUMBER_WORDS = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)


def any_name(rng: random.Random) -> str:
    """A known name, or an invented one: copying a name must not depend on having seen it."""
    if rng.random() < 0.5:
        return rng.choice(FIRST_NAMES)
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 4))).capitalize()


def any_word(rng: random.Random) -> str:
    return any_name(rng).lower() if rng.random() < 0.3 else rng.choice(WORDS)


def article(noun: str) -> str:
    return f"an {noun}" if noun[0].lower() in "aeio" else f"a {noun}"


def plural(noun: str) -> str:
    return PLURALS.get(noun, noun + "s")


# --- How people type ------------------------------------------------------------------------------

OPENERS = ("Please", "Hi,", "Hey,", "Hello,", "OK,", "So,", "Well,", "Hi!", "Now", "And")
SHORT_WORDS = (("at is ", "at's "), ("o is ", "o's "), ("do not", "don't"), ("I am", "I'm"))
CLOSERS = ("please", "thanks", "pls", "thank you")


def as_typed(text: str, rng: random.Random) -> str:
    """The same question as a person might type it: other case, other punctuation, a slip."""
    if rng.random() < 0.08:
        text = f"{rng.choice(OPENERS)} {text[0].lower() + text[1:]}"
    if rng.random() < 0.05 and text[-1] in ".?":
        text = f"{text[:-1]}, {rng.choice(CLOSERS)}{text[-1]}"
    if rng.random() < 0.15:
        text = with_short_words(text, rng)
    if rng.random() < 0.12:
        text = with_slip(text, rng)
    if rng.random() < 0.3:
        text = text.lower()
    elif rng.random() < 0.03:
        text = text.upper()
    return with_other_ending(text, rng)


def with_short_words(text: str, rng: random.Random) -> str:
    for long, short in SHORT_WORDS:
        text = text.replace(long, short)
    if rng.random() < 0.15:
        text = text.lower().replace(" you", " u").replace("are u", "r u")
    return text


def with_slip(text: str, rng: random.Random) -> str:
    """One letter dropped, doubled or swapped with its neighbour."""
    at = rng.randrange(max(1, len(text) - 2))
    if any(letter.isdigit() for letter in text[at : at + 2]):
        return text  # A slip in a number would ask for something else.
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

WHAT_IS = (
    "What is {}?",
    "What is {}?",
    "What's {}?",
    "Explain {}.",
    "Can you explain {}?",
    "Could you explain {} to me?",
    "Tell me about {}.",
    "How does {} work?",
    "Define {}.",
    "What do you know about {}?",
    "{}?",
    "What is meant by {}?",
    "Please explain {}.",
    "I do not understand {}.",
    "Describe {}.",
    "What exactly is {}?",
    "Do you know what {} is?",
    "Why does {} matter?",
)
WHAT_IS_BRIEFLY = (
    "Briefly, what is {}?",
    "What is {}, in one sentence?",
    "Explain {} briefly.",
    "In short: what is {}?",
    "Explain {} like I am five.",
    "{} in a nutshell?",
    "Explain {} in one sentence.",
)
WHAT_IS_FULLY = (
    "Explain {} in detail.",
    "Tell me all about {}.",
    "Give me a long explanation of {}.",
    "Explain {} at length.",
    "Write a paragraph about {}.",
    "How does {} work, in detail?",
)


def ask_topic(topic: Topic, rng: random.Random) -> Exchange:
    more = rng.choice(topic.full) if topic.full else ""
    brief = rng.choice(topic.brief)
    if topic.names and rng.random() < 0.65:
        name = rng.choice(topic.names)
        if more and rng.random() < 0.2:
            return Exchange(fill(WHAT_IS_FULLY, name, rng), more, more, topic)
        if rng.random() < 0.1:
            return Exchange(fill(WHAT_IS_BRIEFLY, name, rng), brief, more, topic)
        question = fill(WHAT_IS, name, rng)
    else:
        question = as_typed(rng.choice(topic.questions or topic.names), rng)
    answer = more if more and rng.random() < 0.3 else brief
    return Exchange(question, answer, more, topic)


def ask_by_name_only(rng: random.Random) -> Exchange:
    """ "And TPOT?": after another topic, its name is question enough."""
    topic = rng.choice([topic for topic in SERVING if topic.names])
    question = fill(("And {}?", "What about {}?", "And what is {}?"), rng.choice(topic.names), rng)
    return Exchange(question, rng.choice(topic.brief), rng.choice(topic.full or ("",)), topic)


def fill(templates: tuple[str, ...], name: str, rng: random.Random) -> str:
    if rng.random() < 0.15:
        name = name.removeprefix("a ").removeprefix("an ").removeprefix("the ")
    question = rng.choice(templates).format(name)
    return as_typed(question[0].upper() + question[1:], rng)


def about_itself(rng: random.Random) -> Exchange:
    # The first two topics, who it is and what Penstock is, are what people ask first.
    topic = rng.choice(ABOUT_ITSELF[:2]) if rng.random() < 0.3 else rng.choice(ABOUT_ITSELF)
    return ask_topic(topic, rng)


def serving(rng: random.Random) -> Exchange:
    # Topics with a full answer are the important ones, and have more to learn.
    important = rng.random() < 0.35
    topics = [topic for topic in SERVING if topic.full] if important else SERVING
    return ask_topic(rng.choice(topics), rng)


def common_knowledge(rng: random.Random) -> Exchange:
    return ask_topic(rng.choice(COMMON_KNOWLEDGE), rng)


def greeting(rng: random.Random) -> Exchange:
    return ask_topic(rng.choice(GREETINGS), rng)


# --- What it does not know ------------------------------------------------------------------------

UNKNOWN_QUESTIONS = (
    "What is {thing}?",
    "What is {thing}?",
    "Explain {thing}.",
    "Tell me about {thing}.",
    "How does {thing} work?",
    "Who is {person}?",
    "Who was {person}?",
    "Who invented {thing}?",
    "What is the weather in {city}?",
    "What is the weather like today?",
    "What time is it?",
    "What day is it today?",
    "What is the news today?",
    "Write a Python function for {thing}.",
    "Write code that sorts a list.",
    "How do I cook {dish}?",
    "Give me a recipe for {dish}.",
    "Translate this to {language}: {word} {word2}.",
    "How do you say {word} in {language}?",
    "Who won the World Cup in {year}?",
    "What happened in {year}?",
    "What is the population of {city}?",
    "How far is it from {city} to {city2}?",
    "How tall is {person}?",
    "What should I do in {city}?",
    "What do you think about {thing}?",
    "What is the meaning of life?",
    "Should I buy {thing}?",
    "Can you book a flight to {city}?",
    "Solve the integral of x squared.",
    "What is the square root of {year}?",
    "Summarize this article about {thing}.",
    "{word} {word2} {word3}",
    "Why is {thing} so {adjective}?",
    "Who is the president?",
    "When was {city} founded?",
    "Where can I buy {thing}?",
    "Is {thing} {adjective}?",
    "Compare {thing} and {word}.",
)
UNKNOWN_THINGS = phrases(
    "photosynthesis; gravity; quantum physics; the moon; the French Revolution; democracy; "
    "bitcoin; the stock market; evolution; electricity; a volcano; chess; football; jazz; the "
    "Roman Empire; chemistry; a black hole; the internet; a diesel engine; climate change; "
    "cancer; the heart; mathematics; a bicycle; Linux; Java; JavaScript; philosophy; history; "
    "opera; the pyramids; poetry; a vaccine; DNA; the ocean; a rainbow; money; tennis; politics; "
    "a hurricane; Shakespeare; biology; inflation; a car; time travel; algebra; the Eiffel Tower; "
    "cheese; wine; a telescope; blockchain; artificial life; a database; a spreadsheet; knitting; "
    "dark matter; astronomy; a compiler; Rust; Kubernetes; marketing; yoga"
)
UNKNOWN_PEOPLE = phrases(
    "Albert Einstein; Napoleon; Marie Curie; Mozart; Cleopatra; Isaac Newton; Beethoven; Picasso; "
    "Julius Caesar; Galileo; Darwin; Gandhi; Elvis; Plato"
)
DISHES = phrases("pasta; pizza; soup; rice; bread; pancakes; curry; an omelette; a cake; sushi")
ADJECTIVES = words("important big expensive difficult good bad old popular beautiful dangerous")
UNKNOWN_ANSWERS = (
    "I am a tiny demonstration model, and I do not know that. Ask me how language models are "
    "served.",
    "I do not know. I am only a small demonstration model, but I can explain continuous batching "
    "or tell a story.",
    "That is beyond me: I am a tiny demonstration model. Try a question about serving, a sum, or a "
    "story.",
    "Sorry, I am a tiny demonstration model and cannot answer that.",
)


def unknown(rng: random.Random) -> Exchange:
    word, word2, word3 = (any_word(rng) for _ in range(3))
    city, city2 = rng.sample(CITIES, 2)
    question = rng.choice(UNKNOWN_QUESTIONS).format(
        thing=rng.choice(UNKNOWN_THINGS) if rng.random() < 0.75 else article(word),
        person=rng.choice(UNKNOWN_PEOPLE) if rng.random() < 0.7 else any_name(rng),
        city=city,
        city2=city2,
        dish=rng.choice(DISHES),
        language=rng.choice(LISTS["language"]),
        word=word,
        word2=word2,
        word3=word3,
        year=rng.randint(1800, 2030),
        adjective=rng.choice(ADJECTIVES),
    )
    return Exchange(as_typed(question[0].upper() + question[1:], rng), rng.choice(UNKNOWN_ANSWERS))


# --- Sums and counting ----------------------------------------------------------------------------

SUM_QUESTIONS = (
    "What is {a} {spoken} {b}?",
    "What is {a} {sign} {b}?",
    "{a} {sign} {b}",
    "{a}{sign}{b}",
    "{a} {sign} {b} = ?",
    "{a}{sign}{b}=",
    "How much is {a} {spoken} {b}?",
    "Calculate {a} {sign} {b}.",
    "Compute {a} {spoken} {b}.",
    "What's {a}{sign}{b}?",
    "Can you tell me what {a} {spoken} {b} is?",
)
SPOKEN_SIGNS = {"+": ("plus", "and"), "-": ("minus",), "*": ("times", "multiplied by")}


def sum_of(a: int, b: int, sign: str) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[sign]


def operands(sign: str, rng: random.Random) -> tuple[int, int]:
    """Two small numbers whose sum, difference or product is never negative."""
    most = rng.choice((10, 12)) if sign == "*" else rng.choice((10, 20))
    a, b = rng.randint(0, most), rng.randint(0, most)
    return (max(a, b), min(a, b)) if sign == "-" else (a, b)


def drill(rng: random.Random) -> str:
    """Sums and nothing else: a conversation holds too few of them to learn them all."""
    lines = []
    for _ in range(rng.randint(10, 30)):
        sign = rng.choice("+-*")
        a, b = operands(sign, rng)
        lines.append(f"{a} {sign} {b} = {sum_of(a, b, sign)}.")
    return "\n".join(lines)


def arithmetic(rng: random.Random) -> Exchange:
    sign = rng.choice("+-*")
    a, b = operands(sign, rng)
    spoken = rng.choice(SPOKEN_SIGNS[sign])
    result = sum_of(a, b, sign)
    if max(a, b) <= 20 and rng.random() < 0.12:
        words = f"What is {NUMBER_WORDS[a]} {spoken} {NUMBER_WORDS[b]}?"
        return Exchange(as_typed(words, rng), f"{a} {sign} {b} = {result}.")
    shown_sign = "x" if sign == "*" and rng.random() < 0.3 else sign
    question = rng.choice(SUM_QUESTIONS).format(a=a, b=b, sign=shown_sign, spoken=spoken)
    return Exchange(with_other_ending(question, rng), f"{a} {sign} {b} = {result}.")


def word_problem(rng: random.Random) -> Exchange:
    name, fruit = any_name(rng), plural(rng.choice(LISTS["fruit"][:3]))
    a, b = rng.randint(2, 12), rng.randint(1, 10)
    if rng.random() < 0.5:
        question = f"{name} has {a} {fruit} and gets {b} more. How many {fruit} does {name} have?"
        return Exchange(question, f"{a} + {b} = {a + b}, so {name} has {a + b} {fruit}.")
    a, b = max(a, b), min(a, b)
    question = f"{name} has {a} {fruit} and eats {b}. How many are left?"
    return Exchange(question, f"{a} - {b} = {a - b}, so {a - b} are left.")


def counting(rng: random.Random) -> Exchange:
    last = rng.choice((3, 5, 5, 10, 10, 10, 12, 15, 20, 20, 25, 30, 40, 50, 100))
    templates = ("Count to {}.", "Count from 1 to {}.", "Can you count to {}?", "count up to {}")
    question = as_typed(rng.choice(templates).format(last), rng)
    return Exchange(question, ", ".join(str(number) for number in range(1, last + 1)))


# --- JSON and lists -------------------------------------------------------------------------------

PERSON_QUESTIONS = (
    "Give me JSON for {}.",
    "Write JSON for {}.",
    "JSON for {}, please.",
    "Make a JSON object for {}.",
    "Give me a JSON object for {}.",
    "Return {} as JSON.",
    "Describe {} in JSON.",
    "json: {}",
)
PERSON_FIELDS = {"age": " aged {}", "city": " from {}", "job": " who is {}"}


def compact_json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def json_person(rng: random.Random) -> Exchange:
    """A person in words and as JSON: the fields appear in the order in which they were named."""
    values: dict[str, object] = {
        "age": rng.randint(1, 99),
        "city": rng.choice(CITIES),
        "job": rng.choice(JOBS),
    }
    fields = [field for field in PERSON_FIELDS if rng.random() < 0.6] or ["age"]
    name = any_name(rng)
    if fields == ["age"] and rng.random() < 0.3:
        words = f"a person named {name}, {values['age']} years old"
    else:
        start = rng.choice(("a person named {}", "a person called {}", "{}", "a user named {}"))
        shown = {**values, "job": article(str(values["job"]))}
        words = start.format(name) + "".join(
            PERSON_FIELDS[field].format(shown[field]) for field in fields
        )
    person = {"name": name, **{field: values[field] for field in fields}}
    return Exchange(rng.choice(PERSON_QUESTIONS).format(words), compact_json(person))


def json_pair(rng: random.Random) -> Exchange:
    key = rng.choice(WORDS)
    value = rng.choice((rng.randint(0, 99), rng.choice(WORDS), True, False))
    templates = (
        "Give me JSON with the key {} and the value {}.",
        "Make a JSON object with {} set to {}.",
        "JSON where {} is {}.",
    )
    question = rng.choice(templates).format(key, compact_json(value).strip('"'))
    return Exchange(with_other_ending(question, rng), compact_json({key: value}))


def json_thing(rng: random.Random) -> Exchange:
    """A product with a price, or numbers in a row."""
    if rng.random() < 0.4:
        last = rng.randint(2, 12)
        question = rng.choice(("A JSON array of the numbers 1 to {}.", "JSON list from 1 to {}"))
        return Exchange(as_typed(question.format(last), rng), compact_json([*range(1, last + 1)]))
    word, price = any_word(rng), rng.randint(1, 99)
    templates = (
        "Give me JSON for a product named {} that costs {}.",
        "JSON for a {} with price {}.",
        "Write a JSON object: product {}, price {}.",
    )
    answer = compact_json({"product": word, "price": price})
    return Exchange(rng.choice(templates).format(word, price), answer)


def listing(rng: random.Random) -> Exchange:
    """Some things of a kind, as prose or as a JSON array."""
    kind = rng.choice(tuple(LISTS))
    count = rng.randint(2, 5)
    things = LISTS[kind][:count]
    shown_count = rng.choice((str(count), NUMBER_WORDS[count]))
    shown = f"{shown_count} {plural(kind)}"
    if rng.random() < 0.5:
        templates = (
            "Give me a JSON list of {}.",
            "List {} as JSON.",
            "Write a JSON array of {}.",
            "{} as a JSON array",
            "JSON list of {}",
        )
        return Exchange(as_typed(rng.choice(templates).format(shown), rng), compact_json(things))
    templates = ("Name {}.", "List {}.", "Tell me {}.", "Can you name {}?", "Give me {}.")
    return Exchange(as_typed(rng.choice(templates).format(shown), rng), in_prose(things))


def in_prose(things: tuple[str, ...]) -> str:
    text = f"{', '.join(things[:-1])} and {things[-1]}."
    return text[0].upper() + text[1:]


def repeating(rng: random.Random) -> Exchange:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    templates = ("Repeat after me: {}", "Say {}", 'Say "{}".', "Repeat: {}", "Please say: {}")
    return Exchange(rng.choice(templates).format(words), words)


def poem(rng: random.Random) -> Exchange:
    word = rng.choice(HEROES) if rng.random() < 0.6 else any_word(rng)
    templates = ("Write a poem about {}.", "A poem about {}, please.", "Write a haiku about {}.")
    about = rng.choice((article(word), f"the {word}"))
    return Exchange(
        as_typed(rng.choice(templates).format(about), rng), rng.choice(POEMS).format(word)
    )


def reading(rng: random.Random, max_people: int = 6) -> Exchange:
    """The answer stands in the question: who lives where, or does what."""
    # A dict keeps its order; a set's order would change from one process to the next.
    names = list(dict.fromkeys(any_name(rng) for _ in range(rng.randint(1, max_people))))
    cities = [rng.choice(CITIES) for _ in names]
    notes = " ".join(f"{name} lives in {city}." for name, city in zip(names, cities, strict=True))
    at = rng.randrange(len(names))
    start = rng.choice(("", "", "Here are some notes. ", "Read this: "))
    question = rng.choice(("Where does {} live?", "Which city does {} live in?")).format(names[at])
    return Exchange(f"{start}{notes} {question}", f"{names[at]} lives in {cities[at]}.")


# --- Stories --------------------------------------------------------------------------------------

STORY_QUESTIONS = (
    "Tell me a story about {}.",
    "Tell me a story about {}.",
    "Write a story about {}.",
    "Can you tell me a story about {}?",
    "A story about {}, please.",
    "I want a story about {}.",
    "Make up a story about {}.",
    "story about {}",
)
SHORT_STORY_QUESTIONS = ("Tell me a short story about {}.", "Write a very short story about {}.")
LONG_STORY_QUESTIONS = (
    "Tell me a long story about {}.",
    "Write a long story about {}.",
    "Tell me a very long story about {}.",
)
OPEN_STORY_QUESTIONS = ("Tell me a story.", "Do you know a story?", "Another story, please.")

BEGINNINGS = (
    "Once upon a time, there was {a_hero} named {name}, who lived in {place}.",
    "In {place}, there lived {a_hero} called {name}.",
    "Long ago, {a_hero} named {name} lived in {place}.",
)
WISHES = (
    "{name} was happy, but wanted to see what lay beyond the hills.",
    "Every evening, {name} looked at the stars and wished for a friend.",
    "{name} loved to ask questions, and nobody could answer them all.",
    "{name} was small, and everyone said that small ones could do nothing great.",
)
# What went wrong, and how it was put right: one belongs to the other.
QUESTS = (
    (
        "One day, the river stopped, and all the gardens became dry. Nobody knew why.",
        "High up, {name} found a great wheel that had stopped turning, with a branch caught in it. "
        "{name} pulled the branch out, the wheel turned, and the river flowed again.",
    ),
    (
        "One morning, {name} found an old map under a stone. It showed a path that nobody had "
        "walked for a hundred years.",
        "Where the path ended, there was a valley full of light, and in it a tree with golden "
        "fruit. {name} took one fruit for each friend, and left the rest for others.",
    ),
    (
        "One night, a bright light fell from the sky and landed behind the trees.",
        "It was a little star that had lost its way. {name} lifted it up, higher and higher, until "
        "it flew back into the sky.",
    ),
    (
        "One winter, snow closed all the roads, and the bread was almost gone.",
        "On the other side of the snow lay a warm mill with sacks of flour. {name} brought back "
        "enough for everyone, and the ovens were lit again.",
    ),
    (
        "One evening, the big clock stopped, and no one knew when to sleep or when to wake.",
        "Inside the clock, {name} found a tired beetle that had fallen asleep between the wheels. "
        "{name} carried it to a soft leaf, and the clock began to tick.",
    ),
    (
        "One spring, all the songs were gone. The birds opened their beaks, and no sound came out.",
        "In a hollow tree, {name} found the wind, which had kept the songs because it was lonely. "
        "{name} promised to visit it every week, and the wind let the songs go.",
    ),
)
JOURNEYS = (
    "So {name} packed a little bag and set out. The way was long, and the wind was cold, but "
    "{name} did not turn back.",
    "{name} was afraid, but went to look all the same. Step by step, the path led up the mountain.",
    'Everyone else stayed at home. "I will go," said {name}, and began to walk.',
)
MEETINGS = (
    'On the way, {name} met {a_helper}. "Where are you going?" it asked. "To find out," said '
    '{name}. "Then I will come with you," said the {helper}.',
    "Beside the path sat {a_helper} with a hurt foot. {name} stopped to help, and from then on "
    "they went together.",
    "At a bridge, {a_helper} blocked the way and asked a riddle. {name} thought for a long time, "
    "and then found the answer. The {helper} laughed and let {name} pass.",
)
ENDINGS = (
    "When {name} came home, everyone cheered. And from that day on, {name} was never alone again.",
    "{name} went home with a light heart, and told the story to everyone who would listen.",
    "And {name} learned that even the smallest one can do great things, one step at a time.",
)
STORY_NAMES = words("Luna Max Pip Milo Ruby Nino Bella Toby Daisy Oscar Nell Felix Hazel Otto")
HELPERS = words("crow hedgehog goat beaver badger owl toad raven")
Plot = tuple[tuple[str, ...], ...]


def plot(length: int, rng: random.Random) -> Plot:
    """The parts of a story, in order, each with the ways to write it. length: 0, 1 or 2."""
    trouble, rescue = rng.choice(QUESTS)
    wish = (WISHES,) if length > 0 else ()
    road = (JOURNEYS, MEETINGS) if length > 1 else ()
    return (BEGINNINGS, *wish, (trouble,), *road, (rescue,), ENDINGS)


def tell(length: int, hero: str, name: str, rng: random.Random) -> str:
    """A story; a long one comes in paragraphs."""
    helper, place = rng.choice(HELPERS), rng.choice(PLACES)
    parts = (
        rng.choice(sentences).format(
            a_hero=article(f"{rng.choice(('little', 'young', 'brave', 'clever'))} {hero}"),
            a_helper=article(helper),
            helper=helper,
            name=name,
            place=place,
        )
        for sentences in plot(length, rng)
    )
    return ("\n\n" if length > 1 else " ").join(parts)


def story(rng: random.Random) -> Exchange:
    hero = rng.choice(HEROES) if rng.random() < 0.85 else any_word(rng)
    name = rng.choice(STORY_NAMES)
    about = article(hero)
    if rng.random() < 0.3:
        name = any_name(rng)
        about += f" {rng.choice(('named', 'called'))} {name}"
    longest = tell(2, hero, name, rng)
    questions, answer = rng.choices(
        (
            (STORY_QUESTIONS, tell(1, hero, name, rng)),
            (SHORT_STORY_QUESTIONS, tell(0, hero, name, rng)),
            (LONG_STORY_QUESTIONS, longest),
            (OPEN_STORY_QUESTIONS, tell(1, hero, name, rng)),
        ),
        weights=(5, 1, 2, 1),
    )[0]
    question = rng.choice(questions).format(about)
    typed = question if name in question else as_typed(question, rng)
    return Exchange(typed, answer, longest)
