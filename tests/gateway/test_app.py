"""The gateway's application works in the test's process, with a real supervisor."""

import asyncio
from pathlib import Path

import httpx2

from gateway.app import make_app
from protocol.process.worker_spec import GatewaySettings
from tests.serving import Serving, engine


def test_a_gateway_that_serves_is_alive() -> None:
    async def ask(runtime_dir: Path) -> httpx2.Response:
        app = make_app(GatewaySettings(runtime_dir=str(runtime_dir), auth="none"))
        transport = httpx2.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000") as client,
        ):
            return await client.get("/livez")

    with Serving({"m": engine()}) as serving:
        answer = asyncio.run(ask(serving.runtime_dir))
    assert answer.status_code == 200
