"""The openai package: models, completions, chat, tools, reasoning, responses, files and batches, errors."""

from __future__ import annotations

import io
import json
import time

from openai import AuthenticationError, BadRequestError, NotFoundError, OpenAI
from report import QUESTION, THINKING, TOOL, check, need, refused, target

SERVER = target()
URL, MODEL = SERVER.url, SERVER.model
client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES = [{"role": "user", "content": QUESTION}]
TOOLS = [{"type": "function", "function": TOOL}]
BATCH_S = 120.0


def models() -> object:
    listed = [model.id for model in client.models.list()]
    need(MODEL in listed, listed)
    return client.models.retrieve(MODEL).id


def completions() -> object:
    answer = client.completions.create(model=MODEL, prompt="def add(a, b):", max_tokens=8, temperature=0)
    need(answer.usage.completion_tokens == 8, answer.usage)
    return answer.choices[0].text


def scores() -> object:
    answer = client.completions.create(model=MODEL, prompt="def add(a, b):", max_tokens=0, echo=True, logprobs=1)
    scored = answer.choices[0].logprobs.token_logprobs
    need(scored[0] is None and all(value <= 0 for value in scored[1:]), scored)
    return f"{len(scored)} tokens"


def chat() -> object:
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    need(text == whole.choices[0].message.content, (text, whole))
    need(chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1])
    return text


def tools() -> object:
    options = {"model": MODEL, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    message = client.chat.completions.create(messages=MESSAGES, **options).choices[0].message
    (call,) = message.tool_calls
    with client.chat.completions.stream(messages=MESSAGES, **options) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0].function
    need((streamed.name, streamed.arguments) == (call.function.name, call.function.arguments), streamed)
    answer = {"role": "tool", "tool_call_id": call.id, "content": "3967"}
    client.chat.completions.create(model=MODEL, tools=TOOLS, messages=[*MESSAGES, message, answer], max_tokens=8)
    return f"{call.function.name}({json.loads(call.function.arguments)})"


def one_call() -> object:
    """What LangChain and others send beside `auto`; the model may call or not."""
    options = {"tool_choice": "auto", "parallel_tool_calls": False, "max_tokens": 16}
    message = client.chat.completions.create(model=MODEL, messages=MESSAGES, tools=TOOLS, **options).choices[0].message
    need(len(message.tool_calls or []) <= 1, message)
    return message.content


def reasoning() -> object:
    """The demo model never ends its reasoning, so there is nothing else."""
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 16, "temperature": 0, "extra_body": THINKING}
    whole = client.chat.completions.create(**options)
    message = whole.choices[0].message
    chunks = [chunk.choices[0].delta for chunk in client.chat.completions.create(stream=True, **options)]
    streamed = "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks)
    need(message.reasoning_content and not message.content, message)
    need(streamed == message.reasoning_content, streamed)
    counted = whole.usage.completion_tokens_details.reasoning_tokens
    need(0 < counted <= whole.usage.completion_tokens, whole.usage)  # the token that ends the answer is none
    return f"{counted} tokens: {streamed}"


def structured() -> object:
    schema = {"name": "peak", "schema": TOOL["parameters"]}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}
    )
    return json.loads(answer.choices[0].message.content)


def responses() -> object:
    first = client.responses.create(model=MODEL, input=QUESTION, max_output_tokens=16, temperature=0)
    with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=16, temperature=0) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_response()
    need(last.output_text == first.output_text, last)
    again = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=8, temperature=0
    )
    need(again.usage.input_tokens > first.usage.input_tokens, again.usage)
    return f"{kinds[0]} to {kinds[-1]}"


def response_tools() -> object:
    answer = client.responses.create(
        model=MODEL, input=QUESTION, tools=[{"type": "function", "strict": True, **TOOL}], tool_choice="required"
    )
    call = next(item for item in answer.output if item.type == "function_call")
    history = [{"role": "user", "content": QUESTION}, *answer.output]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": "3967"})
    client.responses.create(model=MODEL, input=history, max_output_tokens=8, store=False)
    return f"{call.name}({json.loads(call.arguments)})"


def batches() -> object:
    lines = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": MESSAGES, "max_tokens": 4 + number, "temperature": 0},
        }
        for number in range(3)
    ]
    data = io.BytesIO("\n".join(map(json.dumps, lines)).encode())
    file = client.files.create(file=("lines.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a check"}
    )
    until = time.monotonic() + BATCH_S
    while batch.status not in ("completed", "failed", "expired", "cancelled") and time.monotonic() < until:
        time.sleep(0.5)  # the API has no other way to wait
        batch = client.batches.retrieve(batch.id)
    need(batch.status == "completed", batch)
    results = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    need({result["custom_id"] for result in results} == {line["custom_id"] for line in lines}, results)
    return f"{len(results)} lines"


def errors() -> object:
    ask = client.chat.completions.create
    image = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/peak.png"}}
    seen = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, image]}]
    many = [{"role": "user", "content": "word " * 40_000}]
    other = OpenAI(base_url=f"{SERVER.keyed_url}/v1", api_key="a-key-that-nobody-has", max_retries=0)
    said = [
        refused(NotFoundError, lambda: ask(model="unknown", messages=MESSAGES)),
        refused(BadRequestError, lambda: ask(model=MODEL, messages=seen)),
        refused(BadRequestError, lambda: ask(model=MODEL, messages=many)),
        refused(AuthenticationError, lambda: other.models.list()),
    ]
    need("context_length_exceeded" in said[2], said[2])
    return [line[:40] for line in said]


def key() -> object:
    return OpenAI(base_url=f"{SERVER.keyed_url}/v1", api_key=SERVER.key, max_retries=0).models.retrieve(MODEL).id


WORK = (
    *(models, completions, scores, chat, tools, one_call, reasoning, structured),
    *(responses, response_tools, batches, errors, key),
)
for work in WORK:
    check(work.__name__, work)
