"""Prompts around a gap, in the tokens of each family of models, and what follows from them for the request."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from services.router.preprocess import infilling
from services.router.preprocess.infilling import FAMILIES
from services.router.preprocess.request import build_request
from services.router.preprocess.served_model import ModelFacts
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import InvalidRequest
from tandem.v1 import generation_pb2

SPACE = "\u2581"
MODEL = ModelFacts(context=64, vocab_size=400, eos_token_ids=(2,))


def backend(*special: str) -> tokenizers.Tokenizer:
    """Every byte is a token, and so are these; a text begins with <s>."""
    alphabet = {letter: place for place, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    one = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    one.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    one.decoder = decoders.ByteLevel()
    return begun(one, special)


def spaced(*special: str) -> tokenizers.Tokenizer:
    """As sentencepiece's of Llama 2: a space is put before each text."""
    letters = [SPACE, *"abcdef()+:=", "<unk>"]
    pieces = [*letters, f"{SPACE}a", *(f"<0x{byte:02X}>" for byte in range(256))]
    one = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: place for place, piece in enumerate(pieces)},
            merges=[(SPACE, "a")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    one.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    one.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return begun(one, special)


def begun(one: tokenizers.Tokenizer, special: tuple[str, ...]) -> tokenizers.Tokenizer:
    one.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in ("<s>", *special)])
    one.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", one.token_to_id("<s>"))])
    return one


def asked(text: str, suffix: str, **fields: Any) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text=text.encode(), suffix=suffix.encode(), **fields)


@pytest.mark.parametrize("family", [one for one in FAMILIES if not one.spaced], ids=lambda one: one.prefix)
def test_the_prompt_is_prefix_suffix_and_the_place_between(family: infilling.Markers) -> None:
    """As the text with the markers would be tokenised; the markers and their like end the completion."""
    one = backend(family.prefix, family.suffix, family.middle, *family.ends[:1])
    text = Tokenizer(one, None)
    for before, after in (("f(", ") + 1\n"), ("", "x"), ("\n x", " y ")):
        job = build_request(asked(before, after), text, MODEL)
        assert job.tokens == one.encode(f"{family.prefix}{before}{family.suffix}{after}{family.middle}").ids
        names = (family.prefix, family.suffix, family.middle, *family.ends[:1])
        assert job.stop_ids == [2, *map(one.token_to_id, names)]


def test_code_llama_has_a_space_before_the_prefix_only() -> None:
    """Its tokenizer would put one before the suffix too, and the model has not learnt that."""
    (family,) = [one for one in FAMILIES if one.spaced]
    one = spaced(family.prefix, family.suffix, family.middle, *family.ends)
    found = infilling.of(one)
    assert found is not None
    pieces = [one.id_to_token(token) for token in found.encode("ab", "a b")]
    assert pieces == ["<s>", family.prefix, f"{SPACE}a", "b", family.suffix, "a", SPACE, "b", family.middle]
    assert [one.id_to_token(token) for token in found.ends[3:]] == [f"{SPACE}<EOT>"]


def test_a_prompt_around_a_gap_begins_without_special_tokens_if_asked_to() -> None:
    """Those that mark the gap stay."""
    able = Tokenizer(backend(*FAMILIES[0][:3]), None)
    usual = build_request(asked("x", "y"), able, MODEL).tokens
    assert build_request(asked("x", "y", add_special_tokens=False), able, MODEL).tokens == usual[1:]
    assert able.encode("") == usual[:1]


def test_a_suffix_where_none_can_be_is_refused() -> None:
    """Without the tokens for it, without a tokenizer, beside token ids, too long, not UTF-8."""
    markers = FAMILIES[0][:3]
    able = Tokenizer(backend(*markers), None)
    with_ids = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1]), suffix=b"x")
    for request, text, field in (
        (asked("x", "y"), Tokenizer(backend(*markers[:2]), None), "suffix"),
        (asked("x", "y"), Tokenizer(None, None), "suffix"),
        (with_ids, able, "suffix"),
        (asked("x", "y" * 70), able, "text"),
        (generation_pb2.GenerateRequest(text=b"x", suffix=b"\xff"), able, "suffix"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            build_request(request, text, MODEL)
        assert (caught.value.field, bool(caught.value.bound)) == (field, True)


def test_a_job_keeps_the_tokens_that_end_it() -> None:
    """Its prompt has become token ids, in which the suffix is; who ignores the end of sequence ignores these too."""
    able = Tokenizer(backend(*FAMILIES[0][:3]), None)
    with_ids = generation_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[1]), suffix=b"x")
    job = build_request(with_ids, able, MODEL, fixed=True)
    assert job.tokens == [1]
    assert job.stop_ids == build_request(asked("x", "y"), able, MODEL).stop_ids != [2]
    free = asked("x", "y")
    free.sampling.ignore_eos = True
    assert build_request(free, able, MODEL).stop_ids == []
