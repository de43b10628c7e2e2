"""What the cluster answers, as plain values: completions, receipts, workers, ledgers, diagnoses.

Everything here is frozen, compares by value and turns into JSON with `to_dict()`. Durations are seconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Literal

from tandem.errors import InternalError
from tandem.v1 import admin_pb2, common_pb2, generation_pb2, jobs_pb2

FinishReason = Literal["stop", "length"]
Path = Literal["disaggregated", "local", "unknown"]

_REASONS: dict[int, FinishReason] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
}
_PATHS: dict[int, Path] = {common_pb2.PATH_DISAGGREGATED: "disaggregated", common_pb2.PATH_LOCAL: "local"}


class _Dict:
    """Gives a dataclass `to_dict`."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, ready for json.dumps."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


# ---- one request


@dataclass(frozen=True, slots=True)
class Transfer(_Dict):
    """One movement of a request's KV from its prefill worker to its decode worker."""

    transport: str
    """What carried the bytes, for example "nixl:ucx:cma" or "nixl:ucx:tcp"."""
    bytes: int
    blocks: int
    seconds: float
    """Time in which at least one read was under way."""
    exposed: float
    """Seconds of it that prefill compute did not hide."""


@dataclass(frozen=True, slots=True)
class Estimate(_Dict):
    """What the router expected when it placed a request, in seconds."""

    wait: float
    """Until the worker begins with the prompt; the phase prefill_queue is what came of it."""
    compute: float
    """Of computing what is not cached: prefill_compute."""
    here: float
    """What computing it on the decode worker costs everybody together; 0 where there was no choice."""
    there: float
    """The same on the prefill worker."""


@dataclass(frozen=True, slots=True)
class Receipt(_Dict):
    """The account of a finished request."""

    request_id: str
    model: str
    path: Path
    prefill_worker: str
    """Empty when the path is local."""
    decode_worker: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens that nobody had to compute for this request."""
    seed: int
    ttft: float
    """From the request's arrival at the router until the first token is there for its client to read."""
    phases: dict[str, float]
    """The parts of `ttft` in their order; they add up to it."""
    tpot: float
    """Mean time per token after the first."""
    total: float
    transfer: Transfer | None
    attempts: int
    """1 when nothing went wrong."""
    notes: list[str]
    """A sentence for each resume and for each thing that did not run as configured."""
    preemptions: int
    drafted: int
    """Tokens that were guessed and verified in the attempts that ended; 0 without speculative decoding."""
    accepted: int
    """Of them, those that were right: so many tokens needed no step of their own."""
    choice: int
    """Which of the `choices` answers to the same prompt this is."""
    choices: int
    adapter: str
    """Empty: the base model."""
    client_ttft: float | None
    """From sending to the first token's arrival, measured by this client; None when no token came."""
    estimate: Estimate | None = None
    """None where a worker had not said how fast it is."""
    ended_at: float = 0.0
    """Unix seconds on the router's clock."""
    trace_id: str = ""
    """Of its trace, where one was recorded."""


@dataclass(frozen=True, slots=True)
class TokenLogprob(_Dict):
    """How likely the model found a token, as natural logarithms: before bias, penalties, temperature and filters."""

    token_id: int
    logprob: float
    top: dict[int, float]
    """The most likely token ids at this place, best first; `token_id` need not be among them."""


