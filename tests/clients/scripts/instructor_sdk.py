"""instructor: an object of a class, by a forced call and by a schema."""

from __future__ import annotations

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field
from report import QUESTION, check, target

SERVER = target()


class Peak(BaseModel):
    """A mountain."""

    metres: int = Field(ge=1, le=8849)
    steep: bool


def peak(mode: instructor.Mode) -> object:
    """What does not match the class raises: no second attempt."""
    client = instructor.from_openai(OpenAI(base_url=f"{SERVER.url}/v1", api_key="none", max_retries=0), mode=mode)
    options = {"model": SERVER.model, "max_tokens": 200, "max_retries": 0, "seed": 3}
    return client.chat.completions.create(
        messages=[{"role": "user", "content": QUESTION}], response_model=Peak, **options
    )


check("tools", lambda: peak(instructor.Mode.TOOLS))
check("json_schema", lambda: peak(instructor.Mode.JSON_SCHEMA))
