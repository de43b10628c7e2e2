"""Text in, whole code points out; what cannot be read is refused. With the demo's tokenizer, whose tokens are bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from engine.loading import checkpoint
from services.router.execution.detokenizer import REPLACEMENT, Detokenizer
from services.router.preprocess import tokenizer as texts
from services.router.preprocess.chat.chat_template import ChatTemplate
from services.router.preprocess.model_folder import local_folder
from services.router.preprocess.tokenizer import Tokenizer
from tandem.errors import CheckpointRefused, InvalidRequest
from tandem.settings import Settings
from tests.support.byte_fallback import fallback
from tests.support.stopwatch import ThreadTime

DEMO = Path(__file__).parents[2] / "demo" / "model"
TEXT = Tokenizer.load(DEMO)


@given(st.text(max_size=40), st.lists(st.integers(1, 5), max_size=60))
def test_pieces_are_whole_code_points_and_add_up(text: str, cuts: list[int]) -> None:
    """However the tokens are cut into messages: together they are the decoded text, and none has half a letter."""
    assert TEXT.backend is not None
    ids = TEXT.encode(text)
    whole = TEXT.backend.decode(ids, skip_special_tokens=True)
    stream, pieces, rest = Detokenizer(TEXT), [], ids
    for cut in cuts:
        pieces.append(stream.push(rest[:cut]))
        rest = rest[cut:]
    pieces.append(stream.push(rest))
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == whole


# ---- any tokens at all, and tokenizers whose last resort are bytes


FALLBACK = {"llama": fallback(strip=True), "gemma": fallback(strip=False)}
BYTE = 3  # the id of <0x00>


def streamed(text: Tokenizer, ids: list[int], cuts: list[int]) -> str:
    """The text of the tokens as it comes in messages of so many tokens."""
    stream, shown = Detokenizer(text), ""
    for cut in cuts:
        shown += stream.push(ids[:cut])
        ids = ids[cut:]
    return shown + stream.push(ids) + stream.finish()


@given(st.lists(st.integers(0, 2100), max_size=40), st.lists(st.integers(1, 5), max_size=40))
@example([260, 260, 260, 260, 260], [1, 1, 1, 1, 1])
def test_any_tokens_stream_as_they_decode_whole(ids: list[int], cuts: list[int]) -> None:
    """Also those that are no text, special ones, and ids that no token has."""
    assert TEXT.backend is not None
    assert streamed(TEXT, ids, cuts) == TEXT.backend.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", FALLBACK)
@given(st.text(alphabet=" ab\N{SNOWMAN}\n\u00e9\u4f60\N{GRINNING FACE}", max_size=30), st.lists(st.integers(1, 5)))
def test_text_with_byte_fallback_streams_as_it_decodes_whole(kind: str, text: str, cuts: list[int]) -> None:
    """Words, and code points of two to four byte tokens, however they are cut."""
    ids = FALLBACK[kind].encode(text)
    whole = FALLBACK[kind].decode(ids)
    assert streamed(FALLBACK[kind], ids, cuts) == whole
    assert whole.lstrip(" ") == text.lstrip(" ")


@pytest.mark.parametrize("kind", FALLBACK)
@given(st.lists(st.integers(0, 275), max_size=40), st.lists(st.integers(1, 5), max_size=40))
def test_any_tokens_with_byte_fallback_are_an_answer(kind: str, ids: list[int], cuts: list[int]) -> None:
    """What is valid is shown as the whole decode has it. Where that spoils a run of bytes for one that is invalid,
    ours is what those bytes are as UTF-8."""
    text = FALLBACK[kind]
    found = streamed(text, ids, cuts)
    assert found == streamed(text, ids, [])
    assert text.backend is not None
    whole = text.backend.decode(ids, skip_special_tokens=True)
    starts_with_space = [one for one in ids if one < len(text.shown) and text.shown[one]][:1] == [BYTE + 0x20]
    if REPLACEMENT not in whole and not starts_with_space:
        assert found == whole


@pytest.mark.parametrize("kind", ["bytes", *FALLBACK])
@given(st.text(alphabet=" ab\N{SNOWMAN}\n\u00e9\N{GRINNING FACE}", max_size=30), st.integers(0, 30))
@example("ab ab", 1)
@example("a\N{REPLACEMENT CHARACTER} ab", 4)
def test_an_answer_goes_on_from_its_prompt(kind: str, text: str, cut: int) -> None:
    """Prompt and answer together are the text of all tokens, the space between them included."""
    tokenizer = FALLBACK.get(kind, TEXT)
    ids = tokenizer.encode(text)
    prompt, answer = ids[:cut], ids[cut:]
    before, after = tokenizer.decode(prompt), tokenizer.decode(answer)
    if f"{before}{after}".count(REPLACEMENT) > text.count(REPLACEMENT):
        return  # cut within a code point
    stream = Detokenizer(tokenizer, prompt=prompt)
    assert before + "".join(stream.push([one]) for one in answer) + stream.finish() == tokenizer.decode(ids)


def test_without_its_prompt_an_answer_loses_its_first_space() -> None:
    """The control, and what an answer to a prompt of special tokens alone is."""
    text = FALLBACK["llama"]
    assert text.backend is not None
    word, begin = text.backend.token_to_id("\u2581ab"), text.backend.token_to_id("<s>")
    for prompt, shown in (([], "ab"), ([begin], "ab"), ([word], " ab"), ([begin, word, 10**6, begin], " ab")):
        assert Detokenizer(text, prompt=prompt).push([word]) == shown


@pytest.mark.parametrize("kind", ["bytes", *FALLBACK])
@given(st.text(alphabet=" ab\N{SNOWMAN}\n\u00e9\N{REPLACEMENT CHARACTER}\N{GRINNING FACE}", max_size=30))
def test_single_tokens_are_together_the_text(kind: str, text: str) -> None:
    """With their spaces; the bytes of those that are parts of a code point are the bytes of the code point."""
    tokenizer = FALLBACK.get(kind, TEXT)
    ids = tokenizer.encode(text)
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
    assert whole in (text, f" {text}")  # llama's words all have a space before them
    names = "".join(map(tokenizer.token, ids))
    assert names == whole or REPLACEMENT in names


def test_special_tokens_between_words_change_nothing() -> None:
    """They are not shown, and the space before the word behind them is."""
    text = FALLBACK["llama"]
    assert text.backend is not None
    word, begin = text.backend.token_to_id("\u2581ab"), text.backend.token_to_id("<s>")
    ids = [word] + [begin] * 40 + [word]
    assert streamed(text, ids, [1] * len(ids)) == "ab ab"


def test_an_invalid_byte_spoils_nothing_but_itself() -> None:
    """The tokens that ended a request with "Invalid prefix": a code point, a byte that is none, and a word."""
    text = FALLBACK["llama"]
    assert text.backend is not None
    ids = [BYTE + byte for byte in b"\xe4\xbd\xa0\xff"] + [text.backend.token_to_id("\u2581ab")]
    stream = Detokenizer(text)
    assert [stream.push([one]) for one in ids] == ["", "", "\u4f60", REPLACEMENT, " ab"]
    assert stream.push(ids[:2]) + stream.finish() == REPLACEMENT  # an incomplete code point at the end
    with pytest.raises(Exception, match="Invalid prefix"):  # the library's own stream, which this does without
        library = decoders.DecodeStream(skip_special_tokens=True)
        [library.step(text.backend, one) for one in ids]


def test_a_replacement_character_comes_when_it_is_certain() -> None:
    """Bytes that can begin no code point are shown at once but for the last, and text behind them is not held up."""
    undecodable = TEXT.backend.token_to_id("\u0122")  # type: ignore[union-attr]  # of byte-level tokenizers: 0x80
    stream = Detokenizer(TEXT)
    assert [stream.push([undecodable]) for _ in range(5)] == ["", *[REPLACEMENT] * 4]
    assert stream.push(TEXT.encode("\N{OLD PERSIAN SIGN A}x")) == f"{REPLACEMENT}\N{OLD PERSIAN SIGN A}x"


class CountsDecoded:
    """A backend that counts the tokens that it is given to decode."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.count = 0

    def decode(self, ids: list[int], **how: Any) -> str:
        self.count += len(ids)
        return str(self._backend.decode(ids, **how))


