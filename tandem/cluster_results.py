"""Results about the cluster: its workers, sizes, ledgers and links."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tandem.results import _Dict, from_message
from tandem.rpc.addresses import host_of
from tandem.v1 import admin_pb2, common_pb2

BY_CHOICE = ", because the setting transport is nccl"


@dataclass(frozen=True, slots=True)
class Worker(_Dict):
    """One worker as the router sees it."""

    worker_id: str
    role: str
    state: str
    """ready, draining, or other-vocabulary: its checkpoint has another vocabulary than the router's tokenizer, so the
    router sends it no requests. A worker that is starting, or whose heartbeat is missing, is not in the list."""
    pid: int
    incarnation: str
    address: str
    """host:port."""
    running: int
    waiting: int
    blocks_total: int
    blocks_held: int
    """Held by a sequence or a transfer; cached blocks are available at once and do not count."""
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
    model: str = ""
    """Whose pool it is in, where the cluster serves several models."""
    node: str = ""
    """The name of its host."""
    device: str = ""
    """On which its engine runs: cpu, or cuda: and what the host calls that GPU; empty for a router."""
    tp: int = 1
    """Ranks that it consists of (tensor parallelism)."""


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
    """The autoscaler's verdict on one pool."""

    role: str
    size: int
    """Wanted until then."""
    wanted: int
    why: str


@dataclass(frozen=True, slots=True)
class Autoscaling(_Dict):
    """The autoscaler's latest verdicts."""

    mode: str
    """on, or dry-run: then nothing is done."""
    age: float
    pools: list[Verdict]


@dataclass(frozen=True, slots=True)
class Drained(_Dict):
    """The outcome of a drained worker's requests."""

    finished: int
    cut: int
    """Not done within the grace; they go on elsewhere."""


@dataclass(frozen=True, slots=True)
class ServedAdapter(_Dict):
    """An adapter that requests may name."""

    name: str
    path: str
    """Its folder, as it was given."""
    fingerprint: str
    """Of its weights, in hexadecimal; empty for one of the setting `adapters`, which only the workers have read."""
    loaded_at: float
    """Unix seconds; 0 for one of the setting `adapters`."""
    model: str = ""
    """For which model, where the cluster serves several."""


@dataclass(frozen=True, slots=True)
class Held(_Dict):
    """Blocks with one owner."""

    owner: str
    """sequence:<request>#<number> from its reservation on, transfer:<id>#<generation>, or probe:<worker>#<number>
    during diagnose()."""
    blocks: list[int]
    age: float


@dataclass(frozen=True, slots=True)
class StateLedger(_Dict):
    """The slots of recurrent states, each with at most one owner; and the copies of states in cached blocks, with which
    a sequence can begin."""

    total: int
    free: int
    owners: list[str]
    snapshots: int


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
    states: StateLedger | None = None
    """Only of a model with recurrent layers."""

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
    device: str = ""
    """The network devices over which KV moves, such as eth0; empty within one host."""
    slow: str = ""
    """Why KV could move faster over another device; empty where it could not."""
    why: str = ""
    """Why the pair uses this transport, where the setting is auto."""
    prefill_tp: int = 1
    """Ranks of the prefill worker; KV moves between any two sizes."""
    decode_tp: int = 1
    converted: str = ""
    """What is done to blocks that the decode worker keeps in another form; empty where they are the same."""


@dataclass(frozen=True, slots=True)
class Diagnosis(_Dict):
    """The data of `tandem doctor`."""

    pairs: list[Pair]
    registry_reachable: bool
    registry_round_trip: float
    versions: dict[str, str]
    problems: list[str]
    """What an operator should look at; empty when all is well."""


def pools(answer: admin_pb2.ListWorkersResponse) -> Pools:
    return Pools([from_message(Worker, worker) for worker in answer.workers], dict(answer.wanted))


def autoscaling(answer: admin_pb2.GetScalingResponse) -> Autoscaling:
    return from_message(Autoscaling, answer, pools=[from_message(Verdict, verdict) for verdict in answer.pools])


def adapter(one: admin_pb2.ServedAdapter) -> ServedAdapter:
    return from_message(ServedAdapter, one, fingerprint=one.fingerprint.hex())


