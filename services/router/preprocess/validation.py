"""The bounds of a request's fields. Each error names the field and its bound."""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Iterable, Mapping

from services.router.preprocess.json_limits import out_of_bounds
from services.router.preprocess.served_model import ModelFacts
from tandem.errors import InvalidRequest, NotFound
from tandem.sampling import DEFAULTS, NUMBERS
from tandem.v1 import generation_pb2, sampling_pb2

MAX_STOP_IDS = 16
MAX_REQUEST_ID = 128
MAX_SALT_BYTES = 256
MAX_BIAS = 100.0
MAX_BIASES = 300
# Prompt tokens x (1 + alternatives) x n, of all prompts of an HTTP request: some 2 MB, for one completion a message
# that any gRPC client takes, and up to 14 MB of JSON.
MAX_PROMPT_LOGPROBS = 2**18
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 256
MAX_N = 16
MIN_PRIORITY, DEFAULT_PRIORITY, MAX_PRIORITY = -1000, 0, 1000
MAX_TOKENS_FIELD = "sampling.max_tokens"
CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"  # the reason of an error


def checked_request_id(request_id: str) -> str:
    """The client's request id, or a new one. Raises InvalidRequest."""
    if not request_id:
        return secrets.token_hex(8)
    if len(request_id) > MAX_REQUEST_ID or not (request_id.isascii() and request_id.isprintable()):
        raise out_of_bounds(
            "request_id", f"{len(request_id)} characters", f"at most {MAX_REQUEST_ID} printable ASCII ones"
        )
    return request_id


def check_adapter(name: str, model: ModelFacts) -> None:
    """Raises NotFound for an adapter that the cluster does not have."""
    if name and name not in model.adapters:
        names = ", ".join(sorted(model.adapters)) or "none"
        raise NotFound(f"there is no adapter {name!r:.140}; there are: {names}", field="adapter", bound=names)


def check_salt(salt: bytes) -> None:
    if len(salt) > MAX_SALT_BYTES:
        raise out_of_bounds("cache_salt", f"{len(salt)} bytes", f"at most {MAX_SALT_BYTES} bytes")


def check_priority(priority: int) -> None:
    if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
        raise out_of_bounds("priority", str(priority), f"{MIN_PRIORITY} to {MAX_PRIORITY}")


def ttft_objective(message: generation_pb2.GenerateRequest) -> float | None:
    """In seconds; None: the request has none."""
    seconds = message.ttft_slo_seconds if message.HasField("ttft_slo_seconds") else None
    if seconds is not None and not 0 < seconds < math.inf:
        raise out_of_bounds("ttft_slo_seconds", str(seconds), "over 0")
    return seconds


def completions(params: sampling_pb2.SamplingParams) -> int:
    """How many completions of the prompt the client wants."""
    n = params.n if params.HasField("n") else 1
    if not 1 <= n <= MAX_N:
        raise out_of_bounds("sampling.n", str(n), f"1 to {MAX_N}")
    return int(n)


def check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if not 0 <= min_tokens <= max_tokens:
        raise out_of_bounds("sampling.min_tokens", str(min_tokens), f"0 to max_tokens ({max_tokens})")


def stop_ids(params: sampling_pb2.SamplingParams, vocab_size: int) -> list[int]:
    """The client's stop token ids."""
    ids = token_ids(params.stop_token_ids, "sampling.stop_token_ids", vocab_size)
    if len(ids) > MAX_STOP_IDS:
        raise out_of_bounds("sampling.stop_token_ids", f"{len(ids)} ids", f"at most {MAX_STOP_IDS} ids")
    return ids


def stop_strings(params: sampling_pb2.SamplingParams, *, has_tokenizer: bool) -> tuple[str, ...]:
    if params.stop and not has_tokenizer:
        raise InvalidRequest(
            "this checkpoint has no tokenizer.json, so there is no text to find a stop string in",
            field="sampling.stop",
            bound="stop_token_ids instead",
        )
    if len(params.stop) > MAX_STOPS:
        raise out_of_bounds("sampling.stop", f"{len(params.stop)} strings", f"at most {MAX_STOPS} strings")
    stops = [
        utf8(value, f"sampling.stop[{index}]", "at least one character") for index, value in enumerate(params.stop)
    ]
    for index, stop in enumerate(stops):
        if len(stop) > MAX_STOP_CHARACTERS:
            bound = f"at most {MAX_STOP_CHARACTERS} characters"
            raise out_of_bounds(f"sampling.stop[{index}]", f"{len(stop)} characters long", bound)
    return tuple(stops)


def bad_words(params: sampling_pb2.SamplingParams, *, has_tokenizer: bool) -> list[str]:
    if params.bad_words and not has_tokenizer:
        raise InvalidRequest(
            "this checkpoint has no tokenizer.json, so no tokens are known to spell a bad word",
            field="sampling.bad_words",
            bound="absent with this model; logit_bias takes token ids",
        )
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise out_of_bounds("sampling.bad_words", f"{len(params.bad_words)} words", f"at most {MAX_BAD_WORDS} words")
    words = [utf8(value, f"sampling.bad_words[{index}]", "a word") for index, value in enumerate(params.bad_words)]
    for index, word in enumerate(words):
        if len(word) > MAX_BAD_WORD_CHARACTERS or not word.strip():
            bound = f"1 to {MAX_BAD_WORD_CHARACTERS} characters, not only spaces"
            raise out_of_bounds(f"sampling.bad_words[{index}]", f"{len(word)} characters long", bound)
    return words


