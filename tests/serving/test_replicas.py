"""Where requests go, and what remains when a device fails, sleeps, or gets new weights; on devices that compute nothing."""

import collections
import threading
import time
from contextlib import contextmanager

import pytest

from moe_jax.kernels.attention.paged import PAGE_SIZE
from moe_jax.serving import loop
from moe_jax.serving.loop import QueueFull
from moe_jax.serving.request import EngineLimits
from tests.helpers.fake_device import expected_tokens
from tests.helpers.fake_replicas import replicas_of, request_of, submit
from tests.helpers.served import comes_true

SIZES = dict(max_sequences=4, max_tokens_per_step=300, max_length=600, num_pages=40, max_waiting=20)


@contextmanager
def running(count=2, size=1, **sizes):
    replicas, devices = replicas_of(EngineLimits(**SIZES | sizes, replicas=count), size)
    try:
        yield replicas, devices
    finally:
        replicas.close(drain=False)


def text(family, length=3 * PAGE_SIZE):
    return [(family + i * i) % 50 for i in range(length)]


def numbers_of(replicas):
    """Returns the number of sequences of each device."""
    return [loop.num_open for loop in replicas.loops]


def add_all(replicas, *requests):
    """Adds requests at once; returns their handles."""
    made = [request_of(replicas, *each) for each in requests]
    replicas.add([sequences for _, sequences in made], limited=False)
    return [handle for handle, _ in made]


def test_each_device_gets_its_share():
    with running(count=3) as (replicas, _):
        replicas.pause(True)
        handles = add_all(replicas, *([text(number, 50)] for number in range(9)))
        assert numbers_of(replicas) == [3, 3, 3]
        replicas.pause(False)
        assert [handle.result()[0].tokens for handle in handles] == [expected_tokens(text(n, 50), 5) for n in range(9)]
        assert all(stats.num_tokens == 15 for stats in replicas.stats_of_devices().values())
        assert replicas.stats().num_tokens == 45


def test_a_prompt_goes_where_its_pages_are():
    with running() as (replicas, _):
        first = add_all(replicas, [text(0)], [text(1)])
        assert [handle.result()[0].cached_tokens for handle in first] == [0, 0]
        # The other order: by load alone each would go to the other device.
        again = [submit(replicas, text(family)).result()[0] for family in (1, 0, 1)]
        assert [one.cached_tokens for one in again] == [2 * PAGE_SIZE] * 3
        assert [stats.num_tokens for stats in replicas.stats_of_devices().values()] == [10, 15]


def test_a_crowded_device_gets_no_more():
    with running(max_sequences=200, max_tokens_per_step=400, max_waiting=400, num_pages=1000) as (replicas, _):
        submit(replicas, text(0)).result()
        replicas.pause(True)
        add_all(replicas, *([text(0, 2 * PAGE_SIZE + 1)] for _ in range(150)))
        one, other = sorted(numbers_of(replicas))
        assert 64 < other <= 1.5 * one + 1


def test_a_request_is_bound_once_a_device_has_room():
    """A short request ends first on either device, and the one that waits gets its place."""
    for short in (0, 1):
        with running(max_sequences=1, max_length=60_000, num_pages=1000) as (replicas, _):
            replicas.pause(True)
            # The long one would end during a late start of the other device's thread, if it were not so long.
            add_all(replicas, *([text(number, 20), 1 if number == short else 50_000] for number in range(2)))
            late = submit(replicas, text(7, 20), 3)
            assert numbers_of(replicas) == [1, 1] and comes_true(lambda: replicas.stats().waiting == 3)
            replicas.pause(False)
            assert late.result()[0].tokens == expected_tokens(text(7, 20), 3)
            assert numbers_of(replicas)[1 - short] == 1


def test_a_request_waits_for_pages():
    """Each device has pages for one long text: the third one waits, with slots free."""
    with running(num_pages=8) as (replicas, _):
        replicas.pause(True)
        handles = [submit(replicas, text(number, 300), 100) for number in range(3)]
        assert numbers_of(replicas) == [1, 1]
        replicas.pause(False)
        assert all(handle.result()[0].finish_reason == "length" for handle in handles)
        assert replicas.stats().num_preemptions == 0