@dataclass(frozen=True, slots=True)
class Piece(_Dict):
    """What one message of a stream adds. The last one has the finish reason and the receipt."""

    text: str
    """Whole code points only, and nothing that may become a stop string, so it may lag behind the ids."""
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    receipt: Receipt | None = None
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One for each token of the prompt but the first, in the first piece with tokens, if they were asked for."""
    choice: int = 0
    """Which of the n answers it belongs to."""


@dataclass(frozen=True, slots=True)
class Completion(_Dict):
    """A finished request."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    receipt: Receipt
    logprobs: list[TokenLogprob] | None = None
    """One for each of `token_ids`, if they were asked for."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """One for each token of the prompt but the first, which nothing precedes, if they were asked for."""


JobState = Literal["open", "finished", "failed", "cancelled"]
_STATES: dict[int, JobState] = {
    jobs_pb2.JOB_STATE_OPEN: "open",
    jobs_pb2.JOB_STATE_FINISHED: "finished",
    jobs_pb2.JOB_STATE_FAILED: "failed",
    jobs_pb2.JOB_STATE_CANCELLED: "cancelled",
}


@dataclass(frozen=True, slots=True)
class Job(_Dict):
    """A request whose tokens are kept."""

    job_id: str
    state: JobState
    tokens: int
    """Kept so far."""
    takeovers: int
    """How often a router went on with it because the one before was gone."""
    error: str
    """Why it failed; empty if it did not."""


@dataclass(frozen=True, slots=True)
class ModelInfo(_Dict):
    model: str
    max_context_tokens: int
    vocab_size: int
    eos_token_ids: list[int]
    has_tokenizer: bool
    has_chat_template: bool
    adapters: list[str]
    """What a request may name as its adapter."""


class StreamReader:
    """Turns the events of one Generate call into pieces, and refuses a stream with a gap or without an end.

    A stream that lost or repeated a message must never look like a shorter or longer answer.
    Make it when the request is sent: it measures the time to the first token from there.
    """

    def __init__(self, from_token: int = 0) -> None:
        """`from_token`: the first one that is wanted; what came in one piece with it may begin before it."""
        self._sent = perf_counter()
        self._first_token: dict[int, float] = {}  # by choice: seconds after sending
        self._tokens: list[int] = [from_token]  # of each choice so far
        self._from = from_token
        self._finished: set[int] = set()

    @property
    def complete(self) -> bool:
        """Whether all answers have said how they ended."""
        return len(self._finished) == len(self._tokens)

    @property
    def tokens(self) -> int:
        """How many have come so far."""
        return sum(self._tokens)

    @property
    def due(self) -> int:
        """The first token of any answer that has not come yet."""
        return min(count for choice, count in enumerate(self._tokens) if choice not in self._finished)

    def has(self, event: generation_pb2.GenerateResponse) -> bool:
        """Whether all in it has come before, in a stream that was begun again."""
        if event.HasField("finished"):
            return event.finished.choice in self._finished
        if not event.HasField("delta"):
            return False
        delta = event.delta
        return delta.choice < len(self._tokens) and delta.index + len(delta.token_ids) <= self._tokens[delta.choice]

    def read(self, event: generation_pb2.GenerateResponse) -> Piece | None:
        """The piece in this event, or None if it has none. Raises InternalError on a gap."""
        kind = event.WhichOneof("event")
        if kind == "started" and event.started.choices > len(self._tokens):
            self._tokens = [self._from] * event.started.choices
        if kind not in ("delta", "finished"):
            if len(self._finished) == len(self._tokens):
                raise InternalError("the server sent more after the end of the stream")
            return None  # started, or an event of a newer server
        choice = event.delta.choice if kind == "delta" else event.finished.choice
        if choice in self._finished:
            raise InternalError("the server sent more after the end of the stream")
        if choice >= len(self._tokens):
            raise InternalError(f"the server sent something of answer {choice}, of {len(self._tokens)}")
        if kind == "delta":
            return self._delta(event.delta)
        self._finished.add(choice)
        account = receipt(event.finished.receipt, self._first_token.get(choice))
        return Piece(event.finished.text, [], _reason(event.finished.reason), account, choice=choice)

    def _delta(self, delta: generation_pb2.Delta) -> Piece:
        choice, due = delta.choice, self._tokens[delta.choice]
        if due == self._from and delta.index <= due < delta.index + len(delta.token_ids):
            due = self._tokens[choice] = delta.index
        if delta.index != due:
            raise InternalError(f"the stream has a gap: token {due} was due and token {delta.index} came")
        if delta.token_ids and choice not in self._first_token:
            self._first_token[choice] = perf_counter() - self._sent
        self._tokens[choice] += len(delta.token_ids)
        return Piece(
            delta.text,
            list(delta.token_ids),
            logprobs=_logprobs(delta.logprobs, delta.token_ids) if delta.HasField("logprobs") else None,
            prompt_logprobs=_prompt_logprobs(delta.prompt_logprobs) if delta.HasField("prompt_logprobs") else None,
            choice=choice,
        )

    def end(self) -> None:
        """The stream is over. Raises InternalError if it never said how it ended."""
        if len(self._finished) < len(self._tokens):
            raise InternalError("the stream ended without a receipt, so the text may be cut")


def completions(pieces: list[Piece]) -> list[Completion]:
    """A whole stream as its answers, in their order."""
    count = max(piece.choice for piece in pieces) + 1
    return [completion([piece for piece in pieces if piece.choice == choice]) for choice in range(count)]


def completion(pieces: list[Piece]) -> Completion:
    """The pieces of one answer as one value. The last one has the receipt (StreamReader saw to it)."""
    reason, receipt = pieces[-1].finish_reason, pieces[-1].receipt
    assert reason is not None
    assert receipt is not None
    return Completion(
        text="".join(piece.text for piece in pieces),
        token_ids=[token for piece in pieces for token in piece.token_ids],
        finish_reason=reason,
        receipt=receipt,
        logprobs=[one for piece in pieces for one in piece.logprobs or ()] if any(p.logprobs for p in pieces) else None,
        prompt_logprobs=next((piece.prompt_logprobs for piece in pieces if piece.prompt_logprobs is not None), None),
    )


def _prompt_logprobs(said: generation_pb2.PromptLogprobs) -> list[TokenLogprob]:
    return _logprobs(said.logprobs, said.token_ids[1:])


def _logprobs(said: common_pb2.Logprobs, token_ids: Sequence[int]) -> list[TokenLogprob]:
    count = len(token_ids)
    width = len(said.top_ids) // max(1, count)
    if len(said.chosen) != count or len(said.top) != len(said.top_ids) or len(said.top) != width * count:
        raise InternalError(f"{len(said.chosen)} log probabilities do not fit {count} tokens")
    ranges = [slice(width * place, width * (place + 1)) for place in range(count)]
    return [
        TokenLogprob(token, chosen, dict(zip(said.top_ids[at], said.top[at], strict=True)))
        for token, chosen, at in zip(token_ids, said.chosen, ranges, strict=True)
    ]


def model_info(answer: generation_pb2.GetModelInfoResponse) -> ModelInfo:
    return ModelInfo(
        model=answer.model,
        max_context_tokens=answer.max_context_tokens,
        vocab_size=answer.vocab_size,
        eos_token_ids=list(answer.eos_token_ids),
        has_tokenizer=answer.has_tokenizer,
        has_chat_template=answer.has_chat_template,
        adapters=list(answer.adapters),
    )


def job(answer: jobs_pb2.Job) -> Job:
    return Job(answer.job_id, _STATES.get(answer.state, "open"), answer.tokens, answer.takeovers, answer.error)


def _reason(reason: int) -> FinishReason:
    if reason not in _REASONS:
        raise InternalError(f"the stream ended for reason {reason}, which this client does not know; upgrade it")
    return _REASONS[reason]


def receipt(receipt: generation_pb2.Receipt, client_ttft: float | None = None) -> Receipt:
    """`client_ttft` is the time to first token as the client saw it, if it knows."""
    return Receipt(
        request_id=receipt.request_id,
        model=receipt.model,
        path=_PATHS.get(receipt.path, "unknown"),
        prefill_worker=receipt.prefill_worker,
        decode_worker=receipt.decode_worker,
        prompt_tokens=receipt.prompt_tokens,
        completion_tokens=receipt.completion_tokens,
        cached_tokens=receipt.cached_tokens,
        seed=receipt.seed,
        ttft=receipt.ttft_seconds,
        phases={phase.name: phase.seconds for phase in receipt.phases},
        tpot=receipt.tpot_seconds,
        total=receipt.total_seconds,
        transfer=_transfer(receipt.transfer) if receipt.HasField("transfer") else None,
        attempts=receipt.attempts,
        notes=list(receipt.notes),
        preemptions=receipt.preemptions,
        drafted=receipt.drafted,
        accepted=receipt.accepted,
        choice=receipt.choice,
        choices=max(1, receipt.choices),
        adapter=receipt.adapter,
        client_ttft=client_ttft,
        estimate=_estimate(receipt.estimate) if receipt.HasField("estimate") else None,
        ended_at=receipt.ended_at,
        trace_id=receipt.trace_id,
    )


def _estimate(given: generation_pb2.Estimate) -> Estimate:
    return Estimate(given.wait_seconds, given.compute_seconds, given.here_seconds, given.there_seconds)


def receipts(answer: admin_pb2.ListReceiptsResponse) -> list[Receipt]:
    return [receipt(one) for one in answer.receipts]


@dataclass(frozen=True, slots=True)
class Calibrated(_Dict):
    """How what came to be compares with what was expected, over the requests of one path."""

    path: Path
    requests: int
    compute: tuple[float, float, float]
    """Seconds of computing, was / expected: first quartile, median, third."""
    wait: tuple[float, float, float]
    """Seconds of waiting at the worker, was - expected: likewise."""


def calibration(items: Iterable[Receipt]) -> list[Calibrated]:
    """Over receipts of single answers with an estimate, whose first attempt went well; a row for each path."""
    by_path: dict[Path, list[tuple[float, float]]] = {}
    for item in items:
        guess = item.estimate
        if guess is None or guess.compute <= 0 or item.attempts > 1 or item.choice:
            continue
        was = item.phases.get("prefill_compute", 0.0), item.phases.get("prefill_queue", 0.0)
        by_path.setdefault(item.path, []).append((was[0] / guess.compute, was[1] - guess.wait))
    return [
        Calibrated(path, len(pairs), _quartiles([a for a, _ in pairs]), _quartiles([b for _, b in pairs]))
        for path, pairs in sorted(by_path.items())
    ]


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def _transfer(report: common_pb2.TransferReport) -> Transfer:
    return Transfer(report.transport, report.bytes, report.blocks, report.seconds, report.exposed_seconds)


# ---- the cluster


@dataclass(frozen=True, slots=True)
class Worker(_Dict):
    """One worker as the router sees it."""

    worker_id: str
    role: str
    state: str
    """ready or draining. A worker that still starts, or was not heard of for a while, is not in the list."""
    pid: int
    incarnation: str
    address: str
    """host:port."""
    running: int
    waiting: int
    blocks_total: int
    blocks_held: int
    """Held by a sequence or a transfer; cached blocks can be had at once and do not count."""
    heartbeat_age: float
    weights: str = ""
    """Format of the weights of its products: checkpoint, or what they were rounded to; empty of a router."""
    weight_bytes: int = 0
    kv_dtype: str = ""
    """What an element of K or V is kept and moved in, such as int8; empty for a router."""
    kv_token_bytes: float = 0.0
    """Of one token's KV, scales and padding included."""
    sum_order: str = ""
    """In which order it sums products, such as tile32: equal in two workers, equal bits; empty for a router."""
    metrics_address: str = ""
    """host:port of its metrics; empty: it serves none there."""


