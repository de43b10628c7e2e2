"""pydantic-ai: text, a stream, and an object of a class, over chat completions, responses and Anthropic's messages."""

from __future__ import annotations

import asyncio

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic import BaseModel, Field
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from report import QUESTION, check, need, target

SERVER = target()


class Peak(BaseModel):
    """A mountain."""

    metres: int = Field(ge=1, le=8849)
    steep: bool


def openai() -> OpenAIProvider:
    return OpenAIProvider(openai_client=AsyncOpenAI(base_url=f"{SERVER.url}/v1", api_key="none", max_retries=0))


def chat() -> object:
    agent = Agent(OpenAIChatModel(SERVER.model, provider=openai()), model_settings={"temperature": 0.0})

    async def both() -> tuple[str, str]:
        whole = await agent.run(QUESTION, model_settings={"max_tokens": 16})
        async with agent.run_stream(QUESTION, model_settings={"max_tokens": 16}) as stream:
            return whole.output, await stream.get_output()

    whole, streamed = asyncio.run(both())
    need(whole == streamed, (whole, streamed))
    return whole


def structured() -> object:
    """The class is a tool, and a call of it is forced."""
    agent = Agent(OpenAIChatModel(SERVER.model, provider=openai()), output_type=Peak)
    return agent.run_sync(QUESTION, model_settings={"max_tokens": 200}).output


def responses() -> object:
    agent = Agent(OpenAIResponsesModel(SERVER.model, provider=openai()), output_type=Peak)
    return agent.run_sync(QUESTION, model_settings={"max_tokens": 200}).output


def anthropic() -> object:
    client = AsyncAnthropic(base_url=SERVER.url, api_key="none", max_retries=0)
    model = AnthropicModel(SERVER.model, provider=AnthropicProvider(anthropic_client=client))
    return Agent(model, output_type=Peak).run_sync(QUESTION, model_settings={"max_tokens": 200}).output


for work in (chat, structured, responses, anthropic):
    check(work.__name__, work)