def _allowed_ids(ids: Collection[int], vocab_size: int) -> list[int]:
    if len(ids) > MAX_ALLOWED_IDS:
        bound = f"at most {MAX_ALLOWED_IDS} ids"
        raise out_of_bounds("sampling.allowed_token_ids", f"{len(ids)} ids", bound)
    return sorted(set(token_ids(ids, "sampling.allowed_token_ids", vocab_size)))


def sampling(params: sampling_pb2.SamplingParams, vocab_size: int) -> sampling_pb2.Sampling:
    """The parameters for a worker, with defaults filled in."""
    sampling = sampling_pb2.Sampling()
    for name, bounds in NUMBERS.items():
        value = getattr(params, name) if params.HasField(name) else getattr(DEFAULTS, name)
        if value is not None:
            if not bounds.allow(value):
                raise out_of_bounds(f"sampling.{name}", str(value), str(bounds))
            setattr(sampling, name, value)
    sampling.seed = params.seed if params.HasField("seed") else secrets.randbits(63)
    sampling.min_tokens = min(max(0, params.min_tokens), 2**32 - 1)  # checked once max_tokens is known
    sampling.logit_bias.update(_logit_bias(params.logit_bias, vocab_size))
    sampling.allowed_token_ids.extend(_allowed_ids(params.allowed_token_ids, vocab_size))
    return sampling


def max_tokens(params: sampling_pb2.SamplingParams, prompt: int, context: int, default: int) -> int:
    room = context - prompt
    if not params.HasField("max_tokens"):
        return min(default, room)
    if params.max_tokens < 1:
        raise out_of_bounds(MAX_TOKENS_FIELD, str(params.max_tokens), "at least 1")
    if params.max_tokens > room:
        raise over_context(context, prompt, MAX_TOKENS_FIELD, params.max_tokens)
    return int(params.max_tokens)


def check_prompt_logprobs(params: sampling_pb2.SamplingParams, tokens: int, prompts: int = 1) -> None:
    """`tokens`: of all these prompts. Each completion is sent with the scores of its prompt."""
    if not params.HasField("prompt_logprobs"):
        return
    alternatives, n = params.prompt_logprobs, completions(params)
    if tokens * (1 + alternatives) * n > MAX_PROMPT_LOGPROBS:
        asked = f"a prompt of {tokens} tokens" if prompts == 1 else f"{prompts} prompts of {tokens} tokens or more"
        advice = "" if prompts == 1 else " in one request: send fewer prompts at a time"
        raise InvalidRequest(
            f"sampling.prompt_logprobs is {alternatives} for {asked}{f', {n} times' if n > 1 else ''}",
            field="sampling.prompt_logprobs",
            bound=f"prompt tokens x (1 + prompt_logprobs) x n <= {MAX_PROMPT_LOGPROBS}{advice}",
        )


def _logit_bias(biases: Mapping[int, float], vocab_size: int) -> dict[int, float]:
    if len(biases) > MAX_BIASES:
        raise out_of_bounds("sampling.logit_bias", f"{len(biases)} ids", f"at most {MAX_BIASES} ids")
    for token, bias in biases.items():
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"sampling.logit_bias names token {token}, which the vocabulary does not have",
                field=f"sampling.logit_bias[{token}]",
                bound=f"ids 0 to {vocab_size - 1}",
            )
        if not abs(bias) <= MAX_BIAS:
            raise out_of_bounds(f"sampling.logit_bias[{token}]", str(bias), f"{-MAX_BIAS:g} to {MAX_BIAS:g}")
    return dict(biases)


def token_ids(ids: Iterable[int], name: str, vocab_size: int) -> list[int]:
    values = list(ids)
    if values and not 0 <= min(values) <= max(values) < vocab_size:
        index, value = next((index, value) for index, value in enumerate(values) if not 0 <= value < vocab_size)
        raise out_of_bounds(f"{name}[{index}]", str(value), f"0 to {vocab_size - 1}")
    return values


def utf8(value: bytes, name: str, least: str | None) -> str:
    if least is not None and not value:
        raise InvalidRequest(f"{name} is empty", field=name, bound=least)
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"{name} is not UTF-8: byte {error.start} is invalid", field=name, bound="valid UTF-8"
        ) from error


def over_context(context: int, prompt: int, field: str, max_tokens: int = 1, *, counted: bool = True) -> InvalidRequest:
    """The error for a prompt and answer that exceed the context. Clients search for the words "maximum context length".
    Not `counted`: the prompt has more than `prompt` tokens."""
    about = f"{prompt} in the prompt, {max_tokens} in the completion"
    requested = f"{prompt + max_tokens} tokens ({about})" if counted else f"over {prompt} tokens in the prompt"
    room = context - (prompt if field == MAX_TOKENS_FIELD else 1)
    return InvalidRequest(
        f"This model's maximum context length is {context} tokens. However, you requested {requested}.",
        reason=CONTEXT_LENGTH_EXCEEDED,
        field=field,
        bound=f"at most {room} {'after this prompt' if field == MAX_TOKENS_FIELD else 'tokens'}",
    )
