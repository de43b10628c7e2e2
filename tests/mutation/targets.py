"""Which tests must fail when a module is changed, and which changes nobody could notice."""

from __future__ import annotations


def _some(file: str, *tests: str) -> tuple[str, ...]:
    """Some tests of a file whose others take long and say nothing more about the module."""
    return tuple(f"{file}::{test}" for test in tests)


HANDOFF = _some(
    "tests/journey/test_handoff.py",
    "test_the_first_token_reaches_the_client_before_the_kv_has_moved",
    "test_a_half_filled_block_is_not_announced",
    "test_a_long_prompt_is_announced_and_read_in_parts",
    "test_blocks_are_announced_while_later_ones_are_computed",
    "test_a_corrupted_block_is_refused_and_the_request_retried",
    "test_a_decode_worker_that_holds_an_old_ticket_is_refused_and_the_request_retried",
    "test_a_ticket_is_dead_before_its_blocks_are_freed",
    "test_a_cancelled_request_holds_its_blocks_until_its_reads_have_ended",
    "test_layouts_that_differ_are_refused_before_any_byte_moves",
)
FORGED = _some(
    "tests/journey/test_forged.py",
    "test_a_transfer_is_released_by_its_ticket_alone_and_once",
    "test_workers_lives_layouts_and_feeds_are_not_to_be_made_up",
)
DECODED = _some(
    "tests/journey/test_requests.py",
    "test_without_a_prefill_worker_the_decode_worker_prefills_and_the_receipt_says_so",
    "test_the_receipts_phases_add_up_to_the_time_to_first_token",
    "test_room_is_reserved_before_prefill_starts",
    "test_a_stop_token_ends_the_stream",
    "test_a_deadline_ends_the_request_everywhere",
    "test_only_a_request_that_must_begin_alone_waits_until_that_is_sent",
)
STOPPED = _some("tests/journey/test_structured.py", "test_stop_strings_cut_the_text_and_end_the_work")
SCORED_HERE, SCORED = (
    _some("tests/journey/test_prompt_logprobs.py", f"test_each_prompt_token_has_its_own[{prefill}]")
    for prefill in (0, 1)
)
COUNTED = _some("tests/journey/test_metrics.py", "test_every_process_counts_its_part_of_a_request")
ADAPTED = _some(
    "tests/journey/test_adapters.py",
    "test_doctor_names_adapters_that_differ",
    "test_a_stream_does_not_go_on_with_other_content",
)
TRACED = _some(
    "tests/journey/test_tracing.py",
    "test_one_request_is_one_trace_through_four_processes",
    "test_a_resumed_request_stays_in_its_trace_and_so_do_its_log_lines",
)
TRANSFERS = _some(
    "tests/journey/test_transfers.py",
    "test_what_a_failure_below_is_for_the_router",
    "test_a_time_limit_of_ours_is_not_the_callers_deadline",
    "test_the_router_hears_of_a_failed_read_before_the_read_can_be_ended",
    "test_a_source_that_failed_is_refused_at_once_until_it_is_verified",
)
REMOTE = (*TRANSFERS[:2], *HANDOFF, *DECODED[1:2], *SCORED, *COUNTED, *TRANSFERS[2:])

