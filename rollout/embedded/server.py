"""The embedded engine over HTTP: SGLang's endpoints."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from rollout.embedded import api
from rollout.embedded.engine import Engine
from rollout.embedded.prompt import build_prompt
from rollout.embedded.request import Finished
from rollout.embedded.request import Request as EngineRequest
from rollout.embedded.weights import WeightUpdater, with_abort
from slime_cua.convert.weight_stream import combined_digest


class Service:
    """What the endpoints share."""

    def __init__(self, engine: Engine, *, max_context_tokens: int, timeout_s: float) -> None:
        self.engine = engine
        self.model = engine.model
        self.updater = WeightUpdater(engine, timeout_s)
        self.max_context_tokens = min(max_context_tokens, engine.model.max_positions)
        self.timeout_s = timeout_s
        self.started_s = time.time()

    async def run(self, function: Callable[[], Any]) -> Any:
        """`function` on the engine's thread, within the deadline."""
        future: Future[Any] = self.engine.call(function)
        return await asyncio.wait_for(asyncio.wrap_future(future), self.timeout_s)

    def request(self, body: api.GenerateBody, finished: asyncio.Future[Finished]) -> EngineRequest:
        """Check a body and make the engine's request of it. Raises ValueError with what to send instead."""
        params = body.sampling_params
        if body.return_logprob and params.is_cut:
            raise ValueError(
                "return_logprob with top_p < 1, top_k or temperature 0: log-probs are those of softmax(logits / "
                "temperature), which is then not what is sampled from; use top_p=1, top_k=-1, temperature > 0"
            )
        vocab = self.model.vocab_size
        bad = next((token for token in body.input_ids if not 0 <= token < vocab), None)
        if bad is not None:
            raise ValueError(f"input_ids hold {bad}: ids must be in 0..{vocab - 1}")
        images = self.model.images.prepare(body.image_data or [])
        prompt = build_prompt(
            body.input_ids,
            [image.grid for image in images],
            [image.sha256 for image in images],
            self.model.image_token_id,
            self.model.images.merge_size,
        )
        room = self.max_context_tokens - len(prompt.ids_N)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt.ids_N)} tokens, images expanded; at most {self.max_context_tokens - 1} "
                "leave room for one new token (max_context_tokens)"
            )
        loop = finished.get_loop()

        def deliver(result: Finished | Exception) -> None:
            loop.call_soon_threadsafe(_settle, finished, result)

        return EngineRequest(body.rid or uuid.uuid4().hex, prompt, images, params.checked(room), deliver)

    def reply(
        self, body: api.GenerateBody, request: EngineRequest, result: Finished, began_s: float
    ) -> dict[str, Any]:
        """SGLang's answer to /generate."""
        params = body.sampling_params
        text = self.model.tokenizer.decode(result.output_ids, skip_special_tokens=params.skip_special_tokens)
        matched = result.reason.get("matched")
        if isinstance(matched, str) and not params.no_stop_trim and matched in text:
            text = text[: text.index(matched)]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": result.reason,
            "prompt_tokens": request.num_prompt,
            "completion_tokens": len(result.output_ids),
            "cached_tokens": result.cached_tokens,
            "image_tokens": request.prompt.num_image_tokens,
            "num_images": len(request.images),
            "weight_version": result.weight_version,
            "e2e_latency": time.monotonic() - began_s,
        }
        if body.return_logprob:
            meta["output_token_logprobs"] = [
                [value, token, None]
                for value, token in zip(result.output_logp, result.output_ids, strict=True)
            ]
        if body.return_routed_experts and result.routed_NLK is not None:
            meta["routed_experts"] = base64.b64encode(result.routed_NLK.astype("<i4").tobytes()).decode()
        return {"text": text, "output_ids": result.output_ids, "meta_info": meta}


