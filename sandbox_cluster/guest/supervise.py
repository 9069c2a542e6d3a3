"""What an OSWorld control server lacks, run by its /execute as `python -c THIS REQUEST`: deadlines, caps, error numbers.

Standard library only, Linux and Windows, and never imported by the host. REQUEST is base64 of a JSON object {"op", ...}, or
"@PATH" of a file that holds it (removed once read). The answer is one JSON line on stdout. A program that may run longer
than one /execute call is supervised by a second process, which leaves its answer in a file that op "wait" asks for.
"""

# The plain calls of old interpreters: desktops have whatever Python they have.
# ruff: noqa: B905, PTH103, PTH104, PTH108, PTH110, PTH116, PTH118, PTH120, PTH123, PTH208, RUF005, SIM105, UP031

import base64
import errno
import json
import os
import stat
import subprocess
import sys
import tempfile
import threading
import time

SOURCE = globals().get("SOURCE", "")
"""This program's text, put there by whoever sent it."""
IS_WINDOWS = os.name == "nt"


def fault(error):
    return {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}


class Kept:
    def __init__(self):
        self.data = b""
        self.is_cut = False


def collect(pipe, cap, kept):
    """Keep the first `cap` bytes of a pipe; read on, so that the program never waits for us."""
    while True:
        chunk = os.read(pipe.fileno(), 65536)
        if not chunk:
            return
        room = cap - len(kept.data)
        kept.is_cut = kept.is_cut or len(chunk) > room
        kept.data += chunk[: max(room, 0)]


def kill_tree(process):
    """The program, its session and all below them."""
    if IS_WINDOWS:
        subprocess.call(["taskkill", "/F", "/T", "/PID", str(process.pid)], stdout=subprocess.DEVNULL)
        return
    for _ in range(2):
        doomed = {process.pid}
        table = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open("/proc/%s/stat" % name, "rb") as file:
                        fields = file.read().rpartition(b")")[2].split()
                except OSError:
                    continue
                table.append((int(name), int(fields[1]), int(fields[3])))
        for _ in table:
            more = {pid for pid, parent, session in table if parent in doomed or session == process.pid}
            if more <= doomed:
                break
            doomed |= more
        for pid in doomed:
            try:
                os.kill(pid, 9)
            except OSError:
                pass


def start(request, outputs):
    options = {
        "stdin": subprocess.DEVNULL,
        "cwd": request["cwd"] or None,
        "stdout": outputs[0],
        "stderr": outputs[1],
    }
    if IS_WINDOWS:
        options["creationflags"] = 0x00000200 | (0x00000008 if request["detached"] else 0)
    else:
        options["start_new_session"] = True
    return subprocess.Popen(request["argv"], **options)


def run(request):
    script = None
    if request.get("script") is not None:
        file, script = tempfile.mkstemp(request["suffix"], "code-")
        os.write(file, base64.b64decode(request["script"]))
        os.close(file)
        request["argv"].append(script)
    try:
        if request["detached"]:
            start(request, (subprocess.DEVNULL, subprocess.DEVNULL))
            return {}
        merged = subprocess.STDOUT if request["merged"] else subprocess.PIPE
        process = start(request, (subprocess.PIPE, merged))
        pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe]
        kept = [Kept() for _ in pipes]
        readers = [
            threading.Thread(target=collect, args=(pipe, request["cap"], part), daemon=True)
            for pipe, part in zip(pipes, kept)
        ]
        for reader in readers:
            reader.start()
        is_late = False
        try:
            process.wait(request["timeout"])
        except subprocess.TimeoutExpired:
            is_late = True
            kill_tree(process)
            process.wait()
        for reader in readers:
            reader.join(0.2)
        return {
            "rc": None if is_late else process.returncode,
            "timeout": is_late,
            "cut": any(part.is_cut for part in kept),
            "outputs": [base64.b64encode(part.data).decode() for part in kept],
        }
    finally:
        if script is not None:
            try:
                os.unlink(script)
            except OSError:
                pass


def op_run(request):
    """Run to the end, or as long as one call may last; then {"pending": where to wait}."""
    if not request.get("patience"):
        return run(request)
    place = tempfile.mkdtemp("", "long-")
    with open(os.path.join(place, "request"), "w") as file:
        json.dump(dict(request, op="behind", place=place), file)
    line = [sys.executable, "-c", "SOURCE = %r\nexec(SOURCE)" % SOURCE, "@" + os.path.join(place, "request")]
    start({"argv": line, "cwd": None, "detached": True}, (subprocess.DEVNULL, subprocess.DEVNULL))
    return op_wait({"place": place, "patience": request["patience"]})


def op_behind(request):
    try:
        answer = run(request)
    except OSError as error:
        answer = fault(error)
    with open(os.path.join(request["place"], "part"), "w") as file:
        json.dump(answer, file)
    os.rename(os.path.join(request["place"], "part"), os.path.join(request["place"], "answer"))
    return {}


def op_wait(request):
    answer = os.path.join(request["place"], "answer")
    end = time.monotonic() + request["patience"]
    while not os.path.exists(answer):
        if time.monotonic() > end:
            return {"pending": request["place"]}
        time.sleep(0.02)
    with open(answer) as file:
        return json.load(file)


def op_look(request):
    """Size of a regular file."""
    status = os.stat(request["path"])
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    with open(request["path"], "rb"):
        return {"size": status.st_size}


def op_place(request):
    """Make the parents of a file, and see that it can be written."""
    os.makedirs(os.path.dirname(request["path"]) or ".", exist_ok=True)
    with open(request["path"], "ab"):
        return {}


def op_time(request):
    return {"now": time.time()}


def op_step_time(request):
    """Step the clock by so many seconds, as root or by sudo."""
    now = time.time() + request["seconds"]
    if IS_WINDOWS:
        moment = "[DateTimeOffset]::FromUnixTimeMilliseconds(%d).LocalDateTime" % (now * 1000)
        line, words = ["powershell", "-Command", "Set-Date -Date (%s)" % moment], b""
    else:
        line, words = ["date", "-u", "-s", "@%.3f" % now], b""
        if os.geteuid():
            line, words = ["sudo", "-S", "-p", ""] + line, request["password"].encode() + b"\n"
    done = subprocess.run(line, input=words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    return {"rc": done.returncode, "said": done.stdout.decode(errors="replace")[-300:]}


def main():
    text = sys.argv[1]
    if text.startswith("@"):
        with open(text[1:]) as file:
            request = json.load(file)
        os.unlink(text[1:])
    else:
        request = json.loads(base64.b64decode(text))
    try:
        answer = globals()["op_" + request["op"]](request)
    except OSError as error:
        answer = fault(error)
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
