"""Run by test_gateway_osworld_client in an environment that has desktop-env 1.0.2: OSWorld's own controllers, unmodified,
against an address and a port text. What their modules import beside `requests` and is not used here is stubbed. Prints JSON.
"""

import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any


class _Anything(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


for name in (
    "playwright",
    "playwright.sync_api",
    "pydrive",
    "pydrive.auth",
    "pydrive.drive",
    "dotenv",
    "desktop_env.evaluators",
    "desktop_env.evaluators.metrics",
    "desktop_env.evaluators.metrics.utils",
):
    sys.modules[name] = _Anything(name)
sys.modules["dotenv"].load_dotenv = lambda *_, **__: None  # type: ignore[attr-defined]

from desktop_env.controllers.python import PythonController  # noqa: E402
from desktop_env.controllers.setup import SetupController  # noqa: E402


def main(address: str, port: Any) -> dict[str, Any]:
    controller = PythonController(address, port)
    cache = tempfile.mkdtemp()
    local = Path(cache) / "note.txt"
    local.write_text("from the host\n")
    setup = SetupController(address, port, 9222, 8080, cache, "password", 640, 384)
    steps = [
        {
            "type": "upload_file",
            "parameters": {"files": [{"local_path": str(local), "path": "/home/user/note.txt"}]},
        },
        {
            "type": "execute",
            "parameters": {"command": "echo {SCREEN_WIDTH} > /home/user/width", "shell": True},
        },
        {"type": "launch", "parameters": {"command": ["mousepad", "/home/user/note.txt"]}},
        {"type": "sleep", "parameters": {"seconds": 1.5}},
        {"type": "activate_window", "parameters": {"window_name": "note.txt"}},
    ]
    is_set_up = setup.setup(steps, False)
    controller.execute_python_command("pyautogui.click(300, 200)")
    controller.execute_python_command("pyautogui.hotkey('ctrl', 'end')")
    controller.execute_python_command("pyautogui.typewrite('typed', interval=0.01)")
    controller.execute_python_command("pyautogui.hotkey('ctrl', 's'); time.sleep(0.5)")
    return {
        "set_up": is_set_up,
        "screenshot": (controller.get_screenshot() or b"")[:8].hex(),
        "size": controller.get_vm_screen_size(),
        "platform": controller.get_vm_platform(),
        "note": (controller.get_file("/home/user/note.txt") or b"").decode(),
        "width": (controller.get_file("/home/user/width") or b"").decode(),
        "python": controller.run_python_script("print(6 * 7)"),
        "bash": controller.run_bash_script("echo out; exit 3", timeout=20),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps(main(sys.argv[1], sys.argv[2]), default=str))
