"""Every verb has rights, a scope, and exactly one method that answers it."""

import inspect
from typing import Any, get_type_hints

import pytest

from protocol.chat import QUESTIONS
from protocol.results import result_of
from protocol.verbs import ADMIN, QUESTION_VERBS, VERBS, ModelScope, NoParams, Verb
from supervisor.calls import Calls

METHODS = {name: method for name, method in vars(Calls).items() if not name.startswith("_") and name != "answer"}


def test_a_verb_without_rights_or_without_a_scope_cannot_be_made() -> None:
    sound: dict[str, Any] = {
        "rights": ADMIN, "scope": ModelScope.ALL, "params": NoParams, "result": "NoResult", "purpose": "Do it.",
    }  # fmt: skip
    Verb(**sound)
    with pytest.raises(ValueError, match="name one right"):
        Verb(**sound | {"rights": frozenset()})
    for name in sound:
        with pytest.raises(TypeError, match=name):
            Verb(**{key: value for key, value in sound.items() if key != name})


def test_each_verb_has_the_method_of_its_name_and_each_method_is_a_verb() -> None:
    assert METHODS.keys() == VERBS.keys()
    assert QUESTIONS.keys() == QUESTION_VERBS
    for verb in VERBS.values():
        assert result_of(verb)


@pytest.mark.parametrize("name", sorted(VERBS.keys() - QUESTION_VERBS))
def test_a_method_takes_the_parameters_of_its_verb(name: str) -> None:
    """A parameter that must be given has no default, and each other one has a default."""
    params: Any = VERBS[name].params
    hints = get_type_hints(params)
    _, _, *taken = inspect.signature(METHODS[name]).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        taken = [parameter for parameter in taken if parameter.kind is not parameter.VAR_KEYWORD]
        hints = {key: hint for key, hint in hints.items() if key in {parameter.name for parameter in taken}}
    assert [parameter.name for parameter in taken] == sorted(hints, key=lambda key: key not in params.__required_keys__)
    for parameter in taken:
        assert (parameter.default is parameter.empty) == (parameter.name in params.__required_keys__)
        assert parameter.annotation in (hints[parameter.name], hints[parameter.name] | None)
