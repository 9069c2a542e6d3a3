"""Imports go one way. The table is the design's; relative order inside a room is free."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RANKS = [
    {"slime_cua.core"},
    {"slime_cua.config", "slime_cua.observability"},
    {"slime_cua.algo", "slime_cua.kernels", "slime_cua.convert", "sandbox_cluster", "megatron_patches"},
    {"slime_cua.data"},
    {"rollout", "slime_cua.trainer", "slime_cua.sft"},
    {
        "slime_cua.launch",
        "slime_cua.synthesis",
        "slime_cua.skills",
        "slime_cua.evaluation",
        "slime_cua.train",
        "slime_cua.evaluate",
        "slime_cua.cli",
        "slime_cua.__main__",
    },
]
NO_ML = ("slime_cua.core", "slime_cua.config", "sandbox_cluster")
ML = ("torch", "ray", "transformers", "megatron")


def room_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] in ("rollout", "sandbox_cluster", "megatron_patches"):
        return parts[0]
    return ".".join(parts[:2]) if parts[0] == "slime_cua" and len(parts) > 1 else None


def rank_of(room: str) -> int:
    return next(index for index, rooms in enumerate(RANKS) if room in rooms)


def modules() -> list[tuple[str, Path]]:
    roots = ("slime_cua", "rollout", "sandbox_cluster", "megatron_patches")
    files = [path for root in roots for path in sorted((ROOT / root).rglob("*.py"))]
    return [
        (".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), path)
        for path in files
    ]


def imports_of(path: Path) -> list[str]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def test_every_module_stands_in_a_known_room():
    known = set().union(*RANKS)
    rooms = {room_of(name) for name, _ in modules()} - {None}
    assert rooms <= known, f"rooms without a place in the table: {rooms - known}"


def test_imports_only_go_to_lower_or_equal_rooms():
    wrong = []
    for name, path in modules():
        room = room_of(name)
        if room is None:
            continue
        for imported in imports_of(path):
            other = room_of(imported)
            if other is None or other == room or not any(other in rooms for rooms in RANKS):
                continue
            if room == "megatron_patches" or rank_of(other) > rank_of(room):
                wrong.append(f"{name} imports {imported}")
            same_rank = rank_of(other) == rank_of(room)
            if same_rank and {room, other} == {"rollout", "slime_cua.trainer"}:
                wrong.append(f"{name} imports {imported}")
    assert not wrong, "\n".join(wrong)


def test_core_config_and_sandbox_cluster_import_no_machine_learning_stack():
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        if name.startswith(NO_ML)
        for imported in imports_of(path)
        if imported.split(".")[0] in ML
    ]
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_keep_to_their_size():
    wrong = []
    for name, path in modules():
        text = path.read_text()
        if text.count("\n") > 450:
            wrong.append(f"{name} has {text.count(chr(10))} lines: split it (450 is the limit)")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 100:
                    wrong.append(f"{name}.{node.name} has {length} lines: split it (100 is the limit)")
    assert not wrong, "\n".join(wrong)
