"""The collector rests while libraries are imported, and works as before after that."""

import gc
import pickle
import subprocess
import sys
import weakref

import pytest

from slime_cua.core.startup import heavy_imports


@pytest.fixture(autouse=True)
def as_before():
    yield
    gc.unfreeze()
    gc.enable()


class Node:
    """May stand in a cycle."""

    def __init__(self):
        self.me = self


def test_no_collection_runs_in_the_block_and_what_it_made_is_not_walked_again():
    runs = []
    gc.callbacks.append(lambda phase, info: runs.append(phase))
    try:
        with heavy_imports():
            kept = [[n] for n in range(100_000)]
            assert not runs
        before = gc.get_freeze_count()
        assert before >= len(kept)
        assert not any(thing is kept for thing in gc.get_objects())
    finally:
        gc.callbacks.pop()


def test_cycles_made_after_the_block_are_found():
    with heavy_imports():
        pass
    assert gc.isenabled()
    node = weakref.ref(Node())
    gc.collect()
    assert node() is None


def test_a_process_that_had_switched_the_collector_off_keeps_it_off_and_an_error_passes():
    gc.disable()
    with pytest.raises(ImportError, match="no such library"), heavy_imports():
        raise ImportError("no such library")
    assert not gc.isenabled()


def test_the_driver_comes_without_torch():
    """Torch and transformers are a second of CPU and 200 MB each; trainer and engine have them in processes of their own."""
    program = (
        "import importlib, sys\n"
        "for name in 'train launch.session launch.loop launch.cold_start launch.canary launch.trainer_group launch.engines "
        "evaluation.arms trainer.publish_report observability.logger'.split():\n"
        "    importlib.import_module(f'slime_cua.{name}')\n"
        "print([name for name in ('torch', 'transformers', 'megatron', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.strip() == "[]"


def test_what_a_publish_reports_is_read_without_torch():
    from slime_cua.trainer.publisher import PublishReport

    report = PublishReport(1, 2, 3, "sum", ("http://a",), {}, {"pause": 0.1})
    program = "import pickle, sys\nprint(pickle.load(sys.stdin.buffer).engines, 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(report),
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.decode().strip() == "('http://a',) False"
