"""The small program inside a local desktop: runs programs, reads and writes files, hands out the screen for the host outside.

Runs as `/usr/bin/python3 -I -S agent.py CONTROL_FD DISPLAY_FD FRAMEBUFFER_DIR_FD` with the standard library only, and is never
imported by the host. It is the first process of the pid namespace that all programs live in: none of them can end or stop
it. One thread, one event loop. A request is one packet on the control socket: a JSON object {"id", "op", ...} with at most one
file attached (bytes to write, or a script). The answer is {"id", ...} with files attached: outputs, a file's bytes, the X
connection, the framebuffer. Bulk data always travels in anonymous memory files, so neither side opens the other's paths.
Packets above PACKET_BYTES are sent as b"@" with the JSON as first attached file. The program ends when the host is gone.
"""

# The standard library's plain os calls: pathlib and contextlib would double the start-up time.
# ruff: noqa: PTH103, PTH120, PTH108, PTH123, PTH208, SIM105, UP031

from __future__ import annotations

import ctypes
import errno
import json
import os
import selectors
import signal
import socket
import stat
import sys
import time

PACKET_BYTES = 60_000
CHUNK = 65536
MAX_FILES = 4096
BUS_PATH = "/run/user/bus"
SCRIPT_DIR = "/tmp/.scripts"
DEFAULT_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ENVIRONMENT = {
    "PATH": "/opt/bin:/usr/local/bin:/usr/bin:/bin:/usr/games",
    "HOME": "/home/user",
    "USER": "user",
    "LOGNAME": "user",
    "SHELL": "/bin/bash",
    "LANG": "C.UTF-8",
    "DISPLAY": ":0",
    "XDG_RUNTIME_DIR": "/run/user",
    "XDG_SESSION_TYPE": "x11",
    "XDG_CURRENT_DESKTOP": "Openbox",
    "DBUS_SESSION_BUS_ADDRESS": "unix:path=" + BUS_PATH,
    "NO_AT_BRIDGE": "1",
    "GSETTINGS_BACKEND": "keyfile",
    "PYTHONPATH": "/opt/lib",
    "PYTHONDONTWRITEBYTECODE": "1",
}


def set_dumpable(is_dumpable):
    """Programs of the same user may look into this process, or not (prctl PR_SET_DUMPABLE, number 4)."""
    ctypes.CDLL(None).prctl(4, int(is_dumpable), 0, 0, 0)


class Job:
    """A running program whose end somebody waits for."""

    def __init__(self, pid, request, files, script):
        self.pid = pid
        self.request_id = request["id"]
        self.cap = request["cap"]
        self.files = files
        self.output = [bytearray() for _ in files]
        self.is_cut = False
        self.is_timeout = False
        self.script = script
        self.ends_at = time.monotonic() + request["timeout"]
        self.pidfd = os.pidfd_open(pid)


