"""litellm: its routes `openai/` and `anthropic/`, responses, and the error on which clients compact a conversation."""

from __future__ import annotations

import json

import litellm
from report import QUESTION, TOOL, check, need, target

SERVER = target()
URL, MODEL = SERVER.url, SERVER.model
OPTIONS = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
MESSAGES = [{"role": "user", "content": QUESTION}]


def chat() -> object:
    whole = litellm.completion(messages=MESSAGES, max_tokens=16, temperature=0, **OPTIONS)
    stream = litellm.completion(messages=MESSAGES, max_tokens=16, temperature=0, stream=True, **OPTIONS)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    need(text == whole.choices[0].message.content, (text, whole))
    return text


def tools() -> object:
    answer = litellm.completion(
        messages=MESSAGES, tools=[{"type": "function", "function": TOOL}], tool_choice="required", **OPTIONS
    )
    call = answer.choices[0].message.tool_calls[0].function
    return f"{call.name}({json.loads(call.arguments)})"


def overflow() -> object:
    try:
        litellm.completion(messages=[{"role": "user", "content": "word " * 40_000}], max_tokens=8, **OPTIONS)
    except litellm.ContextWindowExceededError:
        return "ContextWindowExceededError"
    raise ValueError("the overflow of the context was not recognised")


def responses() -> object:
    answer = litellm.responses(input=QUESTION, max_output_tokens=16, temperature=0, **OPTIONS)
    return answer.output[0].content[0].text


def anthropic() -> object:
    options = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "max_tokens": 16, "temperature": 0}
    whole = litellm.completion(messages=MESSAGES, **options)
    stream = litellm.completion(messages=MESSAGES, stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    need(text == whole.choices[0].message.content, (text, whole))
    return text


for work in (chat, tools, overflow, responses, anthropic):
    check(work.__name__, work)
