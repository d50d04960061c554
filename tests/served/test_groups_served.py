"""The demo models share a place: each request makes the other model sleep."""

import pytest

from tests.conftest import Serve
from tools.demo_models.corpus import LETTERS_TEST_PROMPTS, STORIES_TEST_REQUESTS

pytestmark = pytest.mark.long


def test_two_demo_models_take_turns(serve: Serve) -> None:
    demo = {"engine": "transformers", "gpu": "cpu", "lazy": True}
    models = {name: {"model_dir": f"demo:{name}", **demo} for name in ("letters", "stories")}
    serving = serve(models, wait=False, groups={"demo": {"models": [*models]}})
    prompt, sorted_letters = LETTERS_TEST_PROMPTS[0]
    asked, told = STORIES_TEST_REQUESTS[0]
    with serving.client() as client:
        for turn in range(2):
            assert client.complete("letters", prompt, temperature=0).text == sorted_letters
            story = client.complete("stories", messages=[{"role": "user", "content": asked}], temperature=0)
            assert story.text == told
            states = {name: serving.status(name) for name in models}
            assert [status["state"] for status in states.values()] == ["asleep", "ready"]
            assert states["letters"]["reason"] == "evicted for stories (group demo: 1 at once)"
            assert [status["generation"] for status in states.values()] == [1, 1], f"turn {turn}: woken, not loaded"
