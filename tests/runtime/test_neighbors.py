"""A process that stops counting, or ends by a failure, is named with its host; without an answer, process 0 is named."""

import logging
import threading
import time

import pytest

from moe_jax.runtime import neighbors


class Store:
    """A key-value store with the counts of two processes; only this one's changes."""

    def __init__(self):
        self.entries = {f"{neighbors.COUNTS}0": "first 5", f"{neighbors.COUNTS}1": "second 8"}
        self.closed = threading.Event()
        self.answers = threading.Event()
        self.answers.set()

    def key_value_set(self, key, value, allow_overwrite):
        self.answers.wait()
        if self.closed.is_set():
            raise neighbors.jax.errors.JaxRuntimeError("closed")
        self.entries[key] = value

    def key_value_dir_get(self, prefix):
        return list(self.entries.items())


@pytest.fixture
def store(monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "moe_jax")
    monkeypatch.setattr(neighbors, "PERIOD_SECONDS", 0.01)
    monkeypatch.setattr(neighbors, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(neighbors, "_named", threading.Event())
    monkeypatch.setattr(neighbors, "_ended", threading.Event())
    monkeypatch.setattr(neighbors, "_own", None)
    store = Store()
    yield store
    store.answers.set()
    store.closed.set()
    neighbors._ended.set()


def texts(caplog, count):
    deadline = time.monotonic() + 20
    while len(caplog.messages) < count and time.monotonic() < deadline:
        time.sleep(0.01)
    return sorted(caplog.messages)


def test_silent_processes_are_named_once(store, caplog):
    neighbors.watch(store, 2)
    neighbors.wait_for_a_name()
    expected = ["process 0 on host first: silent for 15 s", "process 1 on host second: silent for 15 s"]
    assert texts(caplog, 2) == expected
    time.sleep(0.1)
    assert sorted(caplog.messages) == expected


def test_a_failure_is_told_and_named(store, caplog, monkeypatch):
    monkeypatch.setattr(neighbors, "SILENT_SECONDS", 100.0)
    neighbors.report_end(1)
    assert store.entries[f"{neighbors.COUNTS}1"] == "second 8"
    neighbors.watch(store, 2)
    neighbors.report_end(7)
    assert store.entries[f"{neighbors.COUNTS}2"].endswith(" ended with status 7")
    monkeypatch.setattr(neighbors, "_ended", threading.Event())
    store.entries[f"{neighbors.COUNTS}1"] = "second ended with status 7"
    neighbors.watch(store, 3)
    neighbors.wait_for_a_name()
    assert "process 1 on host second: ended with status 7" in caplog.messages


def test_process_0_is_named_if_the_store_does_not_answer(store, caplog):
    neighbors.watch(store, 2)
    assert texts(caplog, 2)
    caplog.clear()
    store.answers.clear()
    assert texts(caplog, 1) == ["process 0 on host first: silent for 15 s"]
