"""A model's own chat template, cut into pieces that only ever append.

An episode is: head (system, task, first screenshot), opening of an answer, answer, observation, opening, answer, ...
The head, the openings and the observations are text of the template; answers are never text here: they stay the ids that were
sampled. Whether the template really is such a chain is tried when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from slime_cua.core.errors import ConfigError

MARK = "ZQANSWERQZ"
"""Stands for an answer while the template is rendered."""
THOUGHT = "ZQTHOUGHTQZ"


ObservationRole = Literal["auto", "tool", "user"]
"""Who says an observation: a tool, where the template knows tool responses, or the user."""


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that is used here."""

    def apply_chat_template(self, conversation: list[dict[str, Any]], **kwargs: Any) -> Any: ...


Part = dict[str, str]
"""{"type": "text", "text": ...} or {"type": "image"}."""


class ChatTemplate:
    """Text pieces of one conversation form: a system message, a task, then answers and observations in turn.

    `opening` precedes an answer that is being sampled; `history_opening` precedes it once it is history. Where they differ,
    or where the template drops the reasoning of earlier answers, `keeps_answers` is False and each turn starts a segment.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        system: str,
        tools: Sequence[dict[str, Any]] = (),
        observation_role: ObservationRole = "auto",
        options: dict[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._system = {"role": "system", "content": system}
        self._tools = list(tools) or None
        self._options = dict(options or {})
        probe: list[Part] = [{"type": "text", "text": "task"}]
        self._role: str = observation_role
        if observation_role == "auto":
            self._role = "tool"
            self._role = "tool" if "<tool_response>" in self._rendered_observation(probe) else "user"
        head = self.head(probe)
        with_opening = self._render(self._start(probe), add_generation_prompt=True)
        self.opening = _after(with_opening, head, "the generation prompt")
        self.history_opening, self.keeps_answers = self._try_chain(head)

    def head(self, task: Sequence[Part]) -> str:
        """System message and task."""
        return self._render(self._start(task))

    def observation(self, content: Sequence[Part]) -> str:
        """From the end of the answer before it to the end of the observation's message."""
        messages = [
            *self._start([{"type": "text", "text": "task"}]),
            _answer(MARK),
            self._observation(content),
        ]
        rendered = self._render(messages)
        return rendered[rendered.index(MARK) + len(MARK) :]

    def one_shot(self, task: Sequence[Part], turns: Sequence[tuple[str, Sequence[Part]]]) -> str:
        """The template's own rendering of a whole conversation, ready for the next answer (golden tests)."""
        messages = self._start(task)
        for answer, content in turns:
            messages += [_answer(answer), self._observation(content)]
        return self._render(messages, add_generation_prompt=True)

    def _rendered_observation(self, content: Sequence[Part]) -> str:
        start = self._start([{"type": "text", "text": "task"}])
        return self._render([*start, _answer(MARK), self._observation(content)])

    def _start(self, task: Sequence[Part]) -> list[dict[str, Any]]:
        return [self._system, {"role": "user", "content": list(task)}]

    def _observation(self, content: Sequence[Part]) -> dict[str, Any]:
        return {"role": self._role, "content": list(content)}

    def _render(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        rendered = self._tokenizer.apply_chat_template(
            messages,
            tools=self._tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **self._options,
        )
        assert isinstance(rendered, str)
        return rendered

    def _try_chain(self, head: str) -> tuple[str, bool]:
        """How history shows an answer, and whether it shows it as it was sampled.

        Renders two turns in one shot and compares them with the chain of pieces.
        """
        task: list[Part] = [{"type": "text", "text": "task"}]
        seen: list[Part] = [{"type": "text", "text": "seen"}, {"type": "image"}]
        is_thinking = "<think>" in self.opening and "</think>" not in self.opening
        said = f"{THOUGHT}\n</think>\n\n{MARK}" if is_thinking else MARK
        piece = self.observation(seen)
        rendered = self.one_shot(task, [(said, seen), (said, seen)])
        is_chain = rendered == head + 2 * (self.opening + said + piece) + self.opening
        if is_chain and ("</think>" in self.opening or self._keeps_thought(task, seen)):
            return self.opening, True
        first = rendered.split(MARK)[0]
        history_opening = _after(first, head, "an earlier answer")
        if rendered != head + 2 * (history_opening + MARK + piece) + self.opening:
            raise ConfigError(
                "the chat template is not a chain of messages: rendering two turns at once differs from rendering them one "
                "by one. Use another template, or another observation role ('tool' or 'user')"
            )
        return history_opening, False

    def _keeps_thought(self, task: list[Part], seen: list[Part]) -> bool:
        """Whether reasoning that an answer opens by itself stays in history."""
        said = f"<think>\n{THOUGHT}\n</think>\n\n{MARK}"
        return THOUGHT in self.one_shot(task, [(said, seen), (said, seen)])


def _answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _after(text: str, beginning: str, what: str) -> str:
    if not text.startswith(beginning):
        raise ConfigError(
            f"the chat template changes earlier text when it adds {what}; it cannot be appended to"
        )
    return text[len(beginning) :]
