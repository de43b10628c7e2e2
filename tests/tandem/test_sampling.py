"""A sampling parameter is declared once, and everything follows."""

from __future__ import annotations

from dataclasses import fields

import pytest

from services.proto_convert import sampling_from
from services.router.frontend.openai.openai_sampling import Sampled
from services.router.preprocess import validation
from tandem.errors import InvalidRequest
from tandem.rpc.request_builder import build_request
from tandem.sampling import DEFAULTS, NUMBERS, OPTIONS, Bounds, Sampling
from tandem.v1 import sampling_pb2


def test_every_option_has_its_field_in_the_message() -> None:
    """What a client may say is what SamplingParams carries; `n` is the client's own keyword."""
    assert set(OPTIONS) | {"n"} == set(sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name)


def test_every_field_that_a_worker_receives_is_one_that_the_engine_knows() -> None:
    """And the other way round."""
    assert {field.name for field in fields(Sampling)} == set(sampling_pb2.Sampling.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_reaches_the_engine(name: str) -> None:
    """From a keyword through validation and both messages; a value out of bounds is refused by its name."""
    sent = build_request("x", **{name: 1}).sampling  # type: ignore[misc]
    assert getattr(sampling_from(validation.sampling(sent, 8), 8), name) == 1
    absent = sampling_from(validation.sampling(sampling_pb2.SamplingParams(), 8), 8)
    assert getattr(absent, name) == getattr(DEFAULTS, name)
    beyond = build_request("x", **{name: NUMBERS[name].most + 1}).sampling  # type: ignore[misc]
    with pytest.raises(InvalidRequest, match=f"sampling.{name} is") as caught:
        validation.sampling(beyond, 8)
    assert caught.value.bound == str(NUMBERS[name])
    assert name == "logprobs" or name in Sampled.model_fields


def test_an_unknown_option_is_a_type_error() -> None:
    """As for any Python function."""
    with pytest.raises(TypeError, match="unexpected keyword argument 'frobnicate'"):
        build_request("x", frobnicate=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "penalises", "adjusts"),
    [
        ({}, False, False),
        ({"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "logprobs": 2}, False, False),
        ({"repetition_penalty": 1.1}, True, True),
        ({"frequency_penalty": 0.1}, True, True),
        ({"presence_penalty": 0.1}, True, True),
        ({"logit_bias": ((1, 1.0),)}, False, True),
        ({"min_tokens": 1}, False, True),
        ({"allowed_token_ids": (1,)}, False, True),
        ({"bad_words": ((1,),)}, False, True),
    ],
)
def test_each_parameter_that_changes_logits_says_so_alone(
    given: dict[str, object], penalises: bool, adjusts: bool
) -> None:
    """A step in which no sequence does leaves the logits as they are."""
    how = Sampling(**given)  # type: ignore[arg-type]
    assert (how.penalises, how.adjusts) == (penalises, adjusts)


def test_bounds_are_told_as_they_are() -> None:
    """Whether the least is allowed is in the sentence that the client reads, and is what is checked."""
    assert str(Bounds(0, 2)) == "0 to 2"
    assert str(Bounds(0, 2, least_excluded=True)) == "over 0, at most 2"
    assert [Bounds(0, 2).allow(value) for value in (-1, 0, 2, 3, float("nan"))] == [False, True, True, False, False]
    assert not Bounds(0, 2, least_excluded=True).allow(0)
