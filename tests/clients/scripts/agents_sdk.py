"""openai-agents: an agent with a tool, over the Responses API, which is its default, and over chat completions."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from report import QUESTION, check, target

SERVER = target()
URL, MODEL = SERVER.url, SERVER.model
set_tracing_disabled(True)


@function_tool
def height(peak: str) -> str:
    """The height of a mountain in metres."""
    return "3967"


def run(kind: type[OpenAIResponsesModel] | type[OpenAIChatCompletionsModel], choice: str | None) -> object:
    """With "required" the first answer is a call; the agent then sends its result and lets the model decide."""

    async def answered() -> object:
        model = kind(model=MODEL, openai_client=AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
        settings = ModelSettings(temperature=0.0, max_tokens=64, tool_choice=choice)
        agent = Agent(name="guide", instructions="Be short.", tools=[height], model=model, model_settings=settings)
        result = await Runner.run(agent, QUESTION, max_turns=4)
        return f"{len(result.new_items)} items"

    return asyncio.run(answered())


check("responses", lambda: run(OpenAIResponsesModel, None))
check("responses with a call", lambda: run(OpenAIResponsesModel, "required"))
check("chat", lambda: run(OpenAIChatCompletionsModel, None))
check("chat with a call", lambda: run(OpenAIChatCompletionsModel, "required"))
