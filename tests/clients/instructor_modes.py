"""Instructor, in its modes for OpenAI's API.

What it does that others do not: in TOOLS it forces the call by name and reads only its arguments;
in JSON it sends `json_object` with the schema in the system message, so only the model can follow
it; if the output does not validate, it sends it back with its call and a result and retries;
when it streams, it parses the text so far at every delta.
"""

from typing import Annotated, Any, Literal

import instructor
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field, field_validator

MODEL = "penstock-demo"
MESSAGES: Any = [{"role": "user", "content": "Somebody."}]
MODES = (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA)


class Person(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=120)
    kind: Literal["human", "robot"]


def client_of(url: str, mode: instructor.Mode) -> instructor.Instructor:
    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    return instructor.from_openai(openai, mode=mode)


@pytest.mark.parametrize("mode", MODES)
def test_an_object_is_made(demo: str, mode: instructor.Mode) -> None:
    person, answer = client_of(demo, mode).create_with_completion(
        model=MODEL, messages=MESSAGES, response_model=Person, temperature=0
    )
    assert isinstance(person, Person) and answer.usage.total_tokens > 0


def test_json_mode_gives_an_object_with_any_keys(demo: str) -> None:
    class Anything(BaseModel, extra="allow"):
        pass

    made = client_of(demo, instructor.Mode.JSON).create(
        model=MODEL,
        messages=[{"role": "user", "content": "Write JSON for a person named Ada, aged 36."}],
        response_model=Anything,
        temperature=0,
        max_retries=0,
    )
    assert isinstance(made, Anything)


@pytest.mark.parametrize("mode", MODES)
def test_output_that_does_not_validate_is_retried(demo: str, mode: instructor.Mode) -> None:
    tries: list[int] = []

    class Picky(BaseModel):
        age: int = Field(ge=0, le=120)

        @field_validator("age")
        @classmethod
        def second_try(cls, age: int) -> int:
            tries.append(age)
            if len(tries) < 2:
                raise ValueError("say another age")
            return age

    client_of(demo, mode).create(
        model=MODEL, messages=MESSAGES, response_model=Picky, temperature=0, max_retries=3
    )
    assert len(tries) == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_partial_object_grows(demo: str, mode: instructor.Mode) -> None:
    # Long enough to come in several events on a busy machine too, where one has several tokens.
    class People(BaseModel):
        people: Annotated[list[Person], Field(min_length=8, max_length=8)]

    parts: list[Any] = list(
        client_of(demo, mode).create_partial(
            model=MODEL, messages=MESSAGES, response_model=People, temperature=0
        )
    )
    sizes = [len(part.people or ()) for part in parts]
    assert len(parts) > 2 and sizes == sorted(sizes) and sizes[0] < sizes[-1]
    People.model_validate(parts[-1].model_dump())


def test_an_iterable_gives_one_object_after_another(demo: str) -> None:
    class Sum(BaseModel):
        total: Literal[1, 2, 3]

    found = list(
        client_of(demo, instructor.Mode.TOOLS).create_iterable(
            model=MODEL, messages=MESSAGES, response_model=Sum, temperature=0, max_tokens=200
        )
    )
    assert found and all(isinstance(item, Sum) for item in found)


async def test_the_async_client_makes_an_object(demo: str) -> None:
    client = instructor.from_openai(AsyncOpenAI(base_url=f"{demo}/v1", api_key="none"))
    made = await client.create(model=MODEL, messages=MESSAGES, response_model=Person, temperature=0)
    assert isinstance(made, Person)


def test_the_responses_api_makes_an_object(demo: str) -> None:
    made = client_of(demo, instructor.Mode.RESPONSES_TOOLS).create(
        model=MODEL, messages=MESSAGES, response_model=Person, temperature=0
    )
    assert isinstance(made, Person)