def test_continuations_stay_together_if_there_is_room():
    with running() as (replicas, _):
        replicas.pause(True)
        handle = submit(replicas, text(0), n=3)
        assert numbers_of(replicas) == [3, 0]
        # Four more fit on the other device, and one of six next to the three.
        more = [submit(replicas, text(1), n=6), submit(replicas, text(2), n=2)]
        assert numbers_of(replicas) == [4, 4] and comes_true(lambda: replicas.stats().waiting == 11)
        replicas.pause(False)
        for family, each in enumerate([handle, *more]):
            assert all(one.tokens == expected_tokens(text(family), 5) for one in each.result())


def test_groups_of_two_devices():
    """Each device of a group has its share and its own cache; if one fails, so do the requests of both, with their names."""
    with running(size=2) as (replicas, groups):
        assert replicas.capacity == 20 + 4 * 4
        replicas.pause(True)
        first = add_all(replicas, *([text(number)] for number in range(8)))
        shares = [collections.Counter(each.device for each in loop.opened) for loop in replicas.loops]
        assert shares == [{0: 2, 1: 2}] * 2
        replicas.pause(False)
        assert [handle.result()[0].tokens for handle in first] == [expected_tokens(text(number), 5) for number in range(8)]
        again = [submit(replicas, text(number)).result()[0] for number in reversed(range(8))]
        assert [one.cached_tokens for one in again] == [2 * PAGE_SIZE] * 8
        groups[1].error = ValueError("a defect")
        handles = add_all(replicas, *([text(number)] for number in range(8)))
        failures = [handle for handle in handles if fails(handle, "one of the engine's devices fake:2, fake:3 failed: ")]
        assert 0 < len(failures) <= 4
        assert submit(replicas, text(0)).result()[0].tokens == expected_tokens(text(0), 5)


def test_a_group_whose_step_never_ends(monkeypatch):
    """Its requests end with an error, the other group continues, and closing does not wait for it."""
    monkeypatch.setattr(loop, "LONGEST_STEP", 1.0)
    with running(size=2) as (replicas, groups):
        groups[1].hangs = threading.Event()
        handles = add_all(replicas, *([text(number)] for number in range(8)))
        message = "one of the engine's devices fake:2, fake:3 failed: TimeoutError: a step did not end within 1 seconds"
        assert 0 < sum(fails(handle, message) for handle in handles) <= 4
        assert submit(replicas, text(0)).result()[0].tokens == expected_tokens(text(0), 5)
    groups[1].hangs.set()
    assert comes_true(lambda: not any(each._thread.is_alive() for each in replicas.loops))


def fails(handle, message):
    """Returns True if a request ends with an error, which must have this message."""
    try:
        handle.result()
    except RuntimeError as error:
        assert str(error).startswith(message)
        return True
    return False


def test_a_full_queue_refuses():
    with running(max_sequences=1, max_waiting=2) as (replicas, _):
        assert replicas.capacity == 4
        replicas.pause(True)
        handles = [submit(replicas, [1, 2, 3]) for _ in range(4)]
        with pytest.raises(QueueFull, match="4 sequences run or wait; the engine has room for 0 more"):
            submit(replicas, [1, 2, 3])
        handles[3].abort()
        assert comes_true(lambda: replicas.stats().waiting == 3)
        assert handles[3].result()[0].finish_reason == "abort"
        submit(replicas, [1, 2, 3])


def test_a_failed_device_ends_its_requests_alone():
    with running() as (replicas, devices):
        replicas.pause(True)
        handles = add_all(replicas, *([text(number, 20)] for number in range(12)))
        bound = [{sequence.handle for sequence in loop.opened} for loop in replicas.loops]
        devices[1].error = ValueError("a defect")
        replicas.pause(False)
        for number, handle in enumerate(handles):
            if handle in bound[1]:
                with pytest.raises(RuntimeError, match="the engine's device fake:1 failed: ValueError: a defect"):
                    handle.result()
            else:
                assert handle.result()[0].tokens == expected_tokens(text(number, 20), 5)
        assert len(bound[1]) == 4 and not replicas.failed
        assert submit(replicas, text(3)).result()[0].tokens == expected_tokens(text(3), 5)
        stats = replicas.stats_of_devices()
        assert stats["fake:1"].free_pages == stats["fake:1"].running == 0
        assert replicas.stats().owned_pages == replicas.stats().running == 0


