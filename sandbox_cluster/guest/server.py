"""OSWorld's control server over a desktop of ours: the same paths, bodies and answers, so that its client works unmodified.

Kept: method quirks (POST /screen_size), text splitting, `return_code` beside `returncode`. Not kept: its defects (one shared
screenshot file, a bash script run three times after its own crash). Once a command has run, the answer is 200 with the
outcome inside, whatever it was: that client repeats every other answer. Source: OSWorld `desktop_env/server` protocol.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from sandbox_cluster.api import Settle
from sandbox_cluster.guest import extras, windows
from sandbox_cluster.guest.pyautogui import DEFAULT_PAUSE_S, NotUnderstoodError, compile_program
from sandbox_cluster.providers.base import HOME
from sandbox_cluster.providers.desktop import Desktop
from slime_cua.core.errors import SandboxError

EXECUTE_TIMEOUT_S = 120.0
PYTHON_TIMEOUT_S = 30.0
BASH_TIMEOUT_S = 100.0
MAX_BASH_TIMEOUT_S = 3600.0
_NO_SETTLE = Settle(quiet_ms=0, max_ms=0)


def create_app(desktop: Desktop, pause_s: float = DEFAULT_PAUSE_S) -> FastAPI:
    """The control server of `desktop`. `pause_s` follows each pyautogui call, as pyautogui itself would wait."""
    app = FastAPI(title="OSWorld control server", docs_url=None, redoc_url=None, openapi_url=None)

    @app.exception_handler(SandboxError)
    async def gone(_: Request, error: SandboxError) -> Response:
        return _error(503, str(error))

    @app.exception_handler(_BadRequest)
    async def bad(_: Request, error: _BadRequest) -> Response:
        return _error(400, str(error))

    _look_routes(app, desktop)
    _command_routes(app, desktop, pause_s)
    _script_routes(app, desktop)
    _file_routes(app, desktop)
    _program_routes(app, desktop)
    extras.add_routes(app, desktop)
    return app


class _BadRequest(Exception):
    pass


def _look_routes(app: FastAPI, desktop: Desktop) -> None:
    @app.get("/screenshot")
    async def screenshot() -> Response:
        return Response((await desktop.screenshot()).png, media_type="image/png")

    @app.get("/platform")
    async def platform() -> Response:
        return PlainTextResponse("Linux")

    @app.post("/screen_size")
    async def screen_size() -> Any:
        width, height = desktop.screen_wh_px
        return {"width": width, "height": height}

    @app.get("/cursor_position")
    async def cursor_position() -> Any:
        return await windows.pointer(desktop)

    @app.post("/window_size")
    async def window_size(request: Request) -> Any:
        found = await windows.size_of_class(desktop, await _form_text(request, "app_class_name"))
        return _error(404, "no such window") if found is None else {"width": found[0], "height": found[1]}


def _command_routes(app: FastAPI, desktop: Desktop, pause_s: float) -> None:
    async def run(body: dict[str, Any]) -> dict[str, Any] | None:
        """None when the program cannot be started; nothing has run then."""
        command, is_shell = body.get("command", ""), _truth(body.get("shell"))
        played = await _play(desktop, command, pause_s)
        if played is not None:
            return played
        try:
            reply = await desktop.run(command, is_shell=is_shell, timeout_s=EXECUTE_TIMEOUT_S)
        except (OSError, ValueError, TypeError, AttributeError):
            return None
        outcome = {
            "status": "success",
            "output": reply.stdout,
            "error": reply.stderr,
            "returncode": reply.returncode,
        }
        if reply.is_timeout:
            message = f"the command was ended after {EXECUTE_TIMEOUT_S:g} s"
            outcome.update(status="error", message=message, error=reply.stderr + message, returncode=-1)
        return outcome

    @app.post("/execute")
    @app.post("/setup/execute")
    async def execute(request: Request) -> Any:
        outcome = await run(await _json(request))
        return (
            _error(500, "the command cannot be started: no such program or an empty command")
            if outcome is None
            else outcome
        )

    @app.post("/execute_with_verification")
    @app.post("/setup/execute_with_verification")
    async def execute_with_verification(request: Request) -> Any:
        body = await _json(request)
        outcome = await run(body)
        if outcome is None:
            return _error(500, "the command cannot be started: no such program or an empty command")
        wait_s = min(float(body.get("max_wait_time", 10)), EXECUTE_TIMEOUT_S)
        interval_s = max(0.1, float(body.get("check_interval", 1)))
        is_true, waited_s = await windows.verify(desktop, body.get("verification") or {}, wait_s, interval_s)
        result = "passed" if is_true else "failed"
        return {
            **outcome,
            "verification": result,
            "wait_time": waited_s,
            **({} if is_true else {"status": "verification_failed"}),
        }


async def _play(desktop: Desktop, command: Any, pause_s: float) -> dict[str, Any] | None:
    """Play a `python -c` command of pyautogui calls; None when it is something else."""
    if not (
        isinstance(command, list)
        and len(command) == 3
        and command[0] in ("python", "python3")
        and command[1] == "-c"
    ):
        return None
    done = {"status": "success", "output": "", "error": "", "returncode": 0}
    try:
        events = compile_program(str(command[2]), pause_s)
        await desktop.play(events, _NO_SETTLE)
    except NotUnderstoodError:
        return None
    except ValueError as error:
        return {**done, "error": f"ValueError: {error}\n", "returncode": 1}
    return done


def _script_routes(app: FastAPI, desktop: Desktop) -> None:
    @app.post("/run_python")
    async def run_python(request: Request) -> Any:
        code = (await _json(request)).get("code")
        if not isinstance(code, str) or not code:
            return _error(400, "Code not supplied!")
        reply = await desktop.run_script("python", code, PYTHON_TIMEOUT_S)
        is_good = reply.returncode == 0
        message = f"ended after {PYTHON_TIMEOUT_S:g} s" if reply.is_timeout else reply.stdout + reply.stderr
        return {
            "status": "success" if is_good else "error",
            "message": message,
            "need_more": False,
            "output": reply.stdout,
            "error": "TimeoutExpired" if reply.is_timeout else reply.stderr,
            "return_code": -1 if reply.returncode is None else reply.returncode,
        }

    @app.post("/run_bash_script")
    async def run_bash_script(request: Request) -> Any:
        body = await _json(request)
        script = body.get("script")
        if not isinstance(script, str) or not script:
            return _bash_error("Script not supplied!")
        timeout_s = min(float(body.get("timeout") or BASH_TIMEOUT_S), MAX_BASH_TIMEOUT_S)
        cwd = str(body.get("working_dir") or HOME)
        try:
            reply = await desktop.run_script("bash", script, timeout_s, cwd, is_merged=True)
        except OSError as error:
            return _bash_error(f"Working directory does not work: {cwd}: {error.strerror}")
        if reply.is_timeout:
            message = f"{reply.stdout}\nScript execution timed out after {timeout_s:g} seconds"
            return {"status": "error", "output": message, "error": "", "returncode": -1}
        is_good = reply.returncode == 0
        return {
            "status": "success" if is_good else "error",
            "output": reply.stdout,
            "error": "",
            "returncode": reply.returncode,
        }


def _file_routes(app: FastAPI, desktop: Desktop) -> None:
    @app.post("/setup/upload")
    async def upload(request: Request) -> Response:
        form = await request.form()
        path, file = form.get("file_path"), form.get("file_data")
        if not isinstance(path, str) or file is None or isinstance(file, str):
            return _error(400, "file_path and file_data are needed")
        data = await file.read()
        try:
            await desktop.put_file(path, data)
        except (OSError, ValueError) as error:
            return _error(500, f"{path}: {error}")
        return PlainTextResponse(f"File Uploaded: {len(data)} bytes")

    @app.post("/file")
    async def file(request: Request) -> Response:
        path = await _form_text(request, "file_path")
        path = path.replace("$HOME", HOME).replace("${HOME}", HOME)
        try:
            data = await desktop.get_file(path)
        except (OSError, ValueError) as error:
            return JSONResponse({"error": f"File not found: {path}: {error}"}, 404)
        return Response(
            data, media_type="application/octet-stream", headers={"Content-Disposition": "attachment"}
        )

    @app.post("/list_directory")
    async def list_directory(request: Request) -> Any:
        tree = await windows.folder_tree(desktop, str((await _json(request)).get("path", "")))
        return _error(400, "not a folder") if tree is None else {"directory_tree": tree}

    @app.post("/desktop_path")
    async def desktop_path() -> Any:
        return {"desktop_path": f"{HOME}/Desktop"}

    @app.post("/setup/download_file")
    async def download_file() -> Response:
        return _error(501, "local desktops have no network: fetch outside, then POST /setup/upload")


def _program_routes(app: FastAPI, desktop: Desktop) -> None:
    @app.post("/setup/launch")
    async def launch(request: Request) -> Response:
        body = await _json(request)
        command = body.get("command", "")
        try:
            await desktop.launch(command, is_shell=_truth(body.get("shell")))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            return _error(500, f"{command!r} cannot be started: {error}")
        text = command if isinstance(command, str) else " ".join(map(str, command))
        return PlainTextResponse(f"{text} launched successfully")

    @app.post("/setup/open_file")
    async def open_file(request: Request) -> Response:
        path = str((await _json(request)).get("path", ""))
        fault = await windows.open_path(desktop, path)
        return PlainTextResponse("File opened successfully") if fault is None else _error(500, fault)

    @app.post("/setup/activate_window")
    async def activate_window(request: Request) -> Response:
        await _window_command(desktop, "-a", await _json(request))
        return PlainTextResponse("Window activated successfully")

    @app.post("/setup/close_window")
    async def close_window(request: Request) -> Response:
        await _window_command(desktop, "-c", await _json(request))
        return PlainTextResponse("Window closed successfully.")


async def _window_command(desktop: Desktop, flag: str, body: dict[str, Any]) -> None:
    name = str(body.get("window_name", ""))
    if not name:
        raise _BadRequest("window_name is needed")
    await windows.command(desktop, flag, name, _truth(body.get("strict")), _truth(body.get("by_class")))


async def _json(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise _BadRequest("the body is not JSON") from None
    if not isinstance(body, dict):
        raise _BadRequest("the body is not a JSON object")
    return body


async def _form_text(request: Request, name: str) -> str:
    value = (await request.form()).get(name)
    if not isinstance(value, str) or not value:
        raise _BadRequest(f"{name} is required")
    return value


def _truth(value: Any) -> bool:
    """Task files have `shell: "true"` as text, too."""
    return value.lower() in ("true", "1", "yes") if isinstance(value, str) else bool(value)


def _error(code: int, message: str) -> JSONResponse:
    return JSONResponse({"status": "error", "message": message}, code)


def _bash_error(message: str) -> JSONResponse:
    return JSONResponse({"status": "error", "output": message, "error": "", "returncode": -1}, 400)
