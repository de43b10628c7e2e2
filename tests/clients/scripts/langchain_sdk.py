"""langchain-openai: a chat model, a forced call, structured output, and an agent with two tools."""

from __future__ import annotations

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent
from pydantic import BaseModel, Field
from report import QUESTION, check, need, target

SERVER = target()
URL, MODEL = SERVER.url, SERVER.model
chat = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, max_tokens=64, temperature=0)


class Peak(BaseModel):
    """A mountain."""

    metres: int = Field(ge=1, le=8849)
    steep: bool


@tool
def height(peak: str) -> int:
    """The height of a mountain in metres."""
    return 3967


@tool
def weather(peak: str) -> str:
    """The weather on a mountain."""
    return "snow"


def stream() -> object:
    text = "".join(str(chunk.content) for chunk in chat.stream(QUESTION))
    need(text == chat.invoke(QUESTION).content, text)
    return text


def forced() -> object:
    bound = chat.bind_tools([height, weather], tool_choice="any", parallel_tool_calls=False)
    (call,) = bound.invoke(QUESTION).tool_calls
    return f"{call['name']}({call['args']})"


def structured() -> object:
    """By a schema, which is the default, and by a forced call."""
    long = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", max_retries=0, max_tokens=200)
    ways = ("json_schema", "function_calling")
    found = [long.with_structured_output(Peak, method=way).invoke(QUESTION) for way in ways]
    need(all(isinstance(one, Peak) for one in found), found)
    return found


def agent() -> object:
    model = chat.bind_tools([height, weather], parallel_tool_calls=False)
    done = create_react_agent(model, [height, weather]).invoke({"messages": [("user", QUESTION)]})
    return f"{len(done['messages'])} messages"


def responses() -> object:
    other = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="none", use_responses_api=True, max_tokens=16)
    return other.invoke(QUESTION).content


for work in (stream, forced, structured, agent, responses):
    check(work.__name__, work)
