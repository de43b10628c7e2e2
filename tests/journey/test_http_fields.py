"""Fields and routes that clients of OpenAI, Anthropic and vLLM use, each with its effect on the answer."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loadtest.loadgen.targets import Http
from services.router.frontend import cors
from tandem.errors import Unavailable
from tests.support.templates import HERMES

DEMO = Path(__file__).parents[2] / "demo/model"
PROMPT, CHAT = "Raised when", [{"role": "user", "content": "What does heapq.heappop do?"}]
KEY, OTHER_KEY = "anna-key-0123456789", "ben-key-01234567890"
PAGE = "https://chat.example.com"
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("rise", "fall")
]


class Door:
    """A cluster's HTTP side."""

    def __init__(self, cluster: Any) -> None:
        self.cluster = cluster
        self.raw = httpx2.AsyncClient(base_url=f"http://{cluster.router.http.address}", timeout=30)

    async def complete(self, **body: Any) -> Any:
        """The answer's JSON; greedy, unless the body says otherwise."""
        answer = await self.raw.post("/v1/completions", json={"prompt": PROMPT, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def ids(self, text: str) -> list[int]:
        ids: list[int] = (await self.raw.post("/tokenize", json={"prompt": text})).json()["tokens"]
        return ids


@pytest.fixture
def door(inside: Any) -> Any:
    @asynccontextmanager
    async def start(**settings: Any) -> AsyncIterator[Door]:
        async with inside(**{"model": str(DEMO), "http_port": 0, "kv_blocks": 1024, **settings}) as cluster:
            one = Door(cluster)
            yield one
            await one.raw.aclose()

    return start


def edited(folder: Path, *special: str) -> Path:
    """The demo's checkpoint, with these special tokens in place of the tokens that were merged last."""
    shutil.copytree(DEMO, folder)
    path = folder / "tokenizer.json"
    about = json.loads(path.read_text())
    vocabulary, merges = about["model"]["vocab"], about["model"]["merges"]
    for content in special:
        gone = max(vocabulary, key=vocabulary.__getitem__)
        token = vocabulary.pop(gone)
        merges[:] = [pair for pair in merges if "".join(pair).replace(" ", "") != gone]
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        about["added_tokens"].append({"id": token, "content": content, "special": True, **flags})
    path.write_text(json.dumps(about))
    return folder


# ---- names


async def test_the_model_has_the_names_that_the_setting_says_and_keeps_its_path_to_itself(door: Any) -> None:
    """Any of the names is accepted in a request, the first one is in answers and lists, over HTTP and gRPC; the path is
    accepted and never shown."""
    async with door(served_model_name="team/chat,chat") as it:
        shown = [await it.raw.get("/v1/models"), await it.raw.get("/v1/models/team/chat")]
        assert [one["id"] for one in shown[0].json()["data"]] == ["team/chat"]
        assert shown[1].json() == shown[0].json()["data"][0]
        for name in ("team/chat", "chat", str(DEMO), "", None):
            answer = await it.complete(model=name, max_tokens=2, tandem_receipt=True)
            assert answer["model"] == answer["choices"][0]["tandem_receipt"]["model"] == "team/chat"
        for name in ("chat", str(DEMO), "team%2Fchat"):
            assert (await it.raw.get(f"/v1/models/{name}")).json()["id"] == "team/chat"
        assert (await it.cluster.client.model_info()).model == "team/chat"
        unknown = await it.raw.post("/v1/completions", json={"model": "gpt-4", "prompt": "x"})
        missing = await it.raw.get("/v1/models/gpt-4")
        assert (unknown.status_code, missing.status_code) == (404, 404)
        assert missing.json()["error"]["param"] == "model"
        metrics = await it.raw.get("/metrics")
        for one in (*shown, unknown, missing, metrics):
            assert str(DEMO) not in one.text
        assert 'model="team/chat"' in metrics.text
        async with it.raw.stream("GET", "/dashboard/events", headers={"x-tandem-dashboard": "1"}) as events:
            state = await anext(line async for line in events.aiter_lines() if line.startswith("data:"))
        assert '"team/chat"' in state
        assert str(DEMO) not in state


# ---- browsers


async def test_a_page_of_a_named_origin_may_call_the_api_and_no_other(door: Any, tmp_path: Path) -> None:
    """A preflight needs no key, the request does; a browser hides the answer from a page of another origin."""
    keys = tmp_path / "keys"
    keys.write_text(f"anna {KEY} admin\n")
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with door(cors_origins=f"https://other.example.com,{PAGE}", api_keys=keys) as it:
        before = await it.raw.options("/v1/chat/completions", headers={"origin": PAGE, **wanted})
        assert before.status_code == 200
        assert before.headers["access-control-allow-origin"] == PAGE
        assert before.headers["access-control-allow-credentials"] == "true"
        assert "authorization" in before.headers["access-control-allow-headers"]
        asked = {"headers": {"origin": PAGE, "x-api-key": KEY}, "json": {"prompt": PROMPT, "max_tokens": 1}}
        answer = await it.raw.post("/v1/completions", **asked)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        unkeyed = await it.raw.post("/v1/completions", headers={"origin": PAGE}, json={"prompt": PROMPT})
        assert (unkeyed.status_code, unkeyed.headers["access-control-allow-origin"]) == (401, PAGE)
        evil = {"origin": "https://evil.example.com", **wanted}
        assert (await it.raw.options("/v1/chat/completions", headers=evil)).status_code == 400
        named = {"origin": "https://evil.example.com", "x-api-key": KEY}
        assert "access-control-allow-origin" not in (await it.raw.get("/v1/models", headers=named)).headers


async def test_no_page_may_size_the_pools(door: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every origin may request tokens, without cookies or certificates; the dashboard is not for other pages. In the
    control, with the dashboard's path among the API's, a preflight for it succeeds."""
    asked = {"origin": PAGE, "access-control-request-method": "POST"}
    path = "/dashboard/pools/prefill"
    async with door(cors_origins="*") as it:
        shared = await it.raw.options("/v1/chat/completions", headers=asked)
        assert shared.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in shared.headers
        closed = await it.raw.options(path, headers={**asked, "access-control-request-headers": "x-tandem-dashboard"})
        assert closed.status_code == 405
        assert "access-control-allow-origin" not in closed.headers
        monkeypatch.setattr(cors, "PATHS", (*cors.PATHS, path))
        assert (await it.raw.options(path, headers=asked)).headers["access-control-allow-origin"] == "*"
    async with door() as it:
        assert (await it.raw.options("/v1/chat/completions", headers=asked)).status_code == 405


async def test_a_key_may_come_in_either_header(door: Any, tmp_path: Path) -> None:
    """A key is accepted in OpenAI's header or in Anthropic's; the same key in both is one key, two different ones are
    none."""
    keys = tmp_path / "keys"
    keys.write_text(f"anna {KEY}\nben {OTHER_KEY}\n")
    bearer, header = {"authorization": f"Bearer {KEY}"}, {"x-api-key": KEY}
    async with door(api_keys=keys) as it:
        body = {"prompt": PROMPT, "max_tokens": 1}
        for headers in (bearer, header, {**bearer, **header}, {"authorization": f"bearer {KEY}", **header}):
            assert (await it.raw.post("/v1/completions", json=body, headers=headers)).status_code == 200
        for headers in (
            {},
            {"x-api-key": "nobody-key-0123456789"},
            {**bearer, "x-api-key": OTHER_KEY},
            {"authorization": f"Bearer {OTHER_KEY}", **header},
            {"authorization": "Bearer nobody", **header},
        ):
            refused = await it.raw.post("/v1/completions", json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "UNAUTHENTICATED"), headers
            assert KEY not in refused.text
            assert OTHER_KEY not in refused.text


# ---- completions


async def test_a_prompt_can_be_scored_alone(door: Any) -> None:
    """`echo` with max_tokens 0 returns the prompt with the same scores as before an answer, and no token after it."""
    async with door() as it:
        both = (await it.complete(echo=True, logprobs=1, max_tokens=1))["choices"][0]
        size = len(await it.ids(PROMPT))
        asked = {"echo": True, "logprobs": 1, "max_tokens": 0, "return_token_ids": True}
        answer = await it.complete(**asked, stop=PROMPT[-1])
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (PROMPT, "length", None)
        assert (choice["token_ids"], answer["usage"]["completion_tokens"]) == ([], 0)
        assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] == size
        for name, values in choice["logprobs"].items():
            assert values == both["logprobs"][name][:size], name
        async with it.raw.stream(
            "POST", "/v1/completions", json={"prompt": [PROMPT, "x"], **asked, "stream": True}
        ) as got:
            lines = [line.removeprefix("data: ") async for line in got.aiter_lines() if line]
        first, second = sorted((json.loads(line)["choices"][0] for line in lines[:-1]), key=lambda one: one["index"])
        assert (first["text"], first["logprobs"]["tokens"]) == (PROMPT, choice["logprobs"]["tokens"])
        assert (second["text"], second["finish_reason"], lines[-1]) == ("x", "length", "[DONE]")
        refused = await it.raw.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


async def test_the_gap_between_prompt_and_suffix_is_filled(door: Any, tmp_path: Path) -> None:
    """The model gets both between its tokens for this, and any of these tokens ends the answer."""
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    folder = edited(tmp_path / "model", *marks)
    before, after = "def total(", "):\n    return a + b"
    async with door(model=str(folder)) as it:
        by_hand = f"{marks[0]}{before}{marks[1]}{after}{marks[2]}"
        expected = await it.complete(prompt=by_hand, max_tokens=24)
        filled = await it.complete(prompt=before, suffix=after, max_tokens=24)
        assert filled["usage"]["prompt_tokens"] == len(await it.ids(by_hand))
        assert filled["choices"][0]["text"] == expected["choices"][0]["text"]
        for place, mark in enumerate(marks):
            (token,) = (await it.raw.post("/tokenize", json={"prompt": mark, "add_special_tokens": False})).json()[
                "tokens"
            ]
            bias = {"logit_bias": {str(token): 100}, "max_tokens": 24}
            ended = await it.complete(prompt="" if place else before, suffix=after, **bias)
            assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
            assert (await it.complete(prompt=by_hand, **bias))["choices"][0]["finish_reason"] == "length", "the control"


async def test_the_space_between_prompt_and_answer_is_kept(door: Any, tmp_path: Path) -> None:
    """With a tokenizer that removes the space from a text's first word, as Llama 2's does: complete, streamed, echoed,
    token by token, and where the model continues its own message."""
    folder = edited(tmp_path / "model")
    about = json.loads((folder / "tokenizer.json").read_text())
    about["decoder"] = {
        "type": "Sequence",
        "decoders": [about["decoder"], {"type": "Strip", "content": " ", "start": 1, "stop": 0}],
    }
    (folder / "tokenizer.json").write_text(json.dumps(about))
    async with door(model=str(folder)) as it:
        whole = (await it.complete(max_tokens=8, logprobs=0))["choices"][0]
        assert whole["text"] == "".join(whole["logprobs"]["tokens"]) == " the test isn't in the test"
        assert (await it.complete(max_tokens=8, echo=True))["choices"][0]["text"] == PROMPT + whole["text"]
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "stream": True}
        lines = (await it.raw.post("/v1/completions", json=body)).text.splitlines()
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole["text"]
        begun = [*CHAT, {"role": "assistant", "content": "Pop the"}]
        body = {"messages": begun, "temperature": 0, "max_tokens": 8, "continue_final_message": True}
        answer = (await it.raw.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]["content"]
        assert answer.startswith(" ")


async def test_the_bytes_of_tokens_join_to_letters(door: Any) -> None:
    """For a letter of several tokens each token has its own bytes, which clients can join."""
    async with door() as it:
        ids = await it.ids("\N{GRINNING FACE}")
        assert len(ids) == 4
        options = {"temperature": 0, "allowed_token_ids": ids}
        body = {"messages": CHAT, "max_tokens": 9, "logprobs": True, "top_logprobs": 1, **options}
        choice = (await it.raw.post("/v1/chat/completions", json=body)).json()["choices"][0]
        body = {"input": "x", "max_output_tokens": 9, "top_logprobs": 1, "store": False, **options}
        part = (await it.raw.post("/v1/responses", json=body)).json()["output"][0]["content"][0]
        of_chat = choice["message"]["content"], choice["logprobs"]["content"]
        for text, scores in (of_chat, (part["text"], part["logprobs"])):
            assert [len(one["bytes"]) for one in scores] == [1] * 9
            assert bytes(byte for one in scores for byte in one["bytes"]).decode(errors="replace") == text


# ---- sampling


async def test_a_seed_of_minus_one_is_a_random_one(door: Any) -> None:
    """As in vLLM: two such requests differ, and the receipt has the random seed."""
    async with door() as it:
        asked = {"seed": -1, "temperature": 2.0, "max_tokens": 32, "tandem_receipt": True, "ignore_eos": True}
        first, second = [(await it.complete(**asked))["choices"][0] for _ in range(2)]
        assert first["text"] != second["text"]
        again = await it.complete(**{**asked, "seed": first["tandem_receipt"]["seed"]})
        assert again["choices"][0]["text"] == first["text"]


async def test_excluded_tokens_do_not_appear(door: Any) -> None:
    """Only allowed tokens appear, and no bad word, as text or within other text, wherever the cluster computes; the log
    probabilities are the model's own."""
    async with door() as it:
        free = (await it.complete(max_tokens=24, return_token_ids=True, ignore_eos=True))["choices"][0]
        allowed = sorted(set(free["token_ids"]))[::2]
        some = await it.complete(max_tokens=24, allowed_token_ids=allowed, return_token_ids=True, logprobs=0)
        assert set(some["choices"][0]["token_ids"]) <= set(allowed)
        assert some["choices"][0]["finish_reason"] == "length"
        assert min(some["choices"][0]["logprobs"]["token_logprobs"]) < -1.0, "unlikely tokens, as the model sees them"
        words = [word for word in free["text"].split() if word.isalpha()][:2]
        assert words
        clean = (await it.complete(max_tokens=24, bad_words=words, ignore_eos=True))["choices"][0]["text"]
        assert clean != free["text"]
        assert not [word for word in words if f" {word} " in clean]
        (token,) = await it.ids("x")
        stuck = {"prompt": PROMPT, "allowed_token_ids": [token], "bad_words": ["x"], "ignore_eos": True}
        none = await it.raw.post("/v1/completions", json=stuck)
        assert (none.status_code, none.json()["error"]["code"]) == (400, "NO_TOKEN_ALLOWED")
        assert none.json()["error"]["param"] == "allowed_token_ids"


async def test_special_tokens_are_text_on_request(door: Any) -> None:
    """This applies to special tokens that do not end the answer."""
    async with door() as it:
        (end,) = (await it.cluster.client.model_info()).eos_token_ids
        name = (await it.raw.post("/detokenize", json={"tokens": [end]})).json()["prompt"]
        asked = {"max_tokens": 3, "logit_bias": {str(end): 100}}
        for extra, text in (
            ({"ignore_eos": True}, ""),
            ({"ignore_eos": True, "skip_special_tokens": True}, ""),
            ({"ignore_eos": True, "skip_special_tokens": False}, name * 3),
            ({"skip_special_tokens": False}, ""),
        ):
            assert (await it.complete(**asked, **extra))["choices"][0]["text"] == text, extra
        done = await it.cluster.client.generate(
            PROMPT, max_tokens=3, logit_bias={end: 100}, ignore_eos=True, show_special_tokens=True
        )
        assert done.text == name * 3


# ---- tools


async def test_only_allowed_tools_are_shown_to_the_model_and_called(door: Any, tmp_path: Path) -> None:
    """With `allowed_tools` the other tools do not exist. A tool that is only offered may have any schema."""
    folder = tmp_path / "model"
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(HERMES)
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"not": {"oneOf": []}, "if": 5}}}

    def only(mode: str) -> Any:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": TOOLS[1:]}}

    async with door(model=str(folder)) as it:

        async def chat(**body: Any) -> Any:
            given = {"messages": CHAT, "max_tokens": 64, "temperature": 0, **body}
            answer = await it.raw.post("/v1/chat/completions", json=given)
            assert answer.status_code == 200, answer.text
            return answer.json()

        auto = await chat(tools=[*TOOLS, odd], tool_choice=only("auto"))
        assert auto["usage"]["prompt_tokens"] == (await chat(tools=TOOLS[1:]))["usage"]["prompt_tokens"]
        assert auto["usage"]["prompt_tokens"] < (await chat(tools=[*TOOLS, odd]))["usage"]["prompt_tokens"]
        forced = await chat(tools=[*TOOLS, odd], tool_choice=only("required"), parallel_tool_calls=False)
        assert [one["function"]["name"] for one in forced["choices"][0]["message"]["tool_calls"]] == ["fall"]
        assert forced["choices"][0]["finish_reason"] == "tool_calls"
        for choice in ("auto", "none", None):
            await chat(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        await chat(parallel_tool_calls=False)


async def test_a_load_client_may_name_the_model_by_its_path(door: Any) -> None:
    """The path is not in the list, and finds the model's name; an unknown model has none."""
    async with door() as it:
        address = f"http://{it.cluster.router.http.address}"
        async with Http(address, str(DEMO)) as target:
            assert target.model == DEMO.name
        with pytest.raises(Unavailable, match="serves no /nowhere"):
            async with Http(address, "/nowhere"):
                pass