@dataclass(frozen=True, slots=True)
class Pools(_Dict):
    """Every worker, and how many of each role are wanted. Iterates over the workers."""

    workers: list[Worker]
    wanted: dict[str, int]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.workers)


@dataclass(frozen=True, slots=True)
class Verdict(_Dict):
    """What the autoscaler found of one pool."""

    role: str
    size: int
    """Wanted until then."""
    wanted: int
    why: str


@dataclass(frozen=True, slots=True)
class Autoscaling(_Dict):
    """What the autoscaler found when it looked last."""

    mode: str
    """on, or dry-run: then nothing is done."""
    age: float
    pools: list[Verdict]


@dataclass(frozen=True, slots=True)
class Drained(_Dict):
    """What became of the requests of a drained worker."""

    finished: int
    cut: int
    """Not done within the grace; they go on elsewhere."""


@dataclass(frozen=True, slots=True)
class Held(_Dict):
    """Blocks with one owner."""

    owner: str
    """sequence:<request> from its reservation on, transfer:<id>#<generation>, or probe:<worker> during diagnose()."""
    blocks: list[int]
    age: float


@dataclass(frozen=True, slots=True)
class Ledger(_Dict):
    """Every KV block of one worker."""

    worker_id: str
    incarnation: str
    address: str
    total: int
    free: int
    cached: int
    held: int
    """Blocks with at least one owner; a shared one counts once."""
    entries: list[Held]
    faults: list[str]
    """Sentences about what does not add up, the worker's own and this client's; empty when it balances."""

    @property
    def balanced(self) -> bool:
        return not self.faults


