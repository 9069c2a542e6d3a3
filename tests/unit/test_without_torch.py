"""A process that only tokenises does not import torch: the same ids, and torch is still there for who asks later.

Independent truth: the same calls in a process where transformers has torch.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.renderer.without_torch import runs_own_code
from slime_cua.config.rollout import ActionSpaceConfig, ContextConfig, RolloutConfig

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import contextlib, json, sys
from rollout.actions import ActionSpace
from rollout.renderer import Renderer
from rollout.renderer.without_torch import transformers_without_torch

with transformers_without_torch() if sys.argv[1] == "without" else contextlib.nullcontext():
    renderer = Renderer("models/tiny_base", ActionSpace())
texts = ["press button 3.", "  caf\\u00e9 \\u4f60\\u597d\\n\\n<tool_call>{}</tool_call> <|image_pad|>", "", "a\\tb  c"]
answer = {
    "tokenizer": type(renderer.tokenizer).__name__,
    "ids": [renderer.ids_of_text(text) for text in texts],
    "answer": renderer.answer_ids("done"),
    "template": renderer.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "go"}]}], tokenize=False
    ),
    "stop": sorted(renderer.stop_ids),
    "has_torch": "torch" in sys.modules,
}
import torch
answer["sum"] = float(torch.ones(3).sum())
print(json.dumps(answer))
"""


@pytest.fixture(scope="module")
def answers():
    found = {}
    for way in ("with", "without"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, way],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        found[way] = json.loads(done.stdout)
        assert "PyTorch was not found" not in done.stderr
    return found


def test_the_tokenizer_is_the_same_one(answers):
    with_it, without = (
        {k: v for k, v in answers[way].items() if k != "has_torch"} for way in ("with", "without")
    )
    assert without == with_it
    assert sum(map(len, without["ids"])) > 20


def test_torch_is_imported_only_when_somebody_asks_for_it(answers):
    assert answers["with"]["has_torch"] and not answers["without"]["has_torch"]
    assert answers["without"]["sum"] == 3.0


@pytest.mark.parametrize(
    ("config", "is_own"),
    [
        (RolloutConfig(), False),
        (RolloutConfig(context=ContextConfig(name="mine.policies:Window")), True),
        (
            RolloutConfig(
                action_space=ActionSpaceConfig(actions=("gui", "mcp"), mcp_server="http://127.0.0.1:80/mcp")
            ),
            False,
        ),
        (
            RolloutConfig(
                action_space=ActionSpaceConfig(actions=("gui", "mcp"), mcp_server="mine.tools:Server")
            ),
            True,
        ),
        (
            RolloutConfig(
                action_space=ActionSpaceConfig(actions=("gui", "skill"), skill_library="mine.skills:Clip")
            ),
            True,
        ),
    ],
)
def test_where_a_class_of_the_users_runs_torch_stays_in_reach(config, is_own):
    assert runs_own_code(config) == is_own