@pytest.mark.parametrize("kind", ["bytes", *FALLBACK])
def test_tokens_that_are_no_text_cost_what_others_do(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """8,192 of them take a fraction of a second, and twice as many twice as long: each is decoded a few times, however
    many came before it."""
    text = FALLBACK.get(kind, TEXT)
    undecodable = TEXT.backend.token_to_id("\u0122") if text is TEXT else BYTE + 0x80  # type: ignore[union-attr]

    def decoded(count: int) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(text, "backend", counting := CountsDecoded(text.backend))
            stream = Detokenizer(text)
            shown = "".join([stream.push([undecodable]) for _ in range(count)]) + stream.finish()
        assert shown == REPLACEMENT * count
        return counting.count

    with ThreadTime() as taken:
        once = decoded(8192)
    assert taken.seconds < 2.0  # 0.1 s; it was 11 s when each token was decoded with all before it
    assert once < 16 * 8192
    assert decoded(16384) <= 2 * once + 64


def test_an_answer_cut_inside_a_letter_shows_it_at_the_end_only() -> None:
    """The control: a stream that ends within a code point holds it back until it is certain that no more comes."""
    ids = TEXT.encode("\N{OLD PERSIAN SIGN A}")
    assert len(ids) > 1
    stream = Detokenizer(TEXT)
    assert stream.push(ids[:-1]) == ""
    assert "\N{REPLACEMENT CHARACTER}" in stream.finish()


@given(st.text(alphabet=" ae\n\u00e9\N{GRINNING FACE}", max_size=40).map(lambda text: text * 20), st.integers(-200, 3))
@example("\N{GRINNING FACE} heap" * 200, 0)
def test_what_is_refused_before_it_is_tokenised_would_not_have_fitted(text: str, over: int) -> None:
    """Never a text that has no more tokens than that, whatever it is made of, and always one that is far over it."""
    before = (texts.PIECE_CHARACTERS, texts.MAX_CUT_TOKENS, texts.UNCHECKED_BYTES)
    texts.PIECE_CHARACTERS, texts.MAX_CUT_TOKENS, texts.UNCHECKED_BYTES = 7, 4, 1
    try:
        count = len(TEXT.encode(text))
        most = max(1, count + over)
        least = TEXT.at_least(text, most)
        assert least is None or most <= least <= count
    finally:
        texts.PIECE_CHARACTERS, texts.MAX_CUT_TOKENS, texts.UNCHECKED_BYTES = before


def test_a_text_that_cannot_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 500,000 tokens not one; where the context might hold so many characters, no more than it holds and a piece."""
    looked: list[int] = []
    real = Backend.encode_batch_fast

    class Counting:
        normalizer = None

        def __getattr__(self, name: str) -> Any:
            return getattr(TEXT.backend, name)

        def encode_batch_fast(self, texts: list[str], **options: Any) -> Any:
            looked.append(len(texts[0]))
            return real(TEXT.backend, texts, **options)

    text = Tokenizer(Counting(), None)  # type: ignore[arg-type]
    assert (text.at_least(" a" * 500_000, 4096) or 0) > 4096
    assert not looked
    assert (text.at_least(" a" * 500_000, 100_000) or 0) > 100_000
    assert sum(looked) < 2 * 100_000 * 1.2 + texts.PIECE_CHARACTERS


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    """A checkpoint's template is somebody else's program: it gets no further than the messages."""
    template = ChatTemplate("{{ messages.__class__.__mro__[-1].__subclasses__() }}", {})
    with pytest.raises(InvalidRequest) as caught:
        template.render([{"role": "user", "content": "x"}])
    assert caught.value.field == "chat.messages"


def test_a_template_may_refuse_messages() -> None:
    """Its own words reach the client."""
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_the_digest_of_a_vocabulary_says_what_ids_mean() -> None:
    """It differs where two tokens have each other's ids, and is equal where only texts are split otherwise."""
    one, other = (
        Tokenizer(Backend(models.WordLevel(vocabulary, unk_token="a")), None)
        for vocabulary in ({"a": 0, "b": 1}, {"a": 1, "b": 0})
    )
    assert one.vocabulary_digest != other.vocabulary_digest
    assert FALLBACK["llama"].vocabulary_digest == FALLBACK["gemma"].vocabulary_digest != ""
    assert Tokenizer(None, None).vocabulary_digest == ""


def test_router_and_worker_find_one_digest_of_a_checkpoint(tmp_path: Path) -> None:
    """Also where tokens were added whose ids in the file are not those that they get. A worker says nothing of what no
    router reads: other formats, and a file that cannot be read."""
    assert checkpoint.vocabulary_of(DEMO) == TEXT.vocabulary_digest != ""
    about = json.loads((DEMO / "tokenizer.json").read_text())
    about["added_tokens"].append({**about["added_tokens"][-1], "content": "<|new|>", "id": 5000})
    (tmp_path / "tokenizer.json").write_text(json.dumps(about))
    assert checkpoint.vocabulary_of(tmp_path) == Tokenizer.load(tmp_path).vocabulary_digest != TEXT.vocabulary_digest
    (tmp_path / "tokenizer.json").write_text("{")
    assert checkpoint.vocabulary_of(tmp_path) == ""
    (tmp_path / "tokenizer.json").unlink()
    for name in ("tokenizer.model", "vocab.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    assert checkpoint.vocabulary_of(tmp_path) == Tokenizer.load(tmp_path).vocabulary_digest == ""


def test_a_checkpoint_without_a_tokenizer_takes_ids_alone(tmp_path: Path) -> None:
    """It serves ids, gives out no text, and says what to send instead."""
    text = Tokenizer.load(tmp_path)
    assert Detokenizer(text).push([1, 2]) == Detokenizer(text).finish() == ""
    with pytest.raises(InvalidRequest) as caught:
        text.encode("x")
    assert caught.value.bound == "token_ids instead"


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path, file: str) -> None:
    """Not skipped: half a tokenizer would serve other tokens."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    (tmp_path / file).write_text("{")
    with pytest.raises(CheckpointRefused, match=file):
        Tokenizer.load(tmp_path)


def test_of_several_templates_the_default_one_is_taken(tmp_path: Path) -> None:
    """As transformers does; a checkpoint that names no default has no chat."""
    (tmp_path / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    for name, expected in (("default", "A"), ("tool_use", None)):
        config = {"chat_template": [{"name": name, "template": "A"}], "bos_token": {"content": "<s>"}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        template = Tokenizer.load(tmp_path).template
        assert (template.source if template else None) == expected
        assert template is None or template.variables == {"bos_token": "<s>"}


def test_the_router_and_the_workers_look_in_the_same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tilde is a home directory for both; a path to nothing is refused without asking the hub."""
    monkeypatch.setenv("HOME", str(DEMO.parent))
    assert local_folder("~/model") == DEMO
    with pytest.raises(CheckpointRefused, match="there is no folder"):
        local_folder(str(tmp_path / "nothing"))


def test_a_revision_of_a_hub_id_is_the_same_one_for_router_and_workers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two that are cached, the named one, whatever the main branch is."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--org--name"
    for branch, commit in (("main", "a" * 40), ("v1", "b" * 40)):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    for found in (local_folder, checkpoint.resolve):
        assert found("org/name").name == "a" * 40
        assert found("org/name@v1").name == found(f"org/name@{'b' * 40}").name == "b" * 40
        with pytest.raises(CheckpointRefused):
            found("org/name@v2")
    assert Settings(model="org/name@v1").model_names == ("org/name",)


@pytest.mark.parametrize(
    "source",
    ["{{ 1 / 0 }}", "{{ [][5] + 1 }}", "{{ messages.x.y }}", "{{ '%d' % 'x' }}", "{{ messages | tojson }}"],
)
def test_a_template_that_fails_refuses_the_messages(source: str) -> None:
    """Whatever goes wrong in it, it was the messages that it could not take: also ones that are nested too deep."""
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": deep}])
    assert caught.value.field == "chat.messages"


def test_a_bad_word_is_spelled_at_a_beginning_and_after_a_space() -> None:
    """Spaces before it do not count, and one spelling is not there twice."""
    assert TEXT.backend is not None
    for word in ("heapq", "   heapq"):
        first, second = TEXT.spellings(word)
        assert TEXT.decode(first) == "heapq"
        assert TEXT.decode(second) == " heapq"
    text = FALLBACK["llama"]
    assert text.spellings("") == [text.encode(" ", special=False)]


def test_special_tokens_are_shown_to_whom_wants_them() -> None:
    """Between words and between bytes, as the whole text decodes."""
    text = FALLBACK["llama"]
    assert text.backend is not None
    word, begin = text.backend.token_to_id("\u2581ab"), text.backend.token_to_id("<s>")
    ids = [word, begin, BYTE + 0x41, begin, word, 10**6]
    stream = Detokenizer(text, special=True)
    assert "".join([*(stream.push([token]) for token in ids), stream.finish()]) == "ab<s>A<s> ab"
    assert streamed(text, ids, [1] * len(ids)) == "abA ab"
