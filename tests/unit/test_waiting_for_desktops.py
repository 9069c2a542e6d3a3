"""A run that waits for episodes which cannot come: it ends when the disk keeps its own host from booting desktops, and says
what hosts complain of otherwise."""

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from sandbox_cluster.host.pool import MIN_FREE_DISK_BYTES
from slime_cua.core.errors import InfrastructureError
from slime_cua.launch import preflight, session
from slime_cua.launch.preflight import LEAST_BYTES, host_complaints
from slime_cua.launch.session import Session

FULL = "no desktop is booted: less than 256 MiB of memory are available"


def host(**changes):
    return {"host_id": "h", "num_slots": 2, "num_leased": 0, "num_ready": 0, "last_error": FULL, **changes}


@pytest.fixture
def gateway():
    """(address, what its hosts are: to be changed)."""
    hosts = [host()]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            is_known = self.path == "/v1/hosts" and self.headers["Authorization"] == "Bearer t"
            body = json.dumps(hosts).encode()
            self.send_response(200 if is_known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", hosts
    server.shutdown()
    server.server_close()


@pytest.fixture
def waiting(tmp_path, monkeypatch, gateway):
    """A session in which no episode ever ends, in the middle of a phase; `said` has its lines. It is cut after 200 looks."""
    import ray

    looks = iter(range(200))
    monkeypatch.setattr(
        ray, "wait", lambda calls, timeout: ([] if next(looks, None) is not None else calls, [])
    )
    made = Session.__new__(Session)
    sandbox = SimpleNamespace(acquire_timeout_s=120.0)
    made.config = SimpleNamespace(
        sandbox=sandbox, rollout=SimpleNamespace(call_timeout_s=1.0, episode_timeout_s=60.0)
    )
    made.run = SimpleNamespace(path=tmp_path, logs=tmp_path)
    made.said = []
    made.console = SimpleNamespace(progress=lambda text: None, say=made.said.append)
    made._rollout = SimpleNamespace(
        next_batch=SimpleNamespace(remote=lambda: "call"), progress=SimpleNamespace(remote=lambda: "progress")
    )
    monkeypatch.setattr(made, "_ask", lambda call, timeout_s: (0, 0, 0) if call == "progress" else "batch")
    made._fleet, made._cluster = None, SimpleNamespace(check=lambda: None, take_restarts=list)
    made._gateway = (gateway[0], "t")
    return made


def leave(monkeypatch, num_bytes):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))


def test_too_little_disk_for_the_runs_own_host_ends_it_although_it_could_still_write(waiting, monkeypatch):
    leave(monkeypatch, MIN_FREE_DISK_BYTES - 1)
    with pytest.raises(InfrastructureError, match=r"no space is left.*199 MiB free, 200 needed"):
        waiting._play("next_batch", (), "step 4", lambda: None)
    leave(monkeypatch, MIN_FREE_DISK_BYTES)
    assert waiting._play("next_batch", (), "step 4", lambda: None) == "batch"


def test_with_hosts_elsewhere_only_a_full_disk_ends_it(waiting, monkeypatch):
    waiting._cluster = None
    leave(monkeypatch, LEAST_BYTES - 1)
    with pytest.raises(InfrastructureError, match="no space is left"):
        waiting._play("next_batch", (), "step 4", lambda: None)
    leave(monkeypatch, LEAST_BYTES)
    assert waiting._play("next_batch", (), "step 4", lambda: None) == "batch"


def test_what_keeps_a_host_from_booting_is_said_once_while_nothing_ends(waiting, monkeypatch):
    leave(monkeypatch, 1 << 40)
    monkeypatch.setattr(session, "LOOK_S", 0.0)
    waiting._play("next_batch", (), "step 4", lambda: None)
    assert waiting.said == [f"step 4: no desktop comes free; hosts say: h: {FULL}"]


def test_old_complaints_of_hosts_that_serve_are_none(gateway):
    url, hosts = gateway
    assert host_complaints(url, "t") == f"h: {FULL}"
    hosts[:] = [host(num_ready=1), host(num_leased=2), host(last_error="")]
    assert host_complaints(url, "t") == ""
    assert host_complaints(url, "wrong") == host_complaints("http://127.0.0.1:9", "t") == ""
