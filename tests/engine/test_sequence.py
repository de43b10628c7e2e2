"""What a sequence reports: what is left to compute, what may be reused, and when it is over. No tensors."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core import block_hash
from engine.core.sequence import Finish, LoraSlot, Sequence
from tandem.sampling import GrammarSpec, Sampling

SIZE = 4


def sequence(tokens: int = 6, prompt: int | None = None, limit: int = 20, **kw: Any) -> Sequence:
    return Sequence("a", list(range(tokens)), tokens if prompt is None else prompt, limit, **kw)


@pytest.mark.parametrize(("tokens", "prompt", "limit"), [(0, 0, 5), (4, 0, 5), (4, 5, 6), (4, 4, 4), (4, 4, 3)])
def test_a_sequence_without_a_prompt_or_without_room_is_refused(tokens: int, prompt: int, limit: int) -> None:
    """It has a prompt, at least all of it, and is not over before its first token."""
    with pytest.raises(ValueError, match="need 0 < prompt_len"):
        sequence(tokens, prompt, limit)


def test_the_shortest_sequence_and_one_that_was_resumed_are_fine() -> None:
    """One token of prompt and one to generate; generated tokens after the prompt count as such."""
    assert sequence(1, 1, 2).generated == 0
    resumed = sequence(6, 4, 7)
    assert (resumed.generated, resumed.num_uncomputed) == (2, 6)
    resumed.num_computed = 5
    assert resumed.num_uncomputed == 1


def test_a_new_sequence_has_no_past() -> None:
    """Nothing is computed, cached, preempted, overtaken, drafted or scored."""
    one = sequence()
    assert [one.num_computed, one.cached, one.preemptions, one.overtaken, one.drafted, one.accepted] == [0] * 6
    assert one.matcher is None
    assert one.prompt_logprobs == []
    assert not one.handoff


@pytest.mark.parametrize("compiled", [True, False])
def test_a_grammar_is_compiled_exactly_where_one_is_asked_for(compiled: bool) -> None:
    """A missing one would leave text unchecked, an extra one would mask a request without a grammar."""
    given: Any = {"grammar": object()} if compiled else {"sampling": Sampling(grammar=GrammarSpec("json", ""))}
    with pytest.raises(ValueError, match="was not compiled"):
        sequence(**given)
    assert GrammarSpec("json", "").field == "sampling.grammar.json"


def test_it_ends_with_a_stop_token_or_at_its_limit() -> None:
    """A stop token at the limit is a stop; until then it goes on. What a token would do is known before it is there."""
    one = sequence(2, limit=5, stop_ids=frozenset({9}))
    assert [one.append(7), one.append(8)] == [None, None]
    assert [one.ends_with(8), one.ends_with(9), one.append(9)] == [Finish.LENGTH, Finish.STOP, Finish.STOP]
    two = sequence(2, limit=4)
    assert [two.ends_with(9), two.append(9)] == [None, None]
    assert [two.ends_with(9), two.append(9)] == [Finish.LENGTH, Finish.LENGTH]
    assert two.tokens == [0, 1, 9, 9]


def test_hashes_are_those_of_full_blocks_and_grow_with_it() -> None:
    """Chained from the salt and the adapter, so that no other salt or adapter shares them."""
    one = sequence(7, salt=b"s", adapter=LoraSlot(1, b"red"))
    root = block_hash.root(b"s", b"red")
    first = block_hash.extend(root, [0, 1, 2, 3])
    assert one.hashes(SIZE) == [first]
    one.append(7)
    assert one.hashes(SIZE) == [first, block_hash.extend(first, [4, 5, 6, 7])]
    assert sequence(4, salt=b"s").hashes(SIZE) == [block_hash.extend(block_hash.root(b"s", b""), [0, 1, 2, 3])]


@pytest.mark.parametrize(("tokens", "blocks"), [(4, 0), (5, 1), (8, 1), (9, 2)])
def test_one_token_is_always_left_to_compute(tokens: int, blocks: int) -> None:
    """For its logits; a block that holds the last token is not reused."""
    one = sequence(tokens)
    assert one.reusable(SIZE) == one.hashes(SIZE)[:blocks]


def test_what_is_to_be_scored_is_not_reused() -> None:
    """While the prompt is not fully scored; afterwards all but the last token may be."""
    one = sequence(12, 10, sampling=Sampling(prompt_logprobs=0))
    assert one.reusable(SIZE) == []
    one.prompt_logprobs += [None] * 4  # type: ignore[list-item]
    assert len(one.reusable(SIZE)) == 1
    one.prompt_logprobs += [None] * 5  # type: ignore[list-item]
    assert len(one.reusable(SIZE)) == 2


def test_positions_to_score_are_those_of_the_prompt_that_are_missing() -> None:
    """The last position of the prompt is not scored, since the token after it is generated."""
    assert sequence().to_score(6) == range(0)
    one = sequence(12, 10, sampling=Sampling(prompt_logprobs=0))
    assert one.to_score(4) == range(4)
    assert one.to_score(12) == range(9)
    one.prompt_logprobs += [None] * 6  # type: ignore[list-item]
    assert one.to_score(12) == range(6, 9)  # after a preemption
    one.num_computed = 8
    assert one.to_score(1) == range(8, 9)
    assert len(one.to_score(0)) == 0


def test_a_tally_counts_what_was_generated_and_knows_what_the_prompt_holds() -> None:
    """In the order of first appearance; later calls add only the new tokens."""
    one = Sequence("a", [5, 6, 5, 7], 3, 9)
    tally = one.tally()
    assert (list(tally.ids), list(tally.counts)) == ([5, 6, 7], [0, 0, 1])
    one.append(5)
    one.append(7)
    assert one.tally() is tally
    assert (list(tally.ids), list(tally.counts)) == ([5, 6, 7], [1, 0, 2])


@pytest.mark.parametrize(
    ("given", "penalises", "adjusts"),
    [
        ({}, False, False),
        ({"temperature": 0.5, "top_p": 0.5, "logprobs": 1}, False, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"repetition_penalty": 2.0}, True, True),
        ({"frequency_penalty": -0.5}, True, True),
        ({"presence_penalty": 1.0}, True, True),
        ({"min_tokens": 1}, False, True),
        ({"logit_bias": ((3, 1.0),)}, False, True),
        ({"allowed_token_ids": (3,)}, False, True),
        ({"bad_words": ((3, 4),)}, False, True),
    ],
)
def test_only_what_changes_logits_is_said_to(given: Any, penalises: bool, adjusts: bool) -> None:
    """A penalty at its neutral value costs nothing."""
    sampling = Sampling(**given)
    assert (sampling.penalises, sampling.adjusts) == (penalises, adjusts)


def test_who_asks_for_nothing_gets_the_models_own_choice() -> None:
    """Greedy, over all tokens, and only the token is returned."""
    assert Sampling() == Sampling(
        temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, repetition_penalty=1.0, frequency_penalty=0.0,
        presence_penalty=0.0, logit_bias=(), min_tokens=0, logprobs=None, prompt_logprobs=None, grammar=None,
        allowed_token_ids=(), bad_words=(),
    )  # fmt: skip
