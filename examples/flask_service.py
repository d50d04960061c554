"""A web service of your own in front of modelctl, with Flask and the blocking client.

    pip install flask
    flask --app examples/flask_service.py run --port 9000
    curl -N 'http://127.0.0.1:9000/story?name=Mia'

Flask serves each request in a thread. All threads share one client, so no lock is needed.
"""

from collections.abc import Iterator

from flask import Flask, Response, abort, request

from modelctl import Client, Stream, WireError

MODEL = "stories"
app = Flask(__name__)
client = Client()


@app.get("/story")
def story() -> Response:
    """Stream a story as it is written."""
    name = request.args.get("name", "Mia")
    messages = [{"role": "user", "content": f"Tell me a story about {name} the fox."}]
    stream = client.generate(MODEL, messages=messages, temperature=0, max_tokens=400)
    try:
        first = next(stream)  # an error before the first token gets a status of its own
    except WireError as e:
        abort(503 if e.retryable else 400, str(e))
    return Response(pieces(first.text, stream), mimetype="text/plain")


def pieces(first: str, stream: Stream) -> Iterator[str]:
    """Yield the text. If the reader leaves, the request leaves the GPU with the next step."""
    with stream:
        yield first
        for delta in stream:
            yield delta.text
