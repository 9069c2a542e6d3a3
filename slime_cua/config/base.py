"""Frozen, strict pydantic models and the loader: YAML with `extends:`, `${oc.env:NAME,default}`, dotted overrides."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, TypeVar

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, ConfigDict, ValidationError

from slime_cua.core.errors import ConfigError

M = TypeVar("M", bound="ConfigModel")


class ConfigModel(BaseModel):
    """Base of every section: frozen, unknown keys forbidden, field docstrings kept as descriptions."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def load(model: type[M], path: Path | str | None = None, overrides: list[str] | None = None) -> M:
    """The validated config of `path` with `extends:` resolved and `overrides` ("a.b=1") applied last.

    Raises ConfigError naming key, value and accepted range, or the nearest known keys for an unknown one.
    """
    tree = OmegaConf.create(_read(Path(path)) if path else {})
    try:
        merged = OmegaConf.merge(tree, OmegaConf.from_dotlist(list(overrides or [])))
        plain = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path or 'command line'}: {error}") from error
    return validate(model, plain, source=str(path or "command line"))


def validate(model: type[M], plain: Any, source: str) -> M:
    """`plain` as a `model`; ConfigError with one line per fault otherwise."""
    try:
        return model.model_validate(plain)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(model, fault, source) for fault in error.errors())) from None


def save_resolved(config: ConfigModel, path: Path) -> None:
    """Write the resolved config as YAML, atomically."""
    from slime_cua.core.files import write_atomic

    write_atomic(path, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False).encode())


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    path = path.resolve()
    if path in seen:
        raise ConfigError(f"{path}: `extends:` goes in a circle through {seen[-1]}")
    if not path.is_file():
        raise ConfigError(f"config file {path} does not exist")
    try:
        plain = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(plain, dict):
        raise ConfigError(f"{path}: the top level must be a mapping, not {type(plain).__name__}")
    parent = plain.pop("extends", None)
    if parent is None:
        return plain
    base = OmegaConf.create(_read(path.parent / str(parent), (*seen, path)))
    merged = OmegaConf.to_container(OmegaConf.merge(base, OmegaConf.create(plain)), resolve=False)
    assert isinstance(merged, dict)
    return {str(key): value for key, value in merged.items()}


def _explain(model: type[BaseModel], fault: Any, source: str) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    if fault["type"] != "extra_forbidden":
        return f"{source}: {where} = {fault['input']!r}: {fault['msg']}"
    known = _keys_at(model, fault["loc"][:-1])
    near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known keys: {', '.join(sorted(known))}"
    return f"{source}: unknown key {where}; {hint}"


def _keys_at(model: type[BaseModel], location: tuple[Any, ...]) -> list[str]:
    current: Any = model
    for part in location:
        field = (
            current.model_fields.get(part)
            if isinstance(current, type) and issubclass(current, BaseModel)
            else None
        )
        if field is None:
            return []
        current = field.annotation
        for option in getattr(current, "__args__", ()):
            if isinstance(option, type) and issubclass(option, BaseModel):
                current = option
    return list(current.model_fields) if isinstance(current, type) and issubclass(current, BaseModel) else []
