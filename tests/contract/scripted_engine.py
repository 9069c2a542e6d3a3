"""A policy server that answers actions by seed: SGLang's /generate over HTTP, with pauses that abort and deaths that answer nothing."""

from __future__ import annotations

import base64
import random
import threading
import time
from typing import Any

from rollout.actions import format_action
from rollout.engines import image_ref
from rollout.renderer import Renderer
from slime_cua.core.actions import GuiAction, TerminateAction
from slime_cua.core.coordinates import Point
from slime_cua.data.expand import expand_image_placeholders
from tests.unit.scripted_server import ScriptedServer

LOGP = -1.0


class ScriptedEngine(ScriptedServer):
    """Says what to click for a turn or two, sometimes nonsense, then how the task ended. Same prompt, same answer."""

    def __init__(self, renderer: Renderer, seed: int) -> None:
        super().__init__()
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self._renderer, self._seed = renderer, seed
        self.version = 0
        self.is_dead = False
        self._goes_on = threading.Event()
        self._goes_on.set()
        self._cut: dict[str, tuple[int, ...]] = {}
        """Session -> what an aborted turn still wanted to say."""
        self.num_aborted = 0

    def pause(self) -> None:
        """Requests that run end with half of what they have to say; new ones wait."""
        self._goes_on.clear()

    def go_on(self, version: int) -> None:
        self.version = version
        self._goes_on.set()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self._live_or_vanish()
        version = self.version
        if not self._goes_on.wait(timeout=20.0):
            return 503, {"error": "paused for good"}
        version, session, ids = self.version, body["routing_key"], body["input_ids"]
        refs = [image_ref(base64.b64decode(image)) for image in body.get("image_data", [])]
        num_prompt = len(expand_image_placeholders(ids, refs, self._renderer.images))
        say, reason = self._cut.pop(session, ()) or self._answer(session, len(ids), len(refs)), "stop"
        time.sleep(0.005 + 0.02 * random.Random(f"{self._seed}{session}{len(ids)}").random())
        self._live_or_vanish()
        if not self._goes_on.is_set() and len(say) > 1:
            say, self._cut[session], reason = say[: len(say) // 2], say[len(say) // 2 :], "abort"
            self.num_aborted += 1
        meta = {
            "finish_reason": {"type": reason},
            "prompt_tokens": num_prompt,
            "completion_tokens": len(say),
            "cached_tokens": 0,
            "weight_version": str(version),
            "output_token_logprobs": [[LOGP, token, None] for token in say],
        }
        return 200, {"output_ids": list(say), "meta_info": meta}

    def _answer(self, session: str, num_ids: int, num_seen: int) -> tuple[int, ...]:
        draw = random.Random(f"{self._seed}{session}{num_ids}")
        if num_seen >= 2 + draw.randrange(2):
            text = format_action(TerminateAction(status=draw.choice(["success", "failure"])))
        elif draw.random() < 0.15:
            text = "the weather is fine"
        else:
            text = format_action(
                GuiAction(kind="left_click", point=Point(x=draw.randrange(1000), y=draw.randrange(1000)))
            )
        return self._renderer.answer_ids(text)

    def _live_or_vanish(self) -> None:
        if self.is_dead:
            raise ConnectionResetError("killed")