def test_requests_end_once_all_devices_have_failed():
    with running(max_sequences=1) as (replicas, devices):
        replicas.pause(True)
        handles = add_all(replicas, *([text(number, 20)] for number in range(6)))
        for device in devices:
            device.error = ValueError("a defect")
        replicas.pause(False)
        for handle in handles:
            with pytest.raises(RuntimeError, match=r"the engine's device fake:\d failed: ValueError: a defect"):
                handle.result()
        assert replicas.failed
        for call in (lambda: submit(replicas, [1]), lambda: replicas.pause(True), replicas.sleep, lambda: replicas.update(1)):
            with pytest.raises(RuntimeError, match="the engine's device fake:0 failed"):
                call()


def test_new_weights_come_to_all_devices_between_steps():
    """While one thread updates again and again, no request that starts later has an older version's tokens."""
    with running() as (replicas, devices):
        for version in range(1, 20):
            before = submit(replicas, text(version), 50)
            replicas.update(version)
            handles = add_all(replicas, *([text(number)] for number in range(4)))
            for number, handle in enumerate(handles):
                assert handle.result()[0].tokens == expected_tokens(text(number), 5, version)
                assert handle.result()[0].weights_version == version
            before.abort()
        assert [device.devices[0].version for device in devices] == [19, 19]
        assert replicas.stats().weights_version == 19


def test_a_device_without_the_new_weights_fails():
    with running() as (replicas, devices):
        devices[1].error_of_update = ValueError("no memory")
        with pytest.raises(RuntimeError, match="fake:1 got no new weights: ValueError: no memory"):
            replicas.update(1)
        assert comes_true(lambda: replicas.loops[1].failed)
        found = [submit(replicas, text(number)).result()[0].tokens for number in range(3)]
        assert found == [expected_tokens(text(number), 5, 1) for number in range(3)]


def test_deleted_weights_end_requests_where_they_are_shared():
    with running() as (replicas, devices):
        replicas.pause(True)
        handles = add_all(replicas, *([text(number, 20)] for number in range(2)))
        devices[0].weights_are_deleted = True
        replicas.pause(False)
        with pytest.raises(RuntimeError, match=r"call engine.update\(model\)"):
            handles[0].result()
        assert handles[1].result()[0].tokens == expected_tokens(text(1, 20), 5)
        with pytest.raises(RuntimeError, match=r"call engine.update\(model\)"):
            submit(replicas, [1])
        replicas.update(1)
        assert submit(replicas, [1]).result()[0].tokens == expected_tokens([1], 5, 1)


def test_all_devices_sleep_or_none():
    with running(max_sequences=1) as (replicas, devices):
        replicas.pause(True)
        handles = [submit(replicas, text(number, 20)) for number in range(5)]
        with pytest.raises(RuntimeError, match="an engine sleeps only without requests; 5 sequences run or wait"):
            replicas.sleep()
        assert not any(device.asleep for device in devices)
        replicas.pause(False)
        assert all(handle.result() for handle in handles)
        assert comes_true(lambda: numbers_of(replicas) == [0, 0])
        replicas.sleep()
        assert all(device.asleep for device in devices)
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            submit(replicas, [1])
        replicas.update(1)
        assert submit(replicas, [1]).result()[0].tokens == expected_tokens([1], 5, 1)


@pytest.mark.parametrize("drain", [True, False])
def test_closing(drain):
    """Requests that wait end too: after their last token, or at once. A pause holds nothing then."""
    with running(max_sequences=1) as (replicas, _):
        replicas.pause(True)
        handles = [submit(replicas, text(number, 20)) for number in range(6)]
        closing = threading.Thread(target=replicas.close, kwargs=dict(drain=drain), daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        assert {handle.result()[0].finish_reason for handle in handles} == {"length" if drain else "abort"}
        for call in (lambda: submit(replicas, [1]), lambda: replicas.pause(True), lambda: replicas.update(1)):
            with pytest.raises(RuntimeError, match="the engine is closed"):
                call()


def test_two_callers_never_hold_each_other():
    with running(count=3) as (replicas, _):

        def turn():
            for number in range(50):
                replicas.pause(bool(number % 2))
                replicas.update(number)

        threads = [threading.Thread(target=turn, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        handles = [submit(replicas, text(number, 20)) for number in range(10)]
        end = time.monotonic() + 30
        for thread in threads:
            thread.join(end - time.monotonic())
        assert not any(thread.is_alive() for thread in threads)
        replicas.pause(False)
        assert all(handle.result()[0].finish_reason == "length" for handle in handles)