@dataclass(frozen=True, slots=True)
class Audit(_Dict):
    """The ledgers of all workers, and the workers that did not answer with the reason."""

    ledgers: list[Ledger]
    unreachable: dict[str, str]

    @property
    def balanced(self) -> bool:
        """Every worker answered and every ledger adds up."""
        return not self.unreachable and all(ledger.balanced for ledger in self.ledgers)


@dataclass(frozen=True, slots=True)
class Pair(_Dict):
    """A prefill and a decode worker: whether KV may move between them, over what and how fast."""

    prefill_worker: str
    decode_worker: str
    compatible: bool
    differences: list[str]
    """Why not, a sentence each."""
    transport: str
    bytes_per_second: float
    """Of a probe transfer."""
    error: str
    """Why the probe failed; empty when it did not."""


@dataclass(frozen=True, slots=True)
class Diagnosis(_Dict):
    """What `tandem doctor` asks for."""

    pairs: list[Pair]
    registry_reachable: bool
    registry_round_trip: float
    versions: dict[str, str]
    problems: list[str]
    """What an operator should look at; empty when all is well."""


def pools(answer: admin_pb2.ListWorkersResponse) -> Pools:
    return Pools([_worker(worker) for worker in answer.workers], dict(answer.wanted))


def autoscaling(answer: admin_pb2.GetScalingResponse) -> Autoscaling:
    pools = [Verdict(one.role, one.size, one.wanted, one.why) for one in answer.pools]
    return Autoscaling(answer.mode, answer.age_seconds, pools)


