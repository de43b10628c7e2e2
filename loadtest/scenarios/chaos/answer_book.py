"""The book: requests whose answers are known, and what a client has received so far."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from tandem.results import Piece, TokenLogprob

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}, "many": {"type": "integer"}}}
LENGTHS = (4, 8, 8, 40, 120)  # of answers, in tokens
PROMPTS = (3, 40, 150, 300)


def book(chance: random.Random, count: int) -> list[dict[str, Any]]:
    """`count` requests as keywords of `AsyncClient.stream`. Each has a seed, so each has one answer."""
    texts = ["Return the", "Create a new", "Raised when", "class Queue:", "import os\n", "5 6 7"]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95},
        {"temperature": 1.1, "top_k": 40, "min_p": 0.02},
        {"temperature": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3},
        {"temperature": 0.7, "logit_bias": {11: 2.0, 12: -100.0}, "min_tokens": 4},
        {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.8, "n": 2, "logprobs": 1, "stop": ["the", "\n\n"]},
        {"temperature": 1.0, "stop": [" a", "ing"], "include_stop": True},
        {"temperature": 1.0, "grammar": {"regex": "[a-z ]{30,90}"}},
        {"temperature": 1.0, "grammar": {"json_schema": SCHEMA}},
        {"temperature": 0.9, "cache_salt": "mine"},
    ]
    requests = []
    for number in range(count):
        kind = kinds[number % len(kinds)]
        request = {"max_tokens": chance.choice(LENGTHS), "seed": number, **kind}
        request["ignore_eos"] = chance.random() < 0.5 and "grammar" not in kind
        match chance.randrange(3):
            case 0:
                request["prompt"] = chance.choice(texts)
            case 1:
                request["messages"] = [{"role": "user", "content": f"What does {chance.choice(texts)} do?"}]
            case _:
                request["prompt"] = chance.choices(range(2, 2048), k=chance.choice(PROMPTS))
        requests.append(request)
    return requests


def weights(requests: list[dict[str, Any]]) -> list[float]:
    """How often each is asked for: in inverse proportion to what it costs, so that most requests are short and the
    cluster is as busy with long ones as with short ones."""

    def cost(request: dict[str, Any]) -> float:
        prompt = request.get("prompt", "")
        read = len(prompt) if isinstance(prompt, list) else 16
        return 8.0 + float(request["max_tokens"] * request.get("n", 1)) + read / 8

    return [1 / cost(request) for request in requests]


@dataclass
class Choice:
    """One completion, as far as it came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


class Answer:
    """The answer that a client has received, and its workers. Log probabilities of an answer that is compared with this
    one may differ by `tolerance`; tokens and text never."""

    def __init__(self, tolerance: float = 0.0) -> None:
        self.tolerance = tolerance
        self.choices: dict[int, Choice] = {}
        self.attempts = 1
        self.job = False  # it was taken as one
        self.workers: list[tuple[str, str]] = []  # prefill and decode worker of each receipt

    def add(self, piece: Piece) -> None:
        choice = self.choices.setdefault(piece.choice, Choice())
        choice.token_ids += piece.token_ids
        choice.text += piece.text
        choice.logprobs += piece.logprobs or []
        choice.prompt_logprobs += piece.prompt_logprobs or []
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        if piece.receipt:
            self.attempts = max(self.attempts, piece.receipt.attempts)
            self.workers.append((piece.receipt.prefill_worker, piece.receipt.decode_worker))

    def same(self, reference: Answer) -> bool:
        return self.choices.keys() == reference.choices.keys() and not any(
            _differing(choice, reference.choices[number], reference.tolerance)
            for number, choice in self.choices.items()
        )

    def begins(self, reference: Answer) -> bool:
        """Whether it is a beginning of another answer."""
        return all(
            (of := reference.choices.get(number)) is not None
            and of.token_ids[: len(choice.token_ids)] == choice.token_ids
            and of.text.startswith(choice.text)
            and close(of.logprobs[: len(choice.logprobs)], choice.logprobs, reference.tolerance)
            for number, choice in self.choices.items()
        )


def close(some: Sequence[TokenLogprob], others: Sequence[TokenLogprob], tolerance: float) -> bool:
    """Whether these are the log probabilities of the same tokens, each within `tolerance` of the other."""

    def alike(one: TokenLogprob, other: TokenLogprob) -> bool:
        return one == other or (
            (one.token_id, one.top.keys()) == (other.token_id, other.top.keys())
            and abs(one.logprob - other.logprob) <= tolerance
            and all(abs(value - other.top[token]) <= tolerance for token, value in one.top.items())
        )

    return len(some) == len(others) and all(map(alike, some, others))


def _differing(choice: Choice, right: Choice, tolerance: float) -> str:
    """The name of the first field that differs, or ""."""
    for each in fields(Choice):
        got, wanted = getattr(choice, each.name), getattr(right, each.name)
        equal = close(got, wanted, tolerance) if each.name in ("logprobs", "prompt_logprobs") else got == wanted
        if not equal:
            return each.name
    return ""


def difference(received: Answer, reference: Answer) -> str:
    for number, right in reference.choices.items():
        choice = received.choices.get(number, Choice())
        if name := _differing(choice, right, reference.tolerance):
            got, wanted = getattr(choice, name), getattr(right, name)
            return f"choice {number}, {name}: {got!r:.300} instead of {wanted!r:.300}"
    return f"choices {sorted(received.choices)} instead of {sorted(reference.choices)}"


def violation(received: Answer, reference: Answer) -> str:
    """Of an answer that differs: "lost" (only the beginning came), "duplicated" (everything came and then more, or a
    part of it twice) or "corrupt"."""
    if received.begins(reference):
        return "lost"
    for number, choice in received.choices.items():
        right = reference.choices.get(number, Choice()).token_ids
        if len(choice.token_ids) > len(right) or _repeats(choice.token_ids, right):
            return "duplicated"
    return "corrupt"


def _repeats(received: list[int], right: list[int]) -> bool:
    """Whether a run of tokens came twice, and all others as they should."""
    at = next((place for place, (a, b) in enumerate(zip(received, right, strict=False)) if a != b), None)
    return at is not None and any(
        received[at : at + 4] == right[back : back + len(received[at : at + 4])] for back in range(at)
    )
