"""Ranks import Megatron without wandb, datasets and what these import; all of them are still there for who asks later."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, tempfile
if sys.argv[1:]:
    import wandb
import megatron_patches
megatron_patches.apply()
unused = [name for name in ("wandb", "datasets", "pandas", "pyarrow") if name in sys.modules]
from megatron.core.inference.contexts import dynamic_context
from mcore_bridge.utils import torch_utils
held = torch_utils.FileLock(tempfile.mktemp())
with held:
    is_locked = held.is_locked
import datasets.utils.filelock, wandb
print(json.dumps({
    "unused": unused,
    "have_wandb": dynamic_context.HAVE_WANDB,
    "is_locked": is_locked,
    "is_real": hasattr(wandb, "init") and hasattr(datasets, "load_dataset"),
    "is_that_of_datasets": issubclass(datasets.utils.filelock.FileLock, torch_utils.FileLock),
}))
"""


def said(*arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, timeout=240
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_megatron_is_imported_without_them_and_they_can_be_imported_afterwards():
    answer = said()
    assert answer["unused"] == [] and not answer["have_wandb"]
    assert answer["is_locked"] and answer["is_that_of_datasets"] and answer["is_real"]


def test_where_wandb_is_imported_already_megatron_has_it():
    answer = said("wandb")
    assert "wandb" in answer["unused"] and answer["have_wandb"] and answer["is_real"]
