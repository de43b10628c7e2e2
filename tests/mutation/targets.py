"""Which tests must fail when a module is changed, and which changes nobody could notice."""

from __future__ import annotations

JOURNEY = (
    "tests/journey/test_handoff.py",
    "tests/journey/test_requests.py",
    "tests/journey/test_forged.py",
    "tests/journey/test_admission.py",
)

# The fastest first: the first failure ends the run of a mutant.
TARGETS: dict[str, tuple[str, ...]] = {
    "engine/scheduler.py": ("tests/engine/test_scheduler.py",),
    "engine/blocks.py": ("tests/engine/test_blocks.py", "tests/engine/test_scheduler.py"),
    "engine/hashing.py": (
        "tests/engine/test_blocks.py",
        "tests/engine/test_scheduler.py",
        "tests/router/test_prefixes.py",
    ),
    "engine/retries.py": ("tests/engine/test_failed_step.py",),
    "engine/sequence.py": ("tests/engine/test_sequence.py", "tests/engine/test_scheduler.py"),
    "engine/pace.py": ("tests/engine/test_pace.py",),
    "engine/sampling.py": ("tests/engine/test_sampling.py",),
    "engine/speculation.py": ("tests/engine/test_speculation.py",),
    "services/router/policy.py": (
        *("tests/router/test_policy.py", "tests/router/test_placement.py", "tests/router/test_placer.py"),
    ),
    "services/router/pools.py": ("tests/router/test_pools.py", "tests/router/test_placer.py"),
    "services/router/workers.py": ("tests/router/test_placer.py", "tests/router/test_pools.py"),
    "services/router/turns.py": ("tests/router/test_turns.py",),
    "services/router/placer.py": ("tests/router/test_placer.py", "tests/router/test_placement.py"),
    "services/router/tenants.py": (
        *("tests/router/test_tenants.py", "tests/router/test_job_tokens.py", "tests/router/test_admit.py"),
    ),
    "services/router/queue.py": ("tests/router/test_queue.py", "tests/router/test_placer.py"),
    "services/router/quarantine.py": ("tests/router/test_quarantine.py",),
    "services/router/ways.py": (
        *("tests/router/test_ways.py", "tests/router/test_hiccup.py", "tests/router/test_placer.py"),
    ),
    "services/router/prefixes.py": ("tests/router/test_prefixes.py",),
    "kvtransfer/blocks.py": (
        "tests/kvtransfer/test_source.py",
        "tests/kvtransfer/test_pull.py",
        "tests/kvtransfer/test_transport.py",
    ),
    "kvtransfer/reads.py": ("tests/kvtransfer/test_reads.py", "tests/kvtransfer/test_nixl.py"),
    "kvtransfer/source.py": ("tests/kvtransfer/test_source.py",),
    "kvtransfer/pull.py": ("tests/kvtransfer/test_pull.py",),
    "kvtransfer/transport.py": ("tests/kvtransfer/test_transport.py", "tests/kvtransfer/test_pull.py"),
    "kvtransfer/inprocess.py": ("tests/kvtransfer/test_transport.py",),
    "kvtransfer/ucx_log.py": ("tests/kvtransfer/test_ucx_log.py",),
    "kvtransfer/nixl_transport.py": ("tests/kvtransfer/test_transport.py", "tests/kvtransfer/test_nixl.py"),
    "cluster/supervisor.py": ("tests/cluster/test_supervisor.py", "tests/cluster/test_reconcile.py"),
    "cluster/journal.py": ("tests/cluster/test_journal.py", "tests/journey/test_jobs.py"),
    "cluster/lease.py": ("tests/cluster/test_lease.py",),
    "cluster/registry.py": ("tests/cluster/test_registry.py", "tests/cluster/test_lease.py"),
    "services/view.py": ("tests/router/test_view.py", "tests/cluster/test_registry.py"),
    "services/decode/servicer.py": JOURNEY,
    "services/decode/remote_prefill.py": (
        *("tests/journey/test_handoff.py", "tests/journey/test_transfers.py", "tests/journey/test_requests.py"),
    ),
    "services/decode/probes.py": ("tests/journey/test_probes.py",),
    "services/prefill/servicer.py": JOURNEY,
}

# (module, the line as it is, the line as it was changed): why no test can tell them apart.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("engine/sequence.py", "top_p: float = 1.0", "top_p: float = 2.0"): "1 or more keeps every token",
}