class Agent:
    """The event loop and its operations; an operation is a method called op_NAME."""

    def __init__(self, control, display, frame_folder):
        self.control = control
        self.display = display
        self.frame_folder = frame_folder
        self.selector = selectors.DefaultSelector()
        self.jobs = []
        self.timers = []
        self.bus = None
        self.selector.register(control, selectors.EVENT_READ, self.on_packet)
        ended, theirs = os.pipe()
        for end in (ended, theirs):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(theirs)
        self.selector.register(ended, selectors.EVENT_READ, lambda: os.read(ended, CHUNK))

    def run_forever(self):
        while True:
            now = time.monotonic()
            waits = [job.ends_at for job in self.jobs if not job.is_timeout] + [at for at, _ in self.timers]
            timeout = max(0.0, min(waits) - now) if waits else None
            for key, _ in self.selector.select(timeout):
                if self.selector.get_map().get(key.fd) is key:
                    key.data()
            now = time.monotonic()
            for timer in [timer for timer in self.timers if timer[0] <= now]:
                self.timers.remove(timer)
                timer[1]()
            for job in self.jobs:
                if not job.is_timeout and now >= job.ends_at:
                    job.is_timeout = True
                    kill_session(job.pid)
            reap_orphans(self.jobs)

    # packets

    def on_packet(self):
        data, files, _, _ = socket.recv_fds(self.control, 2 * PACKET_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        if data == b"@":
            body = files.pop(0)
            data = read_all(body)
            os.close(body)
        request = json.loads(data)
        try:
            getattr(self, "op_" + request["op"])(request, files)
        except OSError as error:
            self.answer(
                request["id"], {"errno": error.errno or errno.EIO, "error": error.strerror or str(error)}
            )
        finally:
            for file in files:
                os.close(file)

    def answer(self, request_id, values, blobs=(), files=()):
        """Send the answer; `blobs` travel as memory files before `files`."""
        attached = [memory_file(blob) for blob in blobs]
        packet = json.dumps({"id": request_id, **values}).encode()
        try:
            if len(packet) > PACKET_BYTES:
                attached.insert(0, memory_file(packet))
                packet = b"@"
            socket.send_fds(self.control, [packet], [*attached, *files])
        finally:
            for file in attached:
                os.close(file)

    # operations

    def op_environment(self, request, files):
        """Variables of programs started from now on; null takes one away."""
        for name, value in request["values"].items():
            ENVIRONMENT.pop(name, None)
            if value is not None:
                ENVIRONMENT[name] = value
        self.answer(request["id"], {})

    def op_unpack(self, request, files):
        """Write many files from one attached file: entries are [path, mode, size] in its order."""
        with os.fdopen(os.dup(files[0]), "rb") as source:
            source.seek(0)
            for path, mode, size in request["entries"]:
                if path.endswith("/"):
                    os.makedirs(path, exist_ok=True)
                else:
                    write_file(path, source.read(size), mode)
        self.answer(request["id"], {})

    def op_put(self, request, files):
        write_file(request["path"], read_all(files[0]), 0o644)
        self.answer(request["id"], {})

    def op_get(self, request, files):
        file = os.open(request["path"], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise OSError(errno.EINVAL, "not a regular file", request["path"])
            limit = request["max"]
            data = read_all(file, limit + 1)
            if len(data) > limit or status.st_size > limit:
                size = max(status.st_size, len(data))
                raise OSError(errno.EFBIG, "file has %d bytes, more than %d" % (size, limit), request["path"])
        finally:
            os.close(file)
        self.answer(request["id"], {}, [data])

    def op_connect(self, request, files):
        """A TCP connection to a port inside; it must be there at once: the loopback never makes us wait."""
        connection = socket.create_connection(("127.0.0.1", request["port"]), 1.0)
        with connection:
            self.answer(request["id"], {}, files=[connection.fileno()])

    def op_start_x(self, request, files):
        """Wait for the X server, open the bus socket; the answer carries an X connection and the framebuffer file."""
        os.makedirs("/run/user", exist_ok=True)
        self.listen_for_bus()
        started = bytearray()

        def on_ready():
            chunk = os.read(self.display, 64)
            started.extend(chunk)
            if chunk and b"\n" not in started:
                return
            self.selector.unregister(self.display)
            os.close(self.display)
            if not chunk:
                self.answer(request["id"], {"errno": errno.EIO, "error": "Xvfb ended before it was ready"})
                return
            self.op_screen(request, files)

        self.selector.register(self.display, selectors.EVENT_READ, on_ready)

    def op_screen(self, request, files):
        """An X connection and the framebuffer file."""
        display = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        display.settimeout(1.0)
        display.connect("\0/tmp/.X11-unix/X0")
        frame = os.open("Xvfb_screen0", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.frame_folder)
        self.answer(request["id"], {}, files=[display.fileno(), frame])
        os.close(frame)
        display.close()

    def op_end_programs(self, request, files):
        """Kill all programs: they hold the screen, or there is no room to start another."""
        try:
            for _ in range(3):
                os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.answer(request["id"], {})

    def listen_for_bus(self):
        """Session bus on demand: its daemon starts when the first program connects."""
        bus = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        bus.bind(BUS_PATH)
        bus.listen(64)

        def on_connect():
            self.selector.unregister(bus)
            command = "LISTEN_PID=$$ LISTEN_FDS=1 exec dbus-daemon --session --address=systemd: --nofork --nopidfile"
            argv = ["/bin/sh", "-c", command]
            spawn(argv, cwd="/", out=None, err=None, keep=((bus.fileno(), 3),), is_victim=False)
            bus.close()

        self.selector.register(bus, selectors.EVENT_READ, on_connect)

    def op_run(self, request, files):
        argv = list(request["argv"])
        if request["detached"]:
            spawn(argv, request["cwd"], None, None)
            self.answer(request["id"], {})
            return
        script = None
        if files:
            script = "%s/%d%s" % (SCRIPT_DIR, request["id"], request["suffix"])
            write_file(script, read_all(files[0]), 0o700)
            argv.append(script)
        pipes = [os.pipe() for _ in range(1 if request["merged"] else 2)]
        try:
            pid = spawn(argv, request["cwd"], pipes[0][1], pipes[-1][1])
        except OSError:
            for ours, _ in pipes:
                os.close(ours)
            raise
        finally:
            for _, theirs in pipes:
                os.close(theirs)
        job = Job(pid, request, [ours for ours, _ in pipes], script)
        self.jobs.append(job)
        for index, ours in enumerate(job.files):
            os.set_blocking(ours, False)
            self.selector.register(
                ours, selectors.EVENT_READ, lambda i=index, f=ours: self.on_output(job, i, f)
            )
        self.selector.register(job.pidfd, selectors.EVENT_READ, lambda: self.on_end(job))

    # running programs

    def on_output(self, job, index, file):
        """Keep what fits, throw the rest away; forget a pipe that nobody writes to any more."""
        try:
            chunk = os.read(file, CHUNK)
        except BlockingIOError:
            return False
        if not chunk:
            self.selector.unregister(file)
            os.close(file)
            job.files[index] = -1
            return False
        room = job.cap - len(job.output[index])
        job.output[index] += chunk[:room] if room > 0 else b""
        job.is_cut = job.is_cut or len(chunk) > room
        return True

    def on_end(self, job):
        """The program ended: take what is in the pipes and answer. Programs it left behind may write on, unheard."""
        self.selector.unregister(job.pidfd)
        os.close(job.pidfd)
        _, status = os.waitpid(job.pid, 0)
        self.jobs.remove(job)
        for index, file in enumerate(job.files):
            for _ in range(32):
                if job.files[index] < 0 or not self.on_output(job, index, file):
                    break
        job.cap = 0
        if job.script:
            try:
                os.unlink(job.script)
            except OSError:
                pass
        code = None if job.is_timeout else os.waitstatus_to_exitcode(status)
        values = {"rc": code, "timeout": job.is_timeout, "cut": job.is_cut}
        self.answer(job.request_id, values, [bytes(part) for part in job.output])


def spawn(argv, cwd, out, err, keep=(), is_victim=True):
    """Start a program in its own session and return its pid; OSError if it cannot be started.

    `keep` has files it inherits (or pairs: file, number there). A victim is what the kernel ends first without memory.
    """
    report, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number in DEFAULT_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            null = os.open("/dev/null", os.O_RDWR)
            os.dup2(null, 0)
            os.dup2(null if out is None else out, 1)
            os.dup2(null if err is None else err, 2)
            for item in keep:
                if isinstance(item, tuple):
                    os.dup2(item[0], item[1])
                else:
                    os.set_inheritable(item, True)
            if is_victim:
                os.closerange(3, theirs)
                os.closerange(theirs + 1, MAX_FILES)
                set_dumpable(True)
                with open("/proc/self/oom_score_adj", "w") as file:
                    file.write("500")
            os.chdir(cwd)
            os.execvpe(argv[0], argv, ENVIRONMENT)
        except BaseException as error:
            code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            os.write(theirs, b"%d" % code)
        os._exit(127)
    os.close(theirs)
    failed = os.read(report, 16)
    os.close(report)
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int(failed), os.strerror(int(failed)), argv[0])
    return pid


def process_table():
    """{pid: (parent, session)} of all processes inside."""
    table = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:
                continue
            table[int(name)] = (int(fields[1]), int(fields[3]))
    return table


def kill_session(pid):
    """Kill a program and everything of its session or below it. Twice, for what was forked meanwhile."""
    for _ in range(2):
        table = process_table()
        doomed = {pid} | {other for other, (_, session) in table.items() if session == pid}
        grown = True
        while grown:
            more = {other for other, (parent, _) in table.items() if parent in doomed} - doomed
            doomed |= more
            grown = bool(more)
        for other in doomed:
            try:
                os.kill(other, signal.SIGKILL)
            except ProcessLookupError:
                pass


def reap_orphans(jobs):
    """Collect ended programs that nobody waits for."""
    waited = {job.pid for job in jobs}
    while True:
        try:
            result = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if result is None or result.si_pid in waited:
            return
        os.waitpid(result.si_pid, 0)


def read_all(file, limit=1 << 40):
    """Bytes of `file` from its start, at most `limit`."""
    parts, position = [], 0
    while position < limit:
        try:
            chunk = os.pread(file, min(1 << 20, limit - position), position)
        except OSError as error:
            if error.errno != errno.ESPIPE:
                raise
            chunk = os.read(file, min(1 << 20, limit - position))
        if not chunk:
            break
        parts.append(chunk)
        position += len(chunk)
    return b"".join(parts)


def write_file(path, data, mode):
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
    finally:
        os.close(file)


def memory_file(data):
    file = os.memfd_create("data", os.MFD_CLOEXEC)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    return file


def main():
    set_dumpable(False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    control, display, frame_folder = (int(text) for text in sys.argv[1:4])
    for file in (control, display, frame_folder):
        os.set_inheritable(file, False)
    os.umask(0o022)
    Agent(socket.socket(fileno=control), display, frame_folder).run_forever()


if __name__ == "__main__":
    main()