def audit(answer: admin_pb2.AuditResponse) -> Audit:
    return Audit([_ledger(ledger) for ledger in answer.ledgers], dict(answer.unreachable))


def diagnosis(answer: admin_pb2.DiagnoseResponse) -> Diagnosis:
    return Diagnosis(
        pairs=[_pair(pair) for pair in answer.pairs],
        registry_reachable=answer.registry_reachable,
        registry_round_trip=answer.registry_round_trip_seconds,
        versions=dict(sorted(answer.versions.items())),
        problems=list(answer.problems),
    )


def _worker(worker: admin_pb2.Worker) -> Worker:
    return Worker(
        worker_id=worker.worker_id,
        role=worker.role,
        state=worker.state,
        pid=worker.pid,
        incarnation=worker.incarnation,
        address=worker.address,
        running=worker.running,
        waiting=worker.waiting,
        blocks_total=worker.blocks_total,
        blocks_held=worker.blocks_held,
        kv_dtype=worker.kv_dtype,
        kv_token_bytes=worker.kv_token_bytes,
        sum_order=worker.sum_order,
        metrics_address=worker.metrics_address,
        heartbeat_age=worker.heartbeat_age_seconds,
        weights=worker.weights,
        weight_bytes=worker.weight_bytes,
    )


def _ledger(ledger: common_pb2.Ledger) -> Ledger:
    return Ledger(
        worker_id=ledger.worker.worker_id,
        incarnation=ledger.worker.incarnation,
        address=ledger.worker.address,
        total=ledger.total,
        free=ledger.free,
        cached=ledger.cached,
        held=ledger.held,
        entries=[Held(entry.owner, list(entry.blocks), entry.age_seconds) for entry in ledger.entries],
        faults=[*ledger.faults, *_sums(ledger)],
    )


