"""The main job end to end, small: random weights, real desktops, every phase, killed after a step and continued.

Independent truth: transformers for log-probs, plain sums over the stored episodes for what was trained.
"""

import io
import json
import signal
from pathlib import Path

import pytest

from slime_cua.core.types import EpisodeGroup
from tests.e2e.job import DICE, ROOT, Job, ended, write_model, write_tasks

pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.timeout(900)]
NUM_STEPS = 2
TEMPERATURE = 0.5


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A finished run whose driver was killed once, between the first step and the second."""
    folder = tmp_path_factory.mktemp("job")
    model = write_model(folder / "model")
    train = write_tasks(folder / "train.jsonl", "train", DICE)
    job = Job(
        folder, [f"model={model}", f"tasks.train=[{train}]", f"tasks.heldout=[{ROOT}/tasks/starter/heldout]"]
    )
    with ended(job):
        job.start().wait_for("step 1: reward")
        job.kill(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        job.assert_nothing_left()
        assert job.start().wait() == 0, job.output
        job.assert_nothing_left()
        yield job


def rows(job, axis):
    lines = (job.run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for line in lines if (row := json.loads(line))["axis"] == axis]


def groups(job, name):
    lines = (job.run_dir / f"episodes/{name}.jsonl").read_text().splitlines()
    return [EpisodeGroup.model_validate_json(line) for line in lines]


def valid_turns(group):
    return [turn for episode in group.episodes if episode.is_valid for turn in episode.turns]


def test_the_run_directory_holds_what_its_module_says(job):
    names = {str(path.relative_to(job.run_dir)) for path in job.run_dir.rglob("*") if path.is_file()}
    expected = {
        "config.yaml",
        "phases.json",
        "metrics.jsonl",
        "report.html",
        "report_data.json",
        "state.json",
    }
    expected |= {
        f"episodes/{name}.jsonl" for name in ("demonstrations", "eval_base", "eval_sft", "eval_rl", "rl")
    }
    expected |= {f"hf/{arm}/{file}" for arm in ("sft", "rl") for file in ("config.json", "model.safetensors")}
    expected |= {f"logs/{name}.log" for name in ("driver", "rollout", "engine_0", "trainer_0", "trainer_1")}
    assert expected <= names
    assert set(json.loads((job.run_dir / "phases.json").read_text())) == {
        "sft",
        "rl",
        "eval_base",
        "eval_sft",
        "eval_rl",
    }
    hidden = {Path(name).name for name in names if Path(name).name.startswith(".")}
    # torch's distributed checkpoints, and the lock of who reads one; drafts of ours would be hidden, too
    assert hidden <= {".metadata", ".readers"}
    assert not [name for name in names if ".unfinished" in name]


def test_the_second_start_goes_on_where_the_first_was_killed(job):
    assert "continuing at step 1" in job.output
    assert "demonstrations" not in job.output and "cold start" not in job.output
    assert job.output.count("step 2: reward") == 1 and "step 1: reward" not in job.output


def test_each_step_has_one_row_and_no_token_is_older_than_one_version(job):
    steps = rows(job, "step")
    assert [row["step"] for row in steps] == list(range(1, NUM_STEPS + 1))
    assert all(row["values"]["lag/max"] <= 1 for row in steps)
    assert [row["step"] for row in rows(job, "sft_step")] == [0]
    assert [row["step"] for row in rows(job, "eval")] == [0, 1, 2]


def test_tokens_carry_the_version_of_the_weights_that_sampled_them(job):
    assert {v for g in groups(job, "eval_base") for t in valid_turns(g) for v in t.response_versions} == {0}
    assert {v for g in groups(job, "eval_rl") for t in valid_turns(g) for v in t.response_versions} == {
        NUM_STEPS
    }
    for group in groups(job, "rl"):
        for episode in group.episodes:
            versions = [v for turn in episode.turns for v in turn.response_versions]
            assert versions == sorted(versions) and set(versions) <= set(range(NUM_STEPS + 1))


def test_every_valid_response_of_the_trained_groups_was_trained_once(job):
    batches = json.loads((job.run_dir / "state.json").read_text())["batches"]
    names = [name for batch in batches for name in batch["groups"]]
    stored = groups(job, "rl")
    assert len({group.group_id for group in stored}) == len(stored)
    assert len(set(names)) == len(names)
    trained = [group for group in stored if group.group_id in names]
    assert len(trained) == NUM_STEPS * 2
    responses = [turn for group in trained for turn in valid_turns(group)]
    values = [row["values"] for row in rows(job, "step")]
    assert sum(v["loss/num_trained_tokens"] for v in values) == sum(len(t.response_ids) for t in responses)
    assert sum(v["rollout/num_episodes"] for v in values) == sum(len(group.episodes) for group in trained)


def test_trainer_and_engine_agree_on_tokens_of_the_current_version(job):
    first = rows(job, "step")[0]["values"]
    assert first["lag/max"] == 0
    assert abs(first["loss/kl"]) < 1e-3 and abs(first["loss/ratio_mean"] - 1) < 1e-3


def test_the_export_loads_in_transformers_and_gives_the_engines_log_probs(job):
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    from slime_cua.data.expand import ImageProcessorConfig, expand_image_placeholders

    folder = job.run_dir / "hf/rl"
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    sizes = ImageProcessorConfig.from_hf(folder)
    num_compared = 0
    for group in groups(job, "eval_rl"):
        ids, images = [], []
        for turn in group.episodes[-1].turns:
            ids, images = ([], []) if turn.starts_segment else (ids, images)
            ids, images = [*ids, *turn.context_ids], [*images, *turn.context_images]
            prompt = expand_image_placeholders(ids, images, sizes)
            row = torch.tensor([[*prompt, *turn.response_ids]])
            pixels = [Image.open(io.BytesIO(stored_image(job, ref))) for ref in images]
            inputs = dict(processor(pixels, return_tensors="pt"))
            inputs["mm_token_type_ids"] = (row == sizes.image_token_id).long()
            with torch.no_grad():
                logits = (
                    model(input_ids=row, use_cache=False, **inputs).logits[0, len(prompt) - 1 : -1].float()
                )
            wanted = torch.tensor(turn.response_ids)[:, None]
            ours = (logits / TEMPERATURE).log_softmax(-1).gather(1, wanted)[:, 0]
            assert (ours - torch.tensor(turn.response_logp)).abs().max() < 1e-3
            num_compared += len(wanted)
            ids = [*ids, *turn.response_ids]
    assert num_compared >= 32


def stored_image(job, ref):
    found = [path for path in (job.run_dir / "images").rglob(f"*{ref.sha256[2:]}*") if path.is_file()]
    assert len(found) == 1
    return found[0].read_bytes()


def test_training_moved_the_weights(job):
    from safetensors.torch import load_file

    before, after = (load_file(job.run_dir / f"hf/{arm}/model.safetensors") for arm in ("sft", "rl"))
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


def test_metrics_are_in_an_offline_wandb_run_and_a_report_of_one_page(job):
    runs = list((job.run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(runs) == 2 and all(path.stat().st_size > 0 for path in runs)
    page = (job.run_dir / "report.html").read_text()
    assert "Held-out success" in page and "data:image/png;base64," in page
    assert "Held-out success" in job.output


def test_the_ended_run_has_taken_its_ray_session_with_it(job):
    _, folder = (job.run_dir / "logs/ray_job").read_text().split()
    assert folder.startswith("/tmp/slime_cua_ray_") and not Path(folder).exists()
