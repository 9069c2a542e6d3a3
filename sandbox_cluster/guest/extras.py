"""OSWorld's less used endpoints over a desktop of ours: accessibility tree, terminal text, recording, wallpaper.

Each works with programs of the desktop; one that is not installed is a 501 that names it and the line that brings it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from sandbox_cluster.providers.base import HOME
from sandbox_cluster.providers.desktop import Desktop

RECORDING = "/tmp/recording.mp4"
RECORDING_FPS = 5
"""OSWorld records 30 a second, which takes most of a core."""
MAX_RECORDING_BYTES = 200 << 20
LOOK_TIMEOUT_S = 60.0
MAX_TREE_BYTES = 16 << 20
_WALKER = (Path(__file__).parent / "accessibility.py").read_text()
_EMPTY_TREE = '<desktop-frame xmlns:st="https://accessibility.ubuntu.example.org/ns/state"/>'
_PID, _WALLPAPER = "/tmp/.recording.pid", f"{HOME}/.wallpaper"
_START = f"""
command -v ffmpeg >/dev/null || exit 127
[ -e {_PID} ] && kill -0 "$(cat {_PID})" 2>/dev/null && exit 75
rm -f {RECORDING}
ffmpeg -y -loglevel error -f x11grab -draw_mouse 1 -framerate {RECORDING_FPS} -i :0 -c:v libx264 -preset ultrafast \
    -pix_fmt yuv420p -vf 'pad=ceil(iw/2)*2:ceil(ih/2)*2' {RECORDING} </dev/null >/tmp/.recording.log 2>&1 &
echo $! > {_PID}
for i in $(seq 50); do [ -s {RECORDING} ] && exit 0; kill -0 "$(cat {_PID})" || exit 1; sleep 0.1; done
"""
_END = f"""
[ -e {_PID} ] || exit 75
pid=$(cat {_PID}); rm -f {_PID}
kill -INT "$pid" || exit 75
for i in $(seq 200); do kill -0 "$pid" 2>/dev/null || exit 0; sleep 0.05; done
exit 1
"""


def add_routes(app: FastAPI, desktop: Desktop) -> None:
    """The endpoints of this module."""
    _look_routes(app, desktop)
    _recording_routes(app, desktop)
    _wallpaper_routes(app, desktop)


async def _walk(desktop: Desktop, mode: str) -> tuple[str, str]:
    """What the walker prints, and the reason when that is nothing."""
    reply = await desktop.run(
        ["/usr/bin/python3", "-I", "-c", _WALKER, mode],
        timeout_s=LOOK_TIMEOUT_S,
        max_output_bytes=MAX_TREE_BYTES,
    )
    if reply.is_timeout:
        return "", f"the programs on the desktop did not tell their tree within {LOOK_TIMEOUT_S:g} s"
    if reply.returncode != 0 or reply.is_truncated:
        return "", f"the walk failed: {reply.stderr.strip()[-300:] or 'the tree is too large'}"
    text = reply.stdout.strip()
    if text.startswith('{"reason"'):
        return "", str(json.loads(text)["reason"])
    return text, ""


def _look_routes(app: FastAPI, desktop: Desktop) -> None:
    @app.get("/accessibility")
    async def accessibility() -> Any:
        tree, reason = await _walk(desktop, "tree")
        return {"AT": _EMPTY_TREE, "reason": reason} if reason else {"AT": tree}

    @app.get("/terminal")
    async def terminal() -> Any:
        text, reason = await _walk(desktop, "terminal")
        if reason:
            return {"output": None, "status": "success", "reason": reason}
        return {"output": json.loads(text)["output"], "status": "success"}


def _recording_routes(app: FastAPI, desktop: Desktop) -> None:
    @app.post("/start_recording")
    async def start_recording() -> Response:
        reply = await desktop.run(_START, is_shell=True, timeout_s=30)
        if reply.returncode == 127:
            return _missing("ffmpeg", "ffmpeg")
        if reply.returncode == 75:
            return _error(400, "a recording runs already")
        if reply.returncode != 0:
            log = (await desktop.run(["cat", "/tmp/.recording.log"])).stdout
            return _error(500, f"ffmpeg did not start: {log.strip()[-300:]}")
        return JSONResponse({"status": "success", "message": "Started recording successfully."})

    @app.post("/end_recording")
    async def end_recording() -> Response:
        reply = await desktop.run(_END, is_shell=True, timeout_s=30)
        if reply.returncode != 0:
            is_none = reply.returncode == 75
            return _error(400 if is_none else 500, "no recording runs" if is_none else "ffmpeg did not end")
        try:
            video = await desktop.get_file(RECORDING, MAX_RECORDING_BYTES)
        except OSError as error:
            return _error(500, f"the recording is not there: {error}")
        return Response(video, media_type="video/mp4")


def _wallpaper_routes(app: FastAPI, desktop: Desktop) -> None:
    @app.post("/setup/change_wallpaper")
    async def change_wallpaper(request: Request) -> Response:
        body = await request.json()
        path = str(body.get("path", "")) if isinstance(body, dict) else ""
        try:
            picture = await desktop.get_file(path)
        except (OSError, ValueError) as error:
            return _error(404, f"no picture {path!r}: {error}")
        await desktop.put_file(_WALLPAPER, picture)
        try:
            reply = await desktop.run(["feh", "--no-fehbg", "--bg-scale", _WALLPAPER], timeout_s=30)
        except OSError:
            return _missing("feh", "feh")
        if reply.returncode != 0:
            return _error(400, f"feh cannot show {path}: {reply.stderr.strip()[-300:]}")
        return Response("Wallpaper changed successfully", media_type="text/plain")

    @app.post("/wallpaper")
    async def wallpaper() -> Response:
        try:
            return Response(await desktop.get_file(_WALLPAPER), media_type="image/png")
        except OSError:
            return _error(
                404, "no wallpaper was set by /setup/change_wallpaper; the background is one colour"
            )


def _missing(program: str, package: str) -> Response:
    line = f"apt-get install -y --no-install-recommends {package}"
    return _error(501, f"this needs {program}, which is not on the desktop's machine; as root: {line}")


def _error(code: int, message: str) -> JSONResponse:
    return JSONResponse({"status": "error", "message": message}, code)
