"""No desktops, no engines, no tasks: a sentence that names the key, before anything is started."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from slime_cua.config.base import load
from slime_cua.config.run import RunConfig
from slime_cua.core.errors import ConfigError, PreflightError, TaskError
from slime_cua.launch.preflight import check_arms, check_gateway, check_inputs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "key",
    ["sandbox.num_desktops", "rollout.engine.num_engines", "rollout.groups_per_step", "trainer.parallel.dp"],
)
def test_a_capacity_of_zero_is_refused_by_name(key):
    with pytest.raises(ConfigError, match=rf"{key} = 0: .*greater than or equal to 1"):
        load(RunConfig, None, [f"{key}=0"])


def test_an_empty_pool_is_refused_whether_no_file_or_an_empty_one_is_named(tmp_path):
    model = f"model={ROOT}/models/tiny_base"
    with pytest.raises(ConfigError, match=r"tasks\.train names no task: give folders or files"):
        check_inputs(load(RunConfig, None, [model]))
    empty = tmp_path / "train.jsonl"
    empty.write_text("")
    with pytest.raises((ConfigError, TaskError), match=r"no task"):
        check_inputs(load(RunConfig, None, [model, f"tasks.train=[{empty}]"]))


def test_scores_without_held_out_tasks_are_refused():
    keys = [f"model={ROOT}/models/tiny_base", f"tasks.train=[{ROOT}/tasks/starter/train]"]
    with pytest.raises(ConfigError, match=r"tasks\.heldout is empty: give folders or files"):
        check_arms(load(RunConfig, None, keys))
    check_arms(load(RunConfig, None, [*keys, "evaluation.arms=[]"]))


@pytest.fixture
def gateway():
    """Answers /healthz with `body`; `url` is where."""

    class Answer(BaseHTTPRequestHandler):
        body = b'{"status": "ok", "num_hosts": 0}'

        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.body)

        def log_message(self, *_):
            return

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Answer.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield Answer
    server.shutdown()
    server.server_close()


def test_a_gateway_without_hosts_or_without_sense_is_named_and_one_with_hosts_passes(gateway):
    with pytest.raises(
        PreflightError, match=rf"sandbox\.gateway_url = {gateway.url} has no desktop host: start one"
    ):
        check_gateway(gateway.url, 0.0)
    gateway.body = b'{"status": "ok", "num_hosts": 2}'
    check_gateway(gateway.url, 0.0)
    gateway.body = b"hello"
    with pytest.raises(PreflightError, match="does not answer as a gateway"):
        check_gateway(gateway.url, 0.0)


def test_a_gateway_that_is_not_there_is_named():
    with pytest.raises(
        PreflightError, match=r"http://127\.0\.0\.1:9 does not answer as a gateway \(ConnectError"
    ):
        check_gateway("http://127.0.0.1:9", 0.0)
