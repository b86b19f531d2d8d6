"""The scheduler half against a recording manager."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from vllm_tiered_offload.contract.jobs import LookupResult
from vllm_tiered_offload.contract.lifecycle import InvalidTransition
from vllm_tiered_offload.contract.messages import JobAck, WorkerReport
from vllm_tiered_offload.scheduler.scheduler import Role

from .harness import BLOCK, Half


def stored_and_resident(half: Half, req_id: str, num_tokens: int, ranks: Sequence[int] = (0,)) -> None:
    """A request that computed and stored everything, and is gone."""
    request = half.add(req_id, num_tokens)
    message = half.start(request, num_tokens)
    half.ack(message, ranks=ranks)
    request.append(-1)
    half.finish(request)
    half.ack(half.step(), ranks=ranks)


def test_a_step_stores_the_chunks_it_completes() -> None:
    half = Half()
    request = half.add("a", 10)
    first = half.start(request, 6)
    assert [len(job.transfers[0].rows) for job in first.stores] == [1]
    second = half.step({request: 4})
    assert [job.transfers[0].device_block_ids for job in second.stores] == [[half.tables["a"][1].block_id]]
    half.ack(first, second)
    half.finish(request)
    half.ack(half.step())
    half.assert_empty()


def test_stored_blocks_stay_pinned_until_every_rank_acknowledged() -> None:
    """D2. A report that comes twice (vLLM 0.33 replays a failed worker's last one) is one rank's still.

    Mutation: unpinning on the first acknowledgement makes the second assertion fail, counting them the third; adding
    up the bits instead of joining them leaves the job open.
    """
    half = Half(ranks=2)
    request = half.add("a", 8)
    message = half.start(request, 8)
    half.finish(request)
    assert half.pool.get_num_free_blocks() == 62
    half.ack(message, ranks=[0])
    assert half.pool.get_num_free_blocks() == 62
    half.ack(message, ranks=[0])
    assert half.pool.get_num_free_blocks() == 62
    half.ack(message, ranks=[1])
    half.step()
    half.assert_empty()
    half.ack(message, ranks=[1])
    half.assert_empty()


def test_final_store_comes_before_the_finish_signal() -> None:
    """Cases 1 and 5: in async scheduling the hashes of the last computed chunk are known only when the request ends."""
    half = Half()
    request = half.add("a", 7)
    half.ack(half.start(request, 7))
    half.step({request: 1})  # token 8 is in flight: not known, not hashed
    request.append(100)
    request.append(101)
    half.finish(request)
    taken = half.pool.take(half.pool.get_num_free_blocks())  # others take everything that vLLM freed
    message = half.step()
    assert [len(job.transfers[0].rows) for job in message.stores] == [1]
    stored = message.stores[0].transfers[0].device_block_ids
    assert not {block.block_id for block in taken} & set(stored)
    assert half.manager.of("a")[-2:] == ["prepare_store", "on_request_finished"]
    half.pool.free_blocks(taken)
    half.ack(message)
    half.assert_empty()


def test_no_submit_after_the_finish_signal() -> None:
    """Case 2: stores submitted but not completed; finish; then complete."""
    half = Half()
    request = half.add("a", 8)
    message = half.start(request, 8)
    half.finish(request)
    half.step()
    calls = half.manager.of("a")
    assert calls[-1] == "on_request_finished"
    half.ack(message)
    assert half.manager.of("a") == calls
    half.assert_empty()


@pytest.mark.parametrize("state", ["never asked", "asked", "answered"])
def test_abort_while_waiting(state: str) -> None:
    """Case 3: one signal, no job, no state left."""
    half = Half()
    stored_and_resident(half, "warm", 9)
    request = half.add("a", 9)
    if state == "asked":
        half.manager.answers = dict.fromkeys(half.manager.resident, LookupResult.RETRY)
        assert half.ask(request) == (None, False)
    elif state == "answered":
        assert half.ask(request) == (8, True)
    half.finish(request, aborted=True)
    message = half.step()
    assert not message.loads
    assert not message.stores
    half.assert_empty()


def test_generation_that_ends_on_a_block_boundary() -> None:
    """Case 4: 5 prompt + 3 sampled tokens: only one block was written by a forward pass."""
    half = Half()
    request = half.add("a", 5)
    messages = [half.start(request, 5)]
    for token in (100, 101):
        request.append(token)
        messages.append(half.step({request: 1}))
    request.append(102)
    half.finish(request)
    messages.append(half.step())
    assert sum(len(job.transfers[0].rows) for message in messages for job in message.stores) == 1
    half.ack(*messages)
    half.assert_empty()


def test_readmission_with_own_stores_in_flight_asks_again() -> None:
    """Case 6: 56 tokens, stores never completed, preempted and re-admitted: ask again, within a bound."""
    half = Half()
    request = half.add("a", 56)
    message = half.start(request, 56)
    half.preempt(request)
    half.step()
    request.append(1000)
    assert half.ask(request) == (None, False)
    half.clock.advance(0.5)
    assert half.ask(request) == (None, False)
    half.ack(message)
    assert half.ask(request) == (56, True)
    half.clock.advance(2.0)
    half.step()
    half.finish(request, aborted=True)
    half.step()
    half.assert_empty()


def test_readmission_stops_waiting() -> None:
    """Case 25: the store never ends; the request does not wait for ever."""
    half = Half()
    request = half.add("a", 56)
    message = half.start(request, 56)
    half.preempt(request)
    half.step()
    request.append(1000)
    assert half.ask(request) == (None, False)
    half.clock.advance(1.0)
    assert half.ask(request) == (0, False)
    half.finish(request, aborted=True)
    half.step()
    half.ack(message)
    half.assert_empty()


@pytest.mark.parametrize("order", ["load first", "store first", "together"])
def test_abort_with_jobs_in_flight(order: str) -> None:
    """Case 8: load and store of one request pending, aborted, completed in all orders."""
    half = Half()
    stored_and_resident(half, "warm", 8)
    request = half.add("a", 13)
    assert half.ask(request) == (8, True)
    half.allocate(request, 8, external=8)
    load = half.step()
    half.ack(load)
    request.num_computed_tokens = 8
    half.allocate(request, 13)
    store = half.step({request: 5})
    assert store.stores
    half.preempt(request)
    half.step()
    assert half.ask(request) == (None, False)  # its own store is pending behind the resident prefix
    half.clock.advance(1.5)
    assert half.ask(request) == (8, True)
    half.allocate(request, 8, external=8)
    request.num_computed_tokens = 8
    again = half.step()
    half.finish(request, aborted=True)
    half.step()
    if order == "together":
        half.ack(store, again)
    else:
        for message in (again, store) if order == "load first" else (store, again):
            half.ack(message)
    half.ack(store, again)  # a late second acknowledgement changes nothing
    half.assert_empty()


def test_a_neighbours_unfinished_load_is_never_stored() -> None:
    """Case 10: another connector fills the blocks; aborted meanwhile. Mirror: a cold request is stored."""
    half = Half()
    request = half.add("a", 17)
    assert half.ask(request) == (0, False)
    half.allocate(request, 16)
    request.num_computed_tokens = 16  # vLLM counts the neighbour's load from its start
    assert not half.step().stores
    half.finish(request, aborted=True)
    assert not half.step().stores
    half.assert_empty()
    cold = half.add("b", 17)
    message = half.start(cold, 17)
    assert len(message.stores[0].transfers[0].rows) == 4
    half.ack(message)
    half.finish(cold)
    half.step()
    half.assert_empty()


def test_stores_over_blocks_that_a_neighbour_failed_to_load_do_not_count() -> None:
    """D1: a synchronous neighbour reports invalid blocks with the very step that stored what was computed on them."""
    half = Half()
    request = half.add("a", 12)
    message = half.start(request, 12)
    request.num_computed_tokens = 4
    half.inner.update_connector_output(None, invalid_block_ids={half.tables["a"][1].block_id})
    half.ack(message)
    assert not half.manager.resident
    again = half.step({request: 8})
    assert len(again.stores[0].transfers[0].rows) == 2
    half.ack(again)
    half.finish(request)
    half.step()
    half.assert_empty()


def test_pending_work_is_bounded_by_the_job_timeout() -> None:
    """Case 13, V5: pending until drained or overdue, then not; what the job holds stays held."""
    half = Half(job_timeout=30.0)
    request = half.add("a", 8)
    message = half.start(request, 8)
    half.finish(request)
    half.step()
    assert half.inner.has_pending_work()
    half.clock.advance(30.0)
    assert not half.inner.has_pending_work()
    assert half.inner.num_pinned_blocks == 2
    half.ack(message)
    half.assert_empty()


def test_declined_chunks_are_offered_again_after_progress_only() -> None:
    """Case 15: no room during three prefill steps, then room: contiguous, bounded retries."""
    half = Half(room=0)
    request = half.add("a", 33)
    half.start(request, 8)
    half.step({request: 8})
    assert half.manager.of("a").count("prepare_store") == 2
    half.step({request: 1})
    assert half.manager.of("a").count("prepare_store") == 2
    half.manager.room = 100
    message = half.step({request: 8})
    assert len(message.stores[0].transfers[0].rows) == 6
    half.ack(message)
    half.finish(request)
    half.ack(half.step())
    half.assert_empty()


def test_a_declined_range_is_given_up_at_last() -> None:
    half = Half(room=0, max_store_offers=3)
    request = half.add("a", 40)
    half.start(request, 4)
    for _ in range(8):
        half.step({request: 4})
    assert half.manager.of("a").count("prepare_store") == 3


def test_pins_never_exceed_their_share_of_the_pool() -> None:
    """D2: 17 device blocks, at most a quarter of the 16 usable ones."""
    half = Half(device_blocks=17, max_pinned_device_share=0.25)
    request = half.add("a", 40)
    first = half.start(request, 40)
    assert len(first.stores[0].transfers[0].rows) == 4
    assert half.inner.num_pinned_blocks == 4
    half.finish(request)
    half.step()
    half.ack(first)
    half.assert_empty()


def test_waiting_for_pins_is_worth_it_only_when_they_hold_memory() -> None:
    half = Half()
    request = half.add("a", 8)
    message = half.start(request, 8)
    assert not half.inner.has_pending_block_frees()  # the request itself holds the blocks
    half.finish(request)
    assert half.inner.has_pending_block_frees()
    half.ack(message)
    assert not half.inner.has_pending_block_frees()


def test_a_load_comes_from_token_counts_and_skips_sub_blocks() -> None:
    """Case 23: chunk = 4 device blocks, 3 chunks stored, device keeps 5 blocks: one sub-block of chunk 1 is skipped."""
    half = Half(blocks_per_chunk=4)
    stored_and_resident(half, "warm", 48)
    request = half.add("a", 49)
    half.tables["a"] += half.pool.take(5)
    assert half.ask(request, local=20) == (28, True)
    half.allocate(request, 48, external=28)
    (job,) = half.step().loads
    (transfer,) = job.transfers
    assert transfer.first_sub_block == 1
    assert len(transfer.rows) == 2
    assert transfer.device_block_ids == [block.block_id for block in half.tables["a"][5:12]]


def test_hits_that_vllm_does_not_take_are_released_in_the_same_step() -> None:
    """D8: another connector was chosen, or nothing could be allocated."""
    half = Half()
    stored_and_resident(half, "warm", 9)
    request = half.add("a", 9)
    assert half.ask(request) == (8, True)
    assert half.manager.loading == 1
    assert not half.step().loads
    assert half.manager.loading == 0


def test_failed_load_makes_its_keys_misses() -> None:
    """D7: they are misses before the request is looked up again."""
    half = Half()
    stored_and_resident(half, "warm", 9)
    request = half.add("a", 9)
    assert half.ask(request) == (8, True)
    half.allocate(request, 8, external=8)
    half.ack(half.step(), error="no luck")
    assert half.ask(request) == (0, False)
    assert len(half.manager.failed) == 2


def test_after_a_failed_load_the_request_is_recomputed() -> None:
    """D7, V1: no second load, whoever's the first was; a preemption ends that.

    Mutation: offering another load lets vLLM wait for ever in a small pool (the simulator's seed 1, episode 36).
    """
    half = Half()
    stored_and_resident(half, "warm", 9)
    request = half.add("a", 9)
    assert half.ask(request) == (8, True)
    half.step()
    half.inner.update_connector_output(None, failed_req_ids={"a", "somebody else's"})
    assert half.ask(request) == (0, False)
    half.preempt(request)
    half.step()
    assert half.ask(request) == (8, True)


def test_a_promised_load_without_rows_fails_instead_of_hanging() -> None:
    """L7: vLLM waits for a load that we cannot make; the workers report it as failed."""
    half = Half(lifecycle="tolerant")
    request = half.add("a", 9)
    assert half.ask(request) == (0, False)
    half.allocate(request, 8, external=8)
    message = half.step()
    assert message.cancelled_loads == [job.job_id for job in message.loads]
    half.ack(message, error="cancelled")
    half.finish(request, aborted=True)
    half.step()
    half.assert_empty()


def test_reset_during_load_store_and_finish() -> None:
    """Case 14, L6: loads end as failed receives, late completions change nothing, finished requests are signalled."""
    half = Half()
    stored_and_resident(half, "warm", 9)
    loading = half.add("a", 9)
    assert half.ask(loading) == (8, True)
    half.allocate(loading, 8, external=8)
    loading.num_computed_tokens = 8
    load = half.step()
    running = half.add("b", 8, first_token=50)
    store = half.start(running, 8)
    half.finish(running)
    half.inner.reset_cache()
    assert half.manager.of("b")[-1] == "on_request_finished"
    message = half.step()
    assert message.cancelled_loads == [load.loads[0].job_id]
    assert not message.stores
    half.ack(load, store, error="cancelled")
    half.finish(loading, aborted=True)
    half.step()
    half.assert_empty()


def test_a_request_active_at_a_reset_offers_nothing_until_it_restarts() -> None:
    """L6: its later slots attend to stale ones."""
    half = Half()
    request = half.add("a", 30)
    first = half.start(request, 8)
    half.inner.reset_cache()
    assert not half.step({request: 8}).stores
    half.ack(first)
    half.preempt(request)
    half.step()
    again = half.start(request, 16)
    assert len(again.stores[0].transfers[0].rows) == 4
    half.ack(again)
    half.finish(request, aborted=True)
    half.ack(half.step())
    half.assert_empty()


def test_after_a_failed_reset_of_vllm_device_hits_are_not_built_upon() -> None:
    """L6: the device cache still serves what it had before the reset; nothing computed on it may be stored."""
    half = Half()
    keeper = half.add("keeper", 8)
    message = half.start(keeper, 8)
    half.inner.reset_cache()
    request = half.add("a", 16)
    half.tables["a"] += half.pool.take(1)
    assert half.ask(request, local=4) == (0, False)
    half.allocate(request, 16)
    request.num_computed_tokens = 4
    assert not half.step({request: 12}).stores
    half.ack(message)


def test_the_same_request_id_again() -> None:
    """A finished request's id comes back before the step that reports it: the old one is finalised first (L1)."""
    half = Half()
    request = half.add("a", 8)
    first = half.start(request, 8)
    half.finish(request)
    again = half.add("a", 8)
    assert half.manager.of("a")[-2:] == ["on_request_finished", "on_new_request"]
    message = half.step()
    half.ack(first, message)
    half.finish(again, aborted=True)
    half.step()
    half.assert_empty()


def test_streaming_session_whose_hashes_shrink() -> None:
    """The session's last sampled token is discarded and other tokens follow: keys follow the live hashes."""
    half = Half()
    request = half.add("a", 8)
    half.ack(half.start(request, 8))
    old = set(half.manager.resident)
    del request.tokens[4:], request.block_hashes[1:]
    request.tokens += [7, 7, 7, 7, 7, 7, 7, 7]
    request.hash_blocks()
    request.num_computed_tokens = 4
    half.ack(half.step({request: 8}))
    assert len(half.manager.resident - old) == 1  # chunk 1 of the old session counts as offered; chunk 2 is new


def test_a_session_that_went_another_way_does_not_find_its_old_chunks() -> None:
    """D5: the list of hashes is long enough again, but others stand in it now.

    Mutation: keeping a chunk's key while there are hashes for it answers (8, True), with the old session's KV.
    """
    half = Half()
    stored_and_resident(half, "warm", 9)
    request = half.add("a", 9)
    assert half.ask(request) == (8, True)
    del request.tokens[4:], request.block_hashes[1:]
    request.tokens += [7, 7, 7, 7, 7]
    request.hash_blocks()
    half.step()
    assert half.ask(request) == (4, True)


def test_skip_reading_prefix_cache_is_answered_without_a_lookup() -> None:
    half = Half()
    stored_and_resident(half, "warm", 9)
    request = half.add("a", 9, skip_reading_prefix_cache=True)
    assert half.ask(request) == (0, False)
    assert "lookup" not in half.manager.of("a")


def test_request_limits() -> None:
    half = Half()
    stored_and_resident(half, "warm", 33)
    request = half.add("a", 33, kv_transfer_params={"max_load_tokens": 9, "max_offload_tokens": "many"})
    assert half.ask(request) == (8, True)
    limited = half.add("b", 33, first_token=500, kv_transfer_params={"max_offload_tokens": 9})
    message = half.start(limited, 33)
    assert len(message.stores[0].transfers[0].rows) == 2


def test_offload_prompt_only() -> None:
    half = Half(offload_prompt_only=True)
    request = half.add("a", 7)
    message = half.start(request, 7)
    assert len(message.stores[0].transfers[0].rows) == 1
    for token in range(100, 110):
        request.append(token)
        assert not half.step({request: 1}).stores


def test_roles() -> None:
    """kv_producer stores only, kv_consumer loads only."""
    half = Half(role=Role(stores=False, loads=True))
    assert not half.start(half.add("a", 8), 8).stores
    producer = Half(role=Role(stores=True, loads=False))
    stored_and_resident(producer, "warm", 9)
    assert producer.ask(producer.add("a", 9)) == (0, False)


def test_lookups_wait_for_the_region_within_a_bound() -> None:
    half = Half(bind=False, region_timeout=5.0)
    request = half.add("a", 9)
    assert half.ask(request) == (None, False)
    half.clock.advance(5.0)
    assert half.ask(request) == (0, False)
    half.allocate(request, 9)
    assert not half.step({request: 9}).stores
    half.announce()
    request.append(1)
    message = half.step({request: 3})
    assert len(message.stores[0].transfers[0].rows) == 2  # offered as soon as there is somewhere to go


def test_prefix_hits_are_touched_once_an_admission() -> None:
    """V6: what the device already had counts as used, too."""
    half = Half()
    stored_and_resident(half, "warm", 17)
    request = half.add("a", 17)
    half.tables["a"] += half.pool.take(2)
    assert half.ask(request, local=8) == (8, True)
    half.allocate(request, 16, external=8)
    request.num_computed_tokens = 16
    half.allocate(request, 17)
    assert [len(keys) for keys in half.manager.touched if keys] == [4]


def test_one_load_serves_all_who_wait_for_the_same_prefix() -> None:
    """Case 29: fifty requests on one prefix, device empty: one load; the others find it on the device afterwards.

    Mutation: without the question to `is_loading` every request is answered (16, True).
    """
    half = Half()
    stored_and_resident(half, "warm", 17)
    first = half.add("first", 17)
    assert half.ask(first) == (16, True)
    half.allocate(first, 16, external=16)
    others = [half.add(f"other{index}", 17) for index in range(49)]
    assert {half.ask(other) for other in others} == {(None, False)}
    half.ack(half.step())
    assert half.ask(others[0], local=16) == (0, False)
    assert half.ask(others[1]) == (16, True)  # pushed out again meanwhile: it may load for itself


def test_waiting_for_another_load_is_bounded() -> None:
    """V1: the load hangs; the other request starts one of its own."""
    half = Half()
    stored_and_resident(half, "warm", 17)
    first, other = half.add("first", 17), half.add("other", 17)
    assert half.ask(first) == (16, True)
    half.allocate(first, 16, external=16)
    assert half.ask(other) == (None, False)
    half.clock.advance(1.0)
    assert half.ask(other) == (16, True)


class BrokenManagerError(RuntimeError):
    pass


@pytest.mark.parametrize("method", ["lookup", "prepare_load", "prepare_stores"])
def test_a_broken_manager_costs_the_request_its_offloading(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L7: tolerant skips the request with a counter; strict raises."""

    def broken(*args: object) -> None:
        raise BrokenManagerError

    for lifecycle in ("tolerant", "strict"):
        half = Half(lifecycle=lifecycle)
        stored_and_resident(half, "warm", 9)
        monkeypatch.setattr(half.manager, method, broken)
        request = half.add("a", 17)

        def run(half: Half = half, request: object = request) -> None:
            half.ask(request)  # type: ignore[arg-type]
            half.allocate(request, 17)  # type: ignore[arg-type]
            assert not half.step({request: 17}).stores or method == "lookup"  # type: ignore[dict-item]

        if lifecycle == "strict":
            with pytest.raises(BrokenManagerError):
                run()
        else:
            run()
            stats = half.inner.take_stats()
            assert stats is not None
            assert stats.counters["lifecycle_violations_total"] == 1
            half.finish(request, aborted=True)
            half.step()
            assert half.manager.of("a")[-1] == "on_request_finished"


def test_the_lifecycle_table_refuses_a_second_finish() -> None:
    half = Half()
    request = half.add("a", 8)
    half.finish(request, aborted=True)
    half.inner.request_finished(request, aborted=True)  # vLLM never does; must not matter
    half.step()
    assert half.manager.of("a").count("on_request_finished") == 1
    with pytest.raises(InvalidTransition, match="history: finish"):
        raise InvalidTransition("a", *_last_transition())


def _last_transition() -> tuple:
    from vllm_tiered_offload.contract.lifecycle import Event, Phase

    return Phase.FINISHING, Event.FINISH, ["finish"]


def test_a_request_of_one_block_is_never_offered_twice() -> None:
    half = Half()
    request = half.add("a", BLOCK)
    half.ack(half.start(request, BLOCK))
    for token in range(3):
        request.append(100 + token)
        assert not half.step({request: 1}).stores


def test_what_one_step_stores_is_one_job() -> None:
    """Blocks of all requests, the last ones of a finished request first; each request's chunks count for itself."""
    half = Half(room=5)
    over, first, second = half.add("over", 7), half.add("a", 12, 100), half.add("b", 12, 200)
    half.ack(half.start(over, 7))
    half.step({over: 1})
    over.append(300)
    over_block = half.tables["over"][1].block_id
    half.finish(over, aborted=True)
    for request in (first, second):
        half.ask(request)
        half.allocate(request, 12)
    message = half.step({first: 12, second: 12})
    (job,) = message.stores
    blocks = [block.block_id for name in ("a", "b") for block in half.tables[name]]
    assert job.transfers[0].device_block_ids == [over_block, *blocks[:3]]
    half.ack(message)
    assert half.inner._requests["a"].next_chunk == 3
    assert half.inner._requests["b"].next_chunk == 0
    half.finish(first, aborted=True)
    half.finish(second, aborted=True)
    half.ack(half.step())
    half.assert_empty()


def test_a_failed_load_of_another_connector_spoils_one_request_of_a_job() -> None:
    """D1, case 10: the chunks of the others in the same store job count.

    Mutation: failing the whole job leaves nothing resident.
    """
    half = Half()
    good, bad = half.add("good", 9), half.add("bad", 9, 100)
    for request in (good, bad):
        half.ask(request)
        half.allocate(request, 9)
    message = half.step({good: 9, bad: 9})
    bad.num_computed_tokens = 0
    half.inner.update_connector_output(None, {half.tables["bad"][0].block_id}, ())
    half.ack(message)
    assert len(half.manager.resident) == 2
    assert len(half.manager.failed) == 0
    for request in (good, bad):
        half.finish(request, aborted=True)
    half.ack(half.step())
    half.assert_empty()


@pytest.mark.parametrize(
    ("setting", "in_place", "stores", "memory_only"),
    [
        ("memory", False, True, True),
        ("everywhere", False, True, False),
        ("off", False, False, False),
        ("memory", True, False, False),
        ("everywhere", True, False, False),
    ],
)
def test_where_chunks_of_an_adapter_may_go(setting: str, in_place: bool, stores: bool, memory_only: bool) -> None:
    """Case 46: vLLM's hashes do not tell an adapter's weights, and one reloaded in place keeps its name and path."""
    half = Half(lora=setting)
    lora = SimpleNamespace(lora_name="x", lora_path="/x", load_inplace=in_place)
    request = half.add("a", 17, lora_request=lora)
    assert half.inner._requests["a"].ctx.memory_only is memory_only
    message = half.start(request, 17)
    assert bool(message.stores) is stores
    half.ack(message)
    assert ("lookup" in half.manager.of("a")) is stores
    half.finish(request, aborted=True)
    half.ack(half.step())
    half.assert_empty()


def test_a_broken_copy_engine_ends_offloading_but_not_serving(caplog: pytest.LogCaptureFixture) -> None:
    """Case 42: what is in flight ends, nothing new is begun; said once. Two ranks; one of them broke.

    Mutation: a scheduler half that is not told plans loads that can only fail, one for each later hit.
    """
    half = Half(ranks=2)
    stored_and_resident(half, "warm", 17, ranks=(0, 1))
    request = half.add("a", 17)
    assert half.ask(request) == (16, True)
    half.allocate(request, 16, external=16)
    message = half.step()
    for _ in range(2):
        acks = {job.job_id: JobAck(0b11, "broken") for job in message.loads}
        half.inner.update_connector_output(WorkerReport(acks).merge(WorkerReport(broken="device lost")))
    other = half.add("b", 17)
    assert half.ask(other) == (0, False)
    half.allocate(other, 17)
    assert not half.step({other: 17}).stores
    assert caplog.text.count("nothing is loaded or stored any more") == 1
    stats = half.inner.take_stats()
    assert stats is not None
    assert stats.gauges["copy_engine_broken"] == 1
    for one in (request, other):
        half.finish(one, aborted=True)
    half.step()
    half.assert_empty()


def test_what_lies_behind_a_chunk_on_its_way_is_asked_for_meanwhile() -> None:
    """The first chunk is being brought back while a tier still looks for the rest: it is asked again, so that the rest
    follows at once and not one disk access later. Once all is known, only the one that is waited for is asked about.

    Mutation: asking about the pending chunk alone from the first pass on.
    """
    half = Half()
    request = half.add("a", 13)
    keys = half.inner._requests["a"].keys[0].slice(0, 3)
    half.manager.answers = {keys[0]: LookupResult.HIT_PENDING, keys[1]: LookupResult.RETRY, keys[2]: LookupResult.RETRY}
    asked: list[int] = []
    lookup = half.manager.lookup
    half.manager.lookup = lambda keys, ctx: (asked.append(len(keys)), lookup(keys, ctx))[1]  # type: ignore[method-assign]
    assert half.ask(request) == (None, False)
    assert half.ask(request) == (None, False)
    half.manager.answers = dict.fromkeys(keys, LookupResult.HIT_PENDING)
    for _ in range(3):
        assert half.ask(request) == (None, False)
    assert asked == [1, 3, 1, 3, 1, 3, 1, 1]  # each time the first one alone, before the rest
