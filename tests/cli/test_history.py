"""A question is sent with as much of the conversation as fits."""

from modelctl.cli.conversation import History


def sent(history: History) -> list[str]:
    return [message["content"] for message in history.messages("?")]


def test_turns_in_order_behind_the_system_message() -> None:
    history = History("be kind")
    history.add("one", "1")
    history.add("two", "2")
    assert history.messages("three") == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "three"},
    ]
    assert [m["content"] for m in history.messages("three", left_out=1)] == ["be kind", "two", "2", "three"]
    assert history.undo()
    assert sent(history) == ["be kind", "one", "1", "?"]
    history.clear()
    assert not history.undo()
    assert sent(history) == ["be kind", "?"]


def test_room_for_the_next_answer() -> None:
    """An eighth of 800 tokens stays free. Beyond 700 the oldest turns go until at most 525 are left, a byte a token."""
    history = History("s" * 50, context=800)
    for letter in "abcdef":
        history.add(letter * 50, letter * 50)
    assert not history.make_room(700)
    assert len(history) == 6
    assert history.make_room(701)
    assert [text[0] for text in sent(history)] == ["s", "c", "c", "d", "d", "e", "e", "f", "f", "?"]


def test_room_for_an_answer_of_a_given_length() -> None:
    history = History(None, context=800, max_tokens=300)
    history.add("a" * 200, "a" * 200)
    history.add("b" * 50, "b" * 51)
    assert not history.make_room(500)
    assert history.make_room(501)
    assert len(history) == 1
    assert History(None, context=800, max_tokens=900).make_room(5) is False, "nothing is left to leave out"


def test_the_system_message_stays_whatever_it_takes() -> None:
    history = History("s" * 10_000, context=800)
    history.add("a", "a")
    assert history.make_room(799)
    assert sent(history)[0] == "s" * 10_000
    assert len(history) == 0


def test_an_unknown_context_bounds_nothing() -> None:
    history = History("s")
    history.add("a", "a")
    assert not history.make_room(10**9)
