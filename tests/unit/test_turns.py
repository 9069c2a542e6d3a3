"""Chat turns of pretraining: requests stand before the screen, answers are trained, and no task or action occurs."""

import json
import math
import re
from pathlib import Path

import numpy as np

from slime_cua.evaluation.answers import spans
from slime_cua.synthesis.pretrain_data import UNTRAINED, Encoder, Lengths, Scene, Stage, make_batch, shape_of
from slime_cua.synthesis.questions import KINDS, candidates
from slime_cua.synthesis.screens import make_screen
from slime_cua.synthesis.snippets import SNIPPETS, draw_snippet, fill_in
from slime_cua.synthesis.things import Look
from slime_cua.synthesis.turns import CARRY, DONE, FILL, KIND_NAMES

ROOT = Path(__file__).resolve().parents[2]
ENCODER = Encoder(ROOT / "models" / "tiny_base")
GRAMMAR = ("<tool_call>", "custom_computer_use", '"arguments"', '"action"', '"coordinate"', "execute_code")


def batch_of(num_screens: int, num: int = 12):
    look = Look(word_share=1.0, label_share=0.5)
    stage = Stage(scenes=(Scene(look=look, ask=dict.fromkeys(KINDS, 1.0)),), chat_share=1.0, uses_of_screen=2)
    batch = shape_of(Lengths(), num, num_screens, math.prod(ENCODER.screen_grid)).allocate()
    make_batch(np.random.default_rng(num_screens), stage, ENCODER, batch)
    return batch


def text_of(ids) -> str:
    return ENCODER._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def test_an_answer_holds_only_names_of_its_request():
    for request, answer in SNIPPETS:
        assert set(re.findall(r"\{([abc])\}", answer)) <= set(re.findall(r"\{([abc])\}", request)), request


def test_names_of_a_snippet_come_back_unchanged():
    rng = np.random.default_rng(0)
    for _ in range(200):
        request, answer = draw_snippet(rng, ENCODER.words)
        if match := re.fullmatch(r"send (\S+) to (\S+)", request):
            assert answer == f"send --to {match[2]} {match[1]}"


def test_what_is_seen_is_filled_in():
    rng = np.random.default_rng(1)
    screen = next(
        s
        for i in range(50)
        if candidates(s := make_screen(np.random.default_rng(i), Look(num_items=(1, 3))), "tell_color")
    )
    question = candidates(screen, "tell_color")[0]
    for _ in range(20):
        request, answer = fill_in(rng, question, ENCODER.words)
        assert question.about in request and question.answer in answer and question.answer not in request


def test_requests_stand_before_their_screen_and_only_answers_are_trained():
    for num_screens in (1, 2):
        batch = batch_of(num_screens)
        for ids, kinds in zip(batch.token_ids_BL, batch.kind_BL, strict=True):
            text = text_of(i for i in ids if i != ENCODER.image[1])
            turns = text[text.index("<|im_start|>user") :].split("<|im_start|>")[1:]
            requests = [turn for turn in turns if turn.startswith("user")]
            assert sum("<|vision_start|>" in turn for turn in requests) == num_screens
            assert re.match(r"user\n[^<]+<\|vision_start\|>", requests[0]), requests[0]
            opening = text_of(ids[kinds == UNTRAINED])
            assert "<|im_start|>assistant\n" in opening
            assert not any(piece in turn for turn in turns for piece in GRAMMAR)


def test_every_answer_ends_its_turn_or_line():
    batch = batch_of(2)
    ends = {ENCODER.encode("\n")[0], ENCODER.encode("<|im_end|>")[0]}
    kinds = set()
    for ids, kind_L in zip(batch.token_ids_BL, batch.kind_BL, strict=True):
        found = spans(kind_L, ids, ends)
        assert sum(after - first for first, after in found) == (kind_L >= 0).sum()
        kinds |= {KIND_NAMES[kind_L[first]] for first, _ in found}
        for first, after in found:
            if kind_L[first] == DONE:
                assert text_of(ids[first:after]) == "done<|im_end|>"
    assert {KIND_NAMES[kind] for kind in (CARRY, FILL, DONE)} <= kinds


def test_a_label_names_the_text_beside_it():
    look = Look(kinds=("field",), side_px=(90, 300), word_share=1.0, label_share=1.0, number_share=0.5)
    found = 0
    for i in range(60):
        screen = make_screen(np.random.default_rng([2, i]), look)
        for question in candidates(screen, "value"):
            (item,) = [item for item in screen.items if item.label == question.about]
            assert question.answer == item.word
            found += 1
    assert found > 10


def test_what_is_called_absent_is_not_on_the_screen():
    for i in range(60):
        screen = make_screen(np.random.default_rng([3, i]), Look())
        for question in candidates(screen, "absent"):
            name = question.about.split()[0]
            assert name not in {item.color for item in screen.items} | {item.kind for item in screen.items}


def test_no_text_is_an_instruction_or_a_program_of_a_starter_task():
    known = set()
    for path in (ROOT / "tasks" / "starter").glob("*/*.jsonl"):
        for line in path.read_text().splitlines():
            task = json.loads(line)
            known.add(task["instruction"].rstrip("."))
            known |= {
                action["code"]
                for route in task["metadata"]["routes"].values()
                for action in route
                if "code" in action
            }
    assert len(known) > 100
    rng = np.random.default_rng(4)
    made = {text for _ in range(5000) for text in draw_snippet(rng, ENCODER.words)}
    assert not made & known
