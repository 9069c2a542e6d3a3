"""Messages to token ids for one model, one action space, one prompt: the same for rollout, SFT and evaluation (I3)."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollout.actions import ActionSpace, McpTool, system_prompt, tool_schemas
from rollout.actions.prompts import PromptStyle, tools_section
from rollout.renderer.template import ChatTemplate, ObservationRole, Part
from slime_cua.config.rollout import RendererConfig
from slime_cua.core.errors import ConfigError
from slime_cua.core.types import ImageRef, Observation
from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders, num_image_tokens

HIDDEN_IMAGE = "[screenshot]"
"""Stands in an observation whose screenshot is not in view and that has no text."""


@dataclass(frozen=True)
class Piece:
    """Token ids to append, with the images of their placeholders in order."""

    ids: tuple[int, ...]
    images: tuple[ImageRef, ...] = ()


class Renderer:
    """Token ids of the parts of an episode, by the model's own chat template and tokenizer.

    Example: renderer = Renderer("models/tiny_base", ActionSpace(), prompt="short")
             episode = EpisodeRenderer(renderer, SlidingWindow(10, 5))
    """

    def __init__(
        self,
        hf_dir: Path | str,
        space: ActionSpace,
        prompt: PromptStyle = "full",
        observation_role: ObservationRole = "auto",
        template_options: dict[str, Any] | None = None,
    ) -> None:
        """`observation_role` "auto": tool, where the template has tool responses, else user. `template_options` go to the chat template, e.g. {"enable_thinking": False}.

        Raises ConfigError when the folder lacks a file or its template cannot be appended to.
        """
        from transformers import AutoTokenizer  # seconds to import, so not at the top

        self.space = space
        self.images = ImageProcessorConfig.from_hf(hf_dir)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(str(hf_dir))
        self.stop_ids = _stop_ids(Path(hf_dir), self.tokenizer.eos_token_id)
        """Ids that end an answer."""
        vocabulary = self.tokenizer.get_added_vocab()
        named = {vocabulary[name] for name in ("<|image_pad|>", "<|video_pad|>") if name in vocabulary}
        self.placeholder_ids = frozenset({self.images.image_token_id, *named})
        """Ids that stand for images; a policy should never sample one."""
        added = self.tokenizer.added_tokens_decoder.values()
        self._marks = tuple(sorted((str(token) for token in added), key=len, reverse=True))
        self._make_template = partial(
            _template,
            self.tokenizer,
            style=prompt,
            role=observation_role,
            options=dict(template_options or {}),
        )
        self.template = self._make_template(space)
        self._think_close = self.ids_of_text("</think>")

    @classmethod
    def from_config(cls, hf_dir: Path | str, config: RendererConfig, space: ActionSpace) -> Renderer:
        """The renderer of a run."""
        options = {} if config.enable_thinking is None else {"enable_thinking": config.enable_thinking}
        return cls(hf_dir, space, config.prompt, config.observation_role, options)

    def offering(self, tools: Sequence[McpTool]) -> Renderer:
        """This renderer with `tools` in its action space: of an episode whose desktop serves them."""
        if tuple(tools) == self.space.mcp_tools:
            return self
        other = copy.copy(self)
        other.space = replace(self.space, mcp_tools=tuple(tools))
        other.template = self._make_template(other.space)
        return other

    @property
    def keeps_answers(self) -> bool:
        """False when the template changes earlier answers, so that every turn starts a segment."""
        return self.template.keeps_answers

    def ids_of_text(self, text: str) -> tuple[int, ...]:
        """Ids of text of ours, special tokens read as such."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def text_of_ids(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens kept: what the action parser reads."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def answer_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a demonstrated answer with its end of turn (SFT); a sampled answer never comes through here."""
        end = self.ids_of_text(self.template.observation([]))[:1]
        return (*self.ids_of_text(text), *end)

    def start(
        self, instruction: str, observation: Observation, is_shown: bool = True, is_last: bool = True
    ) -> Piece:
        """Everything before the first answer. `is_last`: the answer is still to be sampled."""
        task: list[Part] = [
            {"type": "text", "text": self.plain(instruction)},
            *self._parts(observation, is_shown),
        ]
        return self._piece(self.template.head(task), observation, is_shown, is_last)

    def observation(
        self,
        answer_ids: Sequence[int],
        observation: Observation,
        is_shown: bool = True,
        is_last: bool = True,
    ) -> Piece:
        """Everything between an answer and the next: its end of turn unless it was sampled, the observation, the opening."""
        text = self.template.observation(self._parts(observation, is_shown) or [_text(HIDDEN_IMAGE)])
        piece = self._piece(text, observation, is_shown, is_last)
        ended = bool(answer_ids) and answer_ids[-1] == piece.ids[0] and piece.ids[0] in self.stop_ids
        return Piece(piece.ids[1:], piece.images) if ended else piece

    def history_ids(self, answer_ids: Sequence[int]) -> tuple[int, ...]:
        """An answer as history shows it: its own ids, without the reasoning where the template drops that.

        A placeholder that the policy sampled stands for no image, so history leaves it out.
        """
        ids, mark = (
            tuple(token for token in answer_ids if token not in self.placeholder_ids),
            self._think_close,
        )
        if self.keeps_answers:
            return ids
        for end in range(len(ids), len(mark) - 1, -1):
            if ids[end - len(mark) : end] == mark:
                while end < len(ids) and self.text_of_ids(ids[end : end + 1]).strip("\n") == "":
                    end += 1
                return ids[end:]
        return ids

    def holds_placeholder(self, answer_ids: Sequence[int]) -> bool:
        """Whether an answer holds a sampled image or video placeholder, which no prompt can repeat."""
        return not self.placeholder_ids.isdisjoint(answer_ids)

    def plain(self, text: str) -> str:
        """`text` from outside (a task, a program's output) with the model's marks made harmless: "<|x|>" -> "< |x|>"."""
        for mark in self._marks:
            if mark in text:
                text = text.replace(mark, mark[0] + " " + mark[1:])
        return text

    def num_prompt_tokens(self, ids: Sequence[int], images: Sequence[ImageRef]) -> int:
        """What the engine must count as prompt_tokens for these rollout ids."""
        return len(ids) - len(images) + sum(num_image_tokens(image, self.images) for image in images)

    def expand(self, ids: Sequence[int], images: Sequence[ImageRef]) -> list[int]:
        """Rollout ids with each placeholder repeated for its image's tokens."""
        return expand_image_placeholders(ids, images, self.images)

    def _parts(self, observation: Observation, is_shown: bool) -> list[Part]:
        parts = [_text(self.plain(observation.text))] if observation.text else []
        return [*parts, {"type": "image"}] if observation.image is not None and is_shown else parts

    def _piece(self, text: str, observation: Observation, is_shown: bool, is_last: bool) -> Piece:
        opening = self.template.opening if is_last else self.template.history_opening
        ids = self.ids_of_text(text + opening)
        images = (observation.image,) if observation.image is not None and is_shown else ()
        assert sum(token == self.images.image_token_id for token in ids) == len(images)
        return Piece(ids, images)


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _template(
    tokenizer: Any, space: ActionSpace, *, style: PromptStyle, role: ObservationRole, options: dict[str, Any]
) -> ChatTemplate:
    system = system_prompt(space, style)
    if style == "short":
        return ChatTemplate(tokenizer, system, (), role, options)
    tools = tool_schemas(space)
    template = ChatTemplate(tokenizer, system, tools, role, options)
    if space.computer_tools[0] in template.head([_text("task")]):
        return template
    return ChatTemplate(tokenizer, f"{system}\n\n{tools_section(space)}", (), role, options)


def _stop_ids(folder: Path, tokenizer_eos: int | None) -> frozenset[int]:
    path = folder / "generation_config.json"
    named = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    found = {*(named if isinstance(named, list) else [named]), tokenizer_eos} - {None}
    if not found:
        raise ConfigError(f"{folder}: neither generation_config.json nor the tokenizer names an end of turn")
    return frozenset(int(token) for token in found if token is not None)