# The fastest first: the first failure ends the run of a mutant.
TARGETS: dict[str, tuple[str, ...]] = {
    "engine/core/scheduler.py": ("tests/engine/test_scheduler.py",),
    "engine/core/block_pool.py": ("tests/engine/test_block_pool.py", "tests/engine/test_scheduler.py"),
    "engine/core/block_hash.py": (
        "tests/engine/test_block_pool.py",
        "tests/engine/test_scheduler.py",
        "tests/router/test_prefix_index.py",
    ),
    "engine/core/step_retries.py": ("tests/engine/test_failed_step.py",),
    "engine/core/sequence.py": ("tests/engine/test_sequence.py", "tests/engine/test_scheduler.py"),
    "tandem/sampling.py": ("tests/tandem/test_sampling.py", "tests/router/test_request.py"),
    "engine/core/step_time.py": ("tests/engine/test_step_time.py",),
    "engine/decoding/sampler.py": ("tests/engine/test_sampler.py",),
    "engine/decoding/logprobs.py": ("tests/engine/test_sampler.py",),
    "engine/decoding/speculative.py": ("tests/engine/test_speculative.py",),
    "services/router/routing/local_or_remote.py": ("tests/router/test_placement.py",),
    "services/router/routing/placement.py": ("tests/router/test_placement.py", "tests/router/test_worker_selector.py"),
    "services/router/routing/worker_selector.py": (
        *("tests/router/test_placement.py", "tests/router/test_worker_selector.py"),
    ),
    "services/router/routing/worker_pools.py": (
        *("tests/router/test_worker_pools.py", "tests/router/test_constrained_queue.py"),
        *_some(
            "tests/router/test_placement.py",
            "test_the_expected_wait_is_that_of_adding_up_all_workers",
            "test_where_streams_make_way_a_prompt_is_expected_as_soon_as_either_pool_can_compute_it",
        ),
    ),
    "services/router/routing/worker_table.py": ("tests/router/test_request_scheduler.py",),
    "tandem/tenancy/tenant_slots.py": ("tests/tandem/test_tenant_slots.py",),
    "services/router/routing/request_scheduler.py": (
        *("tests/router/test_request_scheduler.py", "tests/router/test_constrained_queue.py"),
    ),
    "services/router/routing/waiting_request.py": (
        *("tests/router/test_request_scheduler.py", "tests/router/test_constrained_queue.py"),
    ),
    "services/router/routing/constrained_queue.py": ("tests/router/test_constrained_queue.py",),
    "services/router/tenancy/rate_limits.py": (
        *("tests/router/test_rate_limits.py", "tests/router/test_job_tokens.py"),
    ),
    "services/router/routing/fair_queue.py": ("tests/router/test_fair_queue.py",),
    "services/router/execution/poison_requests.py": ("tests/router/test_poison_requests.py",),
    "services/router/routing/path_latency.py": ("tests/router/test_path_latency.py",),
    "services/router/routing/useful_wait.py": ("tests/router/test_request_scheduler.py",),
    "services/router/routing/prefix_index.py": ("tests/router/test_prefix_index.py",),
    "kvtransfer/types.py": (
        "tests/kvtransfer/test_types.py",
        "tests/kvtransfer/test_sender.py",
        "tests/kvtransfer/test_receiver.py",
        "tests/kvtransfer/test_transport.py",
    ),
    "kvtransfer/backends/reads.py": ("tests/kvtransfer/test_reads.py", "tests/kvtransfer/test_nixl.py"),
    "kvtransfer/sender.py": ("tests/kvtransfer/test_sender.py",),
    "kvtransfer/receiver.py": ("tests/kvtransfer/test_receiver.py",),
    "kvtransfer/transport.py": ("tests/kvtransfer/test_transport.py", "tests/kvtransfer/test_receiver.py"),
    "kvtransfer/factory.py": ("tests/kvtransfer/test_transport.py",),
    "kvtransfer/backends/ucx_log.py": (
        "tests/kvtransfer/test_ucx_log.py",
        *_some("tests/kvtransfer/test_nixl.py", "test_link_names_each_transport"),
    ),
    **dict.fromkeys(
        (
            "kvtransfer/backends/nixl_agent.py",
            "kvtransfer/backends/nixl_owner.py",
            "kvtransfer/backends/nixl_reads.py",
            "kvtransfer/backends/nixl_transport.py",
        ),
        ("tests/kvtransfer/test_transport.py", "tests/kvtransfer/test_nixl.py"),
    ),
    **dict.fromkeys(
        (
            "kvtransfer/backends/nccl/group.py",
            "kvtransfer/backends/nccl/link.py",
            "kvtransfer/backends/nccl/transport.py",
        ),
        ("tests/kvtransfer/test_transport.py", "tests/kvtransfer/test_nccl.py"),
    ),
    "cluster/supervision/reconcile_plan.py": (
        "tests/cluster/test_reconcile_plan.py",
        "tests/cluster/test_supervisor.py",
    ),
    "cluster/state/job_journal.py": ("tests/cluster/test_job_journal.py",),
    "cluster/state/lease.py": ("tests/cluster/test_lease.py",),
    "cluster/state/registry.py": ("tests/cluster/test_registry.py", "tests/cluster/test_lease.py"),
    "services/worker_liveness.py": ("tests/router/test_worker_liveness.py", "tests/cluster/test_registry.py"),
    "services/decode/servicer.py": (
        *DECODED,
        *HANDOFF[:1],
        *SCORED_HERE,
        *FORGED[1:],
        *COUNTED,
        *TRACED,
        *ADAPTED,
        *STOPPED,
    ),
    "services/decode/decode_call.py": (*HANDOFF[:1], *DECODED[:2], *TRACED),
    "services/decode/request_cleanup.py": (*TRANSFERS, *HANDOFF[7:8]),
    "services/decode/remote_prefill.py": (*REMOTE, *TRACED),
    "services/decode/prefill_stream.py": REMOTE,
    "services/decode/link_probes.py": ("tests/journey/test_probes.py",),
    "services/prefill/servicer.py": (*HANDOFF[:4], *FORGED, *SCORED, *HANDOFF[4:], *COUNTED, *TRACED),
}

