"""A web service of your own in front of modelctl, with FastAPI and the asyncio client.

    pip install fastapi uvicorn
    uvicorn --app-dir examples fastapi_service:app --port 9000
    curl -N 'http://127.0.0.1:9000/story?name=Mia'

It takes the place of a service that loads a model into its own process and lets one request at a time use the
generator. Here any number of requests stream at once, and a worker's death costs none of them. The service can be
restarted without loading a model again.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse

from modelctl import AsyncClient, AsyncStream, WireError

MODEL = "stories"


@asynccontextmanager
async def connected(app: FastAPI) -> AsyncIterator[None]:
    """Keep one connection for all requests. It connects anew by itself when the supervisor was away."""
    async with AsyncClient() as client:
        app.state.client = client
        yield


app = FastAPI(lifespan=connected)


@app.get("/story")
async def story(name: str, request: Request) -> StreamingResponse:
    """Stream a story as it is written."""
    client: AsyncClient = request.app.state.client
    messages = [{"role": "user", "content": f"Tell me a story about {name} the fox."}]
    stream = client.generate(MODEL, messages=messages, temperature=0, max_tokens=400)
    try:
        first = await anext(stream)  # an error before the first token gets a status of its own
    except WireError as e:
        raise HTTPException(503 if e.retryable else 400, str(e)) from None
    return StreamingResponse(pieces(first.text, stream), media_type="text/plain; charset=utf-8")


async def pieces(first: str, stream: AsyncStream) -> AsyncIterator[str]:
    """Yield the text. If the reader leaves, the request leaves the GPU with the next step."""
    async with stream:
        yield first
        async for delta in stream:
            yield delta.text