def make_app(service: Service) -> FastAPI:
    """The application; its state holds nothing but `service`."""
    app = FastAPI(title="slime_cua embedded engine", docs_url=None, redoc_url=None)
    app.add_exception_handler(RequestValidationError, _explain)
    app.add_exception_handler(ValueError, _refuse)
    _add_generation(app, service)
    _add_control(app, service)
    _add_weights(app, service)
    _add_information(app, service)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/generate")
    async def generate(body: api.GenerateBody, http: Request) -> Response:
        began_s = time.monotonic()
        finished: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        request = await asyncio.to_thread(service.request, body, finished)
        engine.submit(request)
        gone: asyncio.Future[Any] = asyncio.ensure_future(_disconnected(http))
        both: set[asyncio.Future[Any]] = {finished, gone}
        try:
            await asyncio.wait(both, timeout=service.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                reason = "the client is gone" if gone.done() else f"not finished in {service.timeout_s} s"
                engine.call(lambda: engine.abort(request.rid, reason))
            result = await finished
        finally:
            gone.cancel()
        return JSONResponse(service.reply(body, request, result, began_s))

    @app.post("/abort_request")
    async def abort_request(body: api.AbortBody) -> dict[str, Any]:
        if not body.abort_all and not body.rid:
            raise ValueError("abort_request needs rid or abort_all=true")
        rid = None if body.abort_all else body.rid
        return {"num_aborted": await service.run(lambda: engine.abort(rid, "aborted by request"))}


def _add_control(app: FastAPI, service: Service) -> None:
    engine = service.engine

    @app.post("/pause_generation")
    async def pause_generation(body: api.PauseBody) -> dict[str, str]:
        mode = body.mode
        if mode == "retract":
            raise ValueError(
                "mode retract is not served: a request would span weight versions unseen; use abort"
            )
        await service.run(lambda: engine.pause(mode))
        return {"status": "ok", "message": f"paused ({mode})"}

    @app.post("/continue_generation")
    async def continue_generation(body: api.EmptyBody | None = None) -> dict[str, str]:
        await service.run(engine.resume)
        return {"status": "ok", "message": "continued"}

    @app.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(timeout: float = 0.0) -> PlainTextResponse:
        deadline_s = time.monotonic() + timeout
        while True:
            try:
                await service.run(engine.flush)
                break
            except ValueError:
                if time.monotonic() >= deadline_s:
                    raise
            await asyncio.sleep(0.01)
        return PlainTextResponse("the prefix cache is empty\n")


def _add_weights(app: FastAPI, service: Service) -> None:
    engine, updater = service.engine, service.updater

    async def change(work: Callable[[], None], abort_all: bool = False) -> JSONResponse:
        try:
            await service.run(with_abort(engine, abort_all, work))
        except (ValueError, RuntimeError) as error:
            return JSONResponse({"success": False, "message": str(error)}, status_code=400)
        return JSONResponse({"success": True, "message": "done"})

    @app.post("/init_weights_update_group")
    async def init_group(body: api.GroupBody) -> JSONResponse:
        return await change(
            lambda: updater.join_group(
                body.master_address,
                body.master_port,
                body.rank_offset,
                body.world_size,
                body.group_name,
                body.backend,
            )
        )

    @app.post("/destroy_weights_update_group")
    async def destroy_group(body: api.DestroyGroupBody) -> JSONResponse:
        return await change(lambda: updater.leave_group(body.group_name))

    @app.post("/update_weights_from_distributed")
    async def from_distributed(body: api.DistributedBody) -> JSONResponse:
        return await change(
            lambda: updater.receive(
                body.names, body.dtypes, body.shapes, body.group_name, body.weight_version
            ),
            body.abort_all_requests,
        )

    @app.post("/update_weights_from_disk")
    async def from_disk(body: api.DiskBody) -> JSONResponse:
        return await change(
            lambda: updater.load(Path(body.model_path), body.weight_version), body.abort_all_requests
        )

    @app.post("/update_weight_version")
    async def set_version(body: api.VersionBody) -> JSONResponse:
        return await change(lambda: engine.set_version(body.new_version), body.abort_all_requests)

    @app.post("/weights_checker")
    async def weights_checker(body: api.CheckerBody) -> dict[str, Any]:
        digests = await service.run(updater.digests)
        return {
            "success": True,
            "message": "",
            "payload": {
                "algorithm": "slime_cua.convert.weight_stream by Hugging Face name",
                "checksums": digests,
                "per_gpu_checksum": combined_digest(digests),
            },
        }

    @app.api_route("/get_weights_by_name", methods=["GET", "POST"])
    async def weights_by_name(body: api.WeightByNameBody) -> JSONResponse:
        return JSONResponse(await service.run(lambda: updater.values(body.name, body.truncate_size)))


def _add_information(app: FastAPI, service: Service) -> None:
    engine, model = service.engine, service.model

    @app.get("/health")
    async def health() -> Response:
        return Response(status_code=200 if engine.is_alive else 503)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        await service.run(lambda: None)
        return Response(status_code=200 if engine.is_alive else 503)

    @app.get("/model_info")
    async def model_info() -> dict[str, Any]:
        return {
            "model_path": str(model.folder),
            "tokenizer_path": str(model.folder),
            "is_generation": True,
            "weight_version": engine.weight_version,
            "model_type": model.config["model_type"],
            "has_image_understanding": True,
        }

    @app.get("/server_info")
    async def server_info() -> dict[str, Any]:
        return {
            "engine": "slime_cua embedded",
            "status": "ready",
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(model.device),
            "max_context_tokens": service.max_context_tokens,
            "max_running_requests": engine.max_batch,
            "weight_version": engine.weight_version,
            "is_dirty": engine.is_dirty,
            "paused": engine.paused,
            "num_generated_tokens": engine.num_generated,
            "uptime_s": time.time() - service.started_s,
        }

    @app.get("/get_load")
    async def get_load() -> list[dict[str, int]]:
        return [
            {
                "dp_rank": 0,
                "num_reqs": engine.num_running + engine.num_waiting,
                "num_waiting_reqs": engine.num_waiting,
                "num_tokens": engine.num_cached_tokens,
            }
        ]


async def _disconnected(http: Request) -> None:
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            return


def _settle(finished: asyncio.Future[Finished], result: Finished | Exception) -> None:
    if finished.done():
        return
    if isinstance(result, Exception):
        finished.set_exception(result)
    else:
        finished.set_result(result)


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"error": {"message": str(error), "type": "BadRequest"}}, status_code=400)


async def _explain(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = []
    for fault in error.errors():
        where = ".".join(str(part) for part in fault["loc"] if part != "body")
        faults.append(f"{where} = {str(fault.get('input'))[:80]}: {fault['msg']}")
    return JSONResponse({"error": {"message": "; ".join(faults), "type": "BadRequest"}}, status_code=400)
