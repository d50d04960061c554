"""The model that ``run`` asks: find it by its name, and wait until it is loaded."""

import re
import shlex
import time
from contextlib import suppress
from typing import Any

from protocol.client.model_names import means, names_of, unknown_among
from protocol.client.sync_client import Client
from protocol.errors import ErrorCode, WireError
from protocol.limits import MODEL_NAME_PATTERN
from protocol.unknown_models import nearest
from supervisor.cli.live_lines import LiveLines
from supervisor.cli.waiting import goes_on, shown


def check_name(client: Client, model: str) -> None:
    """Raise WireError if no model has this name.

    Call this if the command line has one argument only, which may be a prompt without a model. The error then says how
    to give both. It repeats the argument only if a model could have that name, because an error holds no prompt.
    """
    listed = client.models()["models"]
    if any(means(each, model) for each in listed):
        return
    names = [name for each in listed for name in names_of(each)]
    if nearest(model, names) is not None:
        raise unknown_among(listed, model)
    if re.fullmatch(MODEL_NAME_PATTERN, model):
        wrong, prompt = f"no model {model!r} is configured", shlex.quote(model)
    else:
        wrong, prompt = f"a text of {len(model)} characters is no model's name", "PROMPT"
    there = f"there is {', '.join(sorted(names)) or 'none'}"
    one = names[0] if len(names) == 1 else "MODEL"
    way = f"`modelctl run {one} {prompt}`"
    message = f"{wrong}: {there}; the first argument is the model, and a prompt comes after it: {way}"
    raise WireError(ErrorCode.MODEL_NOT_FOUND, message, field="model")


def loaded(client: Client, model: str, *, quiet: bool) -> dict[str, Any]:
    """Wait until the model is loaded, or will not be loaded by itself. Show the progress. Return the model's status.

    The wait is needed because the status of a model without a worker lacks its context and its chat template.
    """
    live = LiveLines()
    status = _seen(client, model)
    with goes_on(f"the load of {model} goes on: `modelctl ps` shows it"):
        # The request wakes a model that is asleep.
        while status["state"] not in ("ready", "draining", "stopped", "failed", "stopping", "asleep"):
            if status["state"] == "unloaded":
                # This call only starts the load. Its error says that the model is being loaded.
                with suppress(WireError):
                    client.tokenize(model, "")
            if not quiet:
                live.show({model: shown(status)})
            time.sleep(0.1)
            status = _seen(client, model)
    return status


def _seen(client: Client, model: str) -> dict[str, Any]:
    """Return the model's status, as far as the key may see it."""
    try:
        seen: dict[str, Any] = client.status(model)["models"][0]
        return seen
    except WireError as e:
        if e.code is not ErrorCode.FORBIDDEN:
            raise
    listed = client.models()["models"]  # for a key with only the right infer
    for each in listed:
        if means(each, model):
            return {**each, "progress": None}
    raise unknown_among(listed, model)