def audit(answer: admin_pb2.AuditResponse) -> Audit:
    return Audit([_ledger(ledger) for ledger in answer.ledgers], dict(answer.unreachable))


def diagnosis(answer: admin_pb2.DiagnoseResponse) -> Diagnosis:
    pairs = [from_message(Pair, pair) for pair in answer.pairs]
    return from_message(Diagnosis, answer, pairs=pairs, versions=dict(sorted(answer.versions.items())))


def _ledger(ledger: common_pb2.Ledger) -> Ledger:
    return from_message(
        Ledger,
        ledger,
        worker_id=ledger.worker.worker_id,
        incarnation=ledger.worker.incarnation,
        address=ledger.worker.address,
        entries=[from_message(Held, entry) for entry in ledger.entries],
        faults=[*ledger.faults, *_sums(ledger)],
        states=from_message(StateLedger, ledger.states) if ledger.HasField("states") else None,
    )


def _sums(ledger: common_pb2.Ledger) -> list[str]:
    """Recomputes the sums from the ledger's numbers instead of trusting its own verdict."""
    faults = []
    counted = ledger.free + ledger.held + ledger.cached
    if counted != ledger.total:
        faults.append(
            f"free {ledger.free} + held {ledger.held} + cached {ledger.cached} = {counted}, not total {ledger.total}"
        )
    owned = {block for entry in ledger.entries for block in entry.blocks}
    if len(owned) != ledger.held:
        faults.append(f"{ledger.held} blocks are held and {len(owned)} have an owner")
    total, free, owners = ledger.states.total, ledger.states.free, ledger.states.owners
    if free + len(owners) != total:
        faults.append(f"state slots: free {free} + held {len(owners)} are not total {total}")
    if len(set(owners)) != len(owners):
        faults.append("a sequence has two state slots")
    return faults


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


def examine(answer: Diagnosis, pools: Pools) -> Findings:
    """The findings of a diagnosis."""
    problems = list(answer.problems)
    if not answer.registry_reachable:
        problems.append("the registry does not answer")
    hosts = {worker.worker_id: host_of(worker.address) for worker in pools}
    slow = [pair for pair in answer.pairs if _over_tcp_at_home(pair, hosts)]
    sentences = [
        f"{pair.prefill_worker} and {pair.decode_worker} are on one host but communicate over TCP ({pair.transport}"
        f"{BY_CHOICE if pair.transport.startswith('gloo') else ''})"
        for pair in slow
    ]
    over_network = [pair for pair in answer.pairs if pair.slow and pair not in slow]
    sentences += [f"{pair.prefill_worker} to {pair.decode_worker}: {pair.slow}" for pair in over_network]
    pairs = [(pair.prefill_worker, pair.decode_worker) for pair in (*slow, *over_network)]
    return Findings(list(dict.fromkeys(problems)), sentences, pairs, _unlike_orders(pools))


def _unlike_orders(pools: Pools) -> list[str]:
    """Advice for workers that do not compute equal bits: at most one sentence for each model, because streams
    never move between models."""
    orders: dict[str, dict[str, list[str]]] = {}  # model -> order -> workers
    for worker in pools:
        if worker.sum_order:
            orders.setdefault(worker.model, {}).setdefault(worker.sum_order, []).append(worker.worker_id)
    return [_advice_on_orders(of_model) for of_model in orders.values() if len(of_model) > 1]


def _advice_on_orders(orders: Mapping[str, list[str]]) -> str:
    names = "; ".join(f"{order}: {', '.join(orders[order])}" for order in sorted(orders))
    one_order = "the setting sum_order, and equal sizes (--tp), make them agree"
    cure = "plain PyTorch matches no other" if "torch" in orders else one_order
    return (
        f"workers sum in different orders ({names}): a stream that moves between them may continue with other, equally"
        f" valid tokens than it would have had; {cure}"
    )


def _over_tcp_at_home(pair: Pair, hosts: Mapping[str, str]) -> bool:
    """TCP between two workers of one host, where memory could be read directly. `hosts` is by worker id."""
    prefill, decode = hosts.get(pair.prefill_worker), hosts.get(pair.decode_worker)
    return "tcp" in pair.transport.split(":") and prefill is not None and prefill == decode