def _sums(ledger: common_pb2.Ledger) -> list[str]:
    """The sums done again here, so that a ledger is believed for its numbers and not for its word."""
    faults = []
    counted = ledger.free + ledger.held + ledger.cached
    if counted != ledger.total:
        faults.append(
            f"free {ledger.free} + held {ledger.held} + cached {ledger.cached} = {counted}, not total {ledger.total}"
        )
    owned = {block for entry in ledger.entries for block in entry.blocks}
    if len(owned) != ledger.held:
        faults.append(f"{ledger.held} blocks are held and {len(owned)} have an owner")
    return faults


def _pair(pair: admin_pb2.Pair) -> Pair:
    return Pair(
        prefill_worker=pair.prefill_worker,
        decode_worker=pair.decode_worker,
        compatible=pair.compatible,
        differences=list(pair.differences),
        transport=pair.transport,
        bytes_per_second=pair.bytes_per_second,
        error=pair.error,
    )


@dataclass(frozen=True, slots=True)
class Findings(_Dict):
    """A diagnosis in sentences."""

    problems: list[str]
    """Something does not work."""
    degraded: list[str]
    """It works, but slower than this machine could."""
    slow_pairs: list[tuple[str, str]]
    """The (prefill, decode) pairs of those sentences."""
    advice: list[str]
    """It works, and could be made more even."""


def examine(answer: Diagnosis, seen: Pools) -> Findings:
    """Everything in the diagnosis that an operator should look at."""
    problems = list(answer.problems)
    if not answer.registry_reachable:
        problems.append("the registry does not answer")
    for pair in answer.pairs:
        name = f"{pair.prefill_worker} and {pair.decode_worker}"
        if pair.error:
            problems.append(f"{name}: the probe failed: {pair.error}")
        elif not pair.compatible:
            problems.append(f"{name} do not fit: {'; '.join(pair.differences) or 'no reason given'}")
    hosts = {worker.worker_id: worker.address.rpartition(":")[0] for worker in seen}
    slow = [pair for pair in answer.pairs if _over_tcp_at_home(pair, hosts)]
    sentences = [
        f"{pair.prefill_worker} and {pair.decode_worker} are on one host and talk over TCP ({pair.transport})"
        for pair in slow
    ]
    pairs = [(pair.prefill_worker, pair.decode_worker) for pair in slow]
    return Findings(list(dict.fromkeys(problems)), sentences, pairs, _unlike_orders(seen))


def _unlike_orders(seen: Pools) -> list[str]:
    """What is to be said of workers that do not give equal bits: at most one sentence."""
    orders: dict[str, list[str]] = {}
    for worker in seen:
        if worker.sum_order:
            orders.setdefault(worker.sum_order, []).append(worker.worker_id)
    if len(orders) < 2:
        return []
    names = "; ".join(f"{order}: {', '.join(orders[order])}" for order in sorted(orders))
    cure = "plain PyTorch agrees with none" if "torch" in orders else "the setting sum_order makes them agree on one"
    return [
        f"workers sum in unlike orders ({names}): a stream that goes from one to another may go on with other tokens,"
        f" as right as those that it would have had; {cure}"
    ]


def _over_tcp_at_home(pair: Pair, hosts: Mapping[str, str]) -> bool:
    """TCP between two workers of one host, where memory could be read directly. `hosts` is by worker id."""
    prefill, decode = hosts.get(pair.prefill_worker), hosts.get(pair.decode_worker)
    return "tcp" in pair.transport.split(":") and prefill is not None and prefill == decode