# (module, the line as it is, the line as it was changed): why no test can tell them apart.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (
        "cluster/state/registry.py",
        'async def changes_since(self, mark: tuple[str, int] = ("", 0)) -> RegistryChanges:',
        'async def changes_since(self, mark: tuple[str, int] = ("", -1)) -> RegistryChanges:',
    ): "no epoch is empty, so the number is not looked at",
    (
        "services/worker_liveness.py",
        "self._read_at = -math.inf  # when the latest successful read began",
        "self._read_at = not math.inf  # when the latest successful read began",
    ): "monotonic() is not negative",
    ("tandem/sampling.py", "top_p: float = 1.0", "top_p: float = 2.0"): "1 or more keeps every token",
    (
        "engine/core/scheduler.py",
        "self._count_overtaken([chunk for chunk in plan if chunk.sequence.num_uncomputed > 1])",
        "self._count_overtaken([chunk for chunk in plan if chunk.sequence.num_uncomputed != 1])",
    ): "what is planned has at least one token to compute",
    ("kvtransfer/sender.py", "self._generation = 0", "self._generation = 1"): "only that they differ is promised",
    (
        "kvtransfer/sender.py",
        "self._generation += 1",
        "self._generation += 2",
    ): "only that they differ is promised",
    (
        "kvtransfer/backends/reads.py",
        "stopped_at: float = 0.0",
        "stopped_at: float = 1.0",
    ): "read only after stop has set it",
    (
        "services/router/routing/placement.py",
        "decode_slowdown_limit: float = 2.0  # how many times as long as a step of one stream "
        "a step with prompts may take",
        "decode_slowdown_limit: float = 3.0  # how many times as long as a step of one stream "
        "a step with prompts may take",
    ): "the router always gives the setting's value",
    (
        "services/router/routing/placement.py",
        "mixed_step_floor_s: float = 0.0  # seconds that it may take even if the limit is less; 0: none",
        "mixed_step_floor_s: float = -1.0  # seconds that it may take even if the limit is less; 0: none",
    ): "less than no time is no time",
    (
        "services/router/routing/worker_table.py",
        "self._placements += 1",
        "self._placements += 2",
    ): "only the order of placements counts",
    (
        "services/router/routing/worker_table.py",
        "running: int = 0",
        "running: int = -1",
    ): "set to 0 by the first beat, before it is read",
    (
        "tandem/tenancy/tenant_slots.py",
        "elif not tenant or self._held[tenant] < self._most_each:",
        "elif not tenant or self._held[tenant] != self._most_each:",
    ): "nobody is given more than that",
    (
        "services/prefill/servicer.py",
        "yield prefill_pb2.PrefillResponse(ready=ready_to(ready, last=finished and end == final))",
        "yield prefill_pb2.PrefillResponse(ready=ready_to(ready, last=finished and end >= final))",
    ): "no part ends behind the last block",
    (
        "services/router/routing/waiting_request.py",
        "cached: Cached = lambda record: 0",
        "cached: Cached = lambda record: 1",
    ): "always given",
    ("kvtransfer/receiver.py", "self._reading_since = 0.0", "self._reading_since = 1.0"): "set before it is read",
    (
        "kvtransfer/sender.py",
        "self._generation = 0",
        "self._generation = -1",
    ): "only that they differ is promised",
    (
        "engine/core/step_retries.py",
        "self._parts.appendleft(Part(tuple(ids), 1))",
        "self._parts.appendleft(Part(tuple(ids), 2))",
    ): "after that shortage no step has more than one token",
    ("engine/core/sequence.py", "return range(0)", "return range( -1)"): "both are empty",
    (
        "services/router/execution/poison_requests.py",
        'of.update(len(part).to_bytes(8, "little"))',
        'of.update(len(part).to_bytes( 7, "little"))',
    ): "as unambiguous",
    (
        "services/router/routing/fair_queue.py",
        "if len(group.heap) > 2 * len(group.entries) + 16:",
        "if len(group.heap) > 3 * len(group.entries) + 16:",
    ): "when it is tidied is chosen and not promised",
    ("services/router/routing/path_latency.py", "break", "continue"): "the next round finds the same",
}
