"""A stand-in for OSWorld's control server: its paths, methods, bodies and defects, with the standard library only.

Runs where a desktop runs: as a process, in a container, in a virtual machine. There is no screen; the picture is one colour
that changes with every pyautogui call, and each call is a line of HOME/events.log (module `pyautogui`, written beside it).

    python osworld_guest.py --port 5000 [--fd N] [--size 640x384] [--windows] [--broken-bash]
"""

# The plain calls of a small program that runs anywhere.
# ruff: noqa: PTH103, PTH110, PTH111, PTH113, PTH118, PTH123, SIM115
import argparse
import email.parser
import hashlib
import http.server
import json
import os
import shlex
import socket
import struct
import subprocess
import tempfile
import threading
import urllib.parse
import zlib

HOME = os.environ.get("HOME", "/home/user")
LOG = os.path.join(HOME, "events.log")
PROBES = "/home/user/probes.json"
"""With --windows: {path: [the body it must be asked with, the status it answers]}."""
PYAUTOGUI = """
import os
FAILSAFE, PAUSE = True, 0.1
def __getattr__(name):
    def call(*arguments, **named):
        with open(os.path.join(os.environ["HOME"], "events.log"), "a") as log:
            log.write("%s%r%s\\n" % (name, arguments, named or ""))
    return call
"""


def png(size, rgb):
    width, height = size
    rows = (b"\0" + bytes(rgb) * width) * height

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows, 1))
        + chunk(b"IEND", b"")
    )


class Guest(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    options: argparse.Namespace

    def log_message(self, *_):
        pass

    def reply(self, body, code=200, kind="application/json"):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        if kind == "text/plain" and not isinstance(body, bytes):
            data = str(body).encode()
        self.send_response(code)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def body(self):
        return self.rfile.read(int(self.headers.get("content-length", 0)))

    def form(self):
        data = self.body()
        kind = self.headers.get("content-type", "")
        if "multipart" not in kind:
            return {key: value[0] for key, value in urllib.parse.parse_qs(data.decode()).items()}
        message = email.parser.BytesParser().parsebytes(
            b"content-type: " + kind.encode() + b"\r\n\r\n" + data
        )
        fields = {}
        for part in message.get_payload():
            name = part.get_param("name", header="content-disposition")
            fields[name] = part.get_payload(decode=True)
        return fields

    def do_GET(self):
        path = self.path.split("?")[0]
        if path == "/screenshot":
            log = open(LOG, "rb").read() if os.path.exists(LOG) else b""
            self.reply(png(self.options.wh, hashlib.sha256(log).digest()[:3]), kind="image/png")
        elif path == "/platform":
            self.reply("Windows" if self.options.windows else "Linux", kind="text/plain")
        elif path == "/probe" and self.options.windows:
            self.reply("Probe successful", kind="text/plain")
        elif path == "/accessibility":
            self.reply({"AT": "<desktop-frame/>"})
        elif path == "/terminal":
            self.reply({"output": None, "status": "success"})
        else:
            self.reply({"error": "no such path"}, 404)

    def do_POST(self):
        path = self.path.split("?")[0].removeprefix("/setup")
        if self.options.windows and path in (probes := self.probes()):
            body, status = probes[path]
            self.reply({"status": "-"}, status if json.loads(self.body()) == body else 418)
            return
        handler = getattr(self, "post" + path.replace("/", "_"), None)
        if handler is None or (self.options.windows and path in ("/run_python", "/run_bash_script")):
            self.body()
            self.reply({"error": "no such path"}, 404)
            return
        handler()

    def probes(self):
        try:
            with open(PROBES) as file:
                return json.load(file)
        except OSError:
            return {}

    def post_screen_size(self):
        self.body()
        self.reply({"width": self.options.wh[0], "height": self.options.wh[1]})

    def post_execute(self):
        request = json.loads(self.body())
        command, is_shell = request["command"], request.get("shell", False)
        try:
            argv = shlex.split(command) if isinstance(command, str) and not is_shell else command
            done = subprocess.run(
                argv, shell=bool(is_shell), capture_output=True, text=True, timeout=120, env=environment()
            )
        except Exception as error:
            self.reply({"status": "error", "message": str(error)}, 500)
            return
        self.reply(
            {
                "status": "success",
                "output": done.stdout,
                "error": done.stderr,
                "returncode": done.returncode,
            }
        )

    def post_run_bash_script(self):
        request = json.loads(self.body())
        done = subprocess.run(
            ["/bin/bash", "-c", request["script"]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        if self.options.broken_bash:
            message = "Failed to execute script: name '_append_event' is not defined"
            self.reply({"status": "error", "output": message, "error": "", "returncode": -1}, 500)
            return
        self.reply({"status": "success", "output": done.stdout, "error": "", "returncode": done.returncode})

    def post_upload(self):
        form = self.form()
        path = os.path.expandvars(os.path.expanduser(form["file_path"].decode()))
        try:
            with open(path, "wb") as file:
                file.write(form["file_data"])
        except OSError as error:
            self.reply(str(error), 500, "text/plain")
            return
        self.reply(f"File Uploaded: {len(form['file_data'])} bytes", kind="text/plain")

    def post_file(self):
        path = os.path.expandvars(os.path.expanduser(self.form()["file_path"]))
        if not os.path.isfile(path):
            self.reply({"error": "File not found"}, 404)
            return
        with open(path, "rb") as file:
            self.reply(file.read(), kind="application/octet-stream")


def environment():
    return {**os.environ, "HOME": HOME, "PYTHONPATH": MODULES}


def main():
    global MODULES
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=5000)
    parser.add_argument("--fd", type=int)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--size", default="640x384")
    parser.add_argument("--windows", action="store_true")
    parser.add_argument("--broken-bash", action="store_true")
    options = parser.parse_args()
    options.wh = tuple(int(side) for side in options.size.split("x"))
    Guest.options = options
    os.makedirs(HOME, exist_ok=True)
    MODULES = tempfile.mkdtemp()
    with open(os.path.join(MODULES, "pyautogui.py"), "w") as file:
        file.write(PYAUTOGUI)
    server = http.server.ThreadingHTTPServer(
        (options.host, options.port), Guest, bind_and_activate=options.fd is None
    )
    if options.fd is not None:
        server.socket.close()
        server.socket = socket.socket(fileno=options.fd)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever).start()
    print("up", flush=True)


if __name__ == "__main__":
    main()
