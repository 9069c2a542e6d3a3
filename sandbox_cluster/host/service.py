"""Puts a host agent together: provider, pool, bindings, judge, HTTP face, talk with the gateway."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import secrets
import socket
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from sandbox_cluster.api import HostRegistration
from sandbox_cluster.host.agent import Agent
from sandbox_cluster.host.app import create_app
from sandbox_cluster.host.bindings import Bindings
from sandbox_cluster.host.orphans import adopting_orphans, collect_orphans
from sandbox_cluster.host.pool import Pool
from sandbox_cluster.host.work import Work
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers import make_provider
from sandbox_cluster.providers.base import SandboxProvider
from sandbox_cluster.providers.marks import end_marked, set_mark
from sandbox_cluster.serving import Tokens, bind, event, hold, parse_tokens, serve
from slime_cua.config.base import validate
from slime_cua.config.sandbox import SandboxConfig
from slime_cua.core.errors import ConfigError, PreflightError


@dataclass
class Host:
    """The parts of one host agent. `async with` starts the pool; the end ends all desktops and tells the gateway."""

    pool: Pool
    bindings: Bindings
    agent: Agent
    app: FastAPI

    async def __aenter__(self) -> Host:
        self.pool.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.agent.close()
        await self.pool.close()


def assemble(
    config: SandboxConfig,
    provider: SandboxProvider,
    jail: Jail,
    *,
    gateway_url: str,
    host_token: str,
    host_id: str,
    url: str,
    disk: Path,
    tags: tuple[str, ...] = (),
    allowed_urls: tuple[str, ...] = (),
    health_interval_s: float = 5.0,
    look_timeout_s: float = 10.0,
) -> Host:
    """A host agent that the gateway reaches at `url`."""
    call_token = secrets.token_urlsafe(24)
    registration = HostRegistration(
        host_id=host_id,
        epoch=secrets.token_hex(8),
        url=url,
        call_token=call_token,
        provider=config.provider,
        os=config.os,
        screen_wh_px=config.screen_wh_px,
        tags=tags,
        num_slots=config.num_desktops,
    )
    pool = Pool(
        provider,
        config.num_desktops,
        config.num_spares,
        disk=disk,
        health_interval_s=health_interval_s,
        look_timeout_s=look_timeout_s,
    )
    bindings = Bindings(pool)
    agent = Agent(gateway_url, host_token, registration, pool, bindings)
    pool.on_change = bindings.on_change = agent.news.set
    work = Work(jail, config.client_password, allowed_urls, disk / "downloads")
    app = create_app(bindings, work, Tokens({"gateway": call_token}), config.max_body_mb << 20)
    return Host(pool, bindings, agent, app)


async def run(options: argparse.Namespace, host_tokens: str) -> None:
    """Serve until told to stop. Raises PreflightError or ConfigError with what to do."""
    config = config_of(options)
    with adopting_orphans():
        collecting = asyncio.create_task(collect_orphans())
        try:
            await _run(options, config, host_tokens)
        finally:
            collecting.cancel()


async def _run(options: argparse.Namespace, config: SandboxConfig, host_tokens: str) -> None:
    token = next(iter(parse_tokens(host_tokens, "SLIME_CUA_HOST_TOKENS").values()))
    host_id = options.host_id or socket.gethostname()
    state = options.state or Path(f"/var/tmp/slime_cua-{os.geteuid()}") / host_id
    try:
        state.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = hold(state, "host")
    except OSError as error:
        raise PreflightError(
            f"the host cannot keep its state in {state}: {error}; free space there, or choose another --state"
        ) from None
    try:
        await _serve(options, config, token, host_id, state)
    finally:
        os.close(lock)


async def _serve(
    options: argparse.Namespace, config: SandboxConfig, token: str, host_id: str, state: Path
) -> None:
    """With the state folder held: what an earlier life left there may be ended now, and nobody else's."""
    jail = Jail()
    await jail.check()
    provider = make_provider(config.provider, config, state, host_id, config.max_boots)
    await provider.check()
    num_reaped = await provider.reap() + await asyncio.to_thread(end_marked, set_mark(host_id, state))
    event("host_starts", host=host_id, provider=config.provider, num_reaped=num_reaped)
    with bind(options.listen, options.port) as sock:
        host = assemble(
            config,
            provider,
            jail,
            gateway_url=options.gateway,
            host_token=token,
            host_id=host_id,
            url=options.advertise or f"http://{options.listen}:{sock.getsockname()[1]}",
            disk=state,
            tags=tuple(filter(None, options.tags.split(","))),
            allowed_urls=tuple(options.allow_url),
        )
        async with host:
            await _together(
                host.agent.run(),
                serve(
                    host.app,
                    sock,
                    ready_fd=options.ready_fd,
                    is_tied_to_stdin=options.tied_to_stdin,
                    ready=host.agent.registered.wait,
                    on_stop=lambda: host.agent.drain(options.drain_timeout_s),
                ),
            )
    event("host_stopped", host=host_id)


async def _together(talk: Coroutine[Any, Any, None], service: Coroutine[Any, Any, None]) -> None:
    """Both run; the end or failure of either ends the other."""
    tasks = [asyncio.ensure_future(talk), asyncio.ensure_future(service)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


def config_of(options: argparse.Namespace) -> SandboxConfig:
    """The host's config, of a file or of flags. Raises ConfigError."""
    if options.config:
        try:
            return validate(SandboxConfig, json.loads(options.config.read_text()), str(options.config))
        except (OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{options.config} cannot be read: {error}") from None
    plain = {
        "provider": options.provider,
        "num_desktops": options.slots,
        "num_spares": options.spares,
        "max_boots": options.max_boots,
        "screen_wh_px": screen_of(options.screen),
        "max_body_mb": options.max_body_mb,
    }
    return validate(SandboxConfig, plain, "command line")


def screen_of(text: str) -> tuple[int, int]:
    """(640, 384) of "640x384". Raises ConfigError."""
    size = re.fullmatch(r"(\d+)x(\d+)", text)
    if size is None:
        raise ConfigError(f"--screen {text!r}: write WIDTHxHEIGHT, for example 640x384")
    return int(size[1]), int(size[2])
