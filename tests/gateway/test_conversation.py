"""Blocks of a conversation become the messages that chat templates expect."""

from gateway.conversation import Conversation

NOTE = "<system-reminder>\nnote\n</system-reminder>"


def test_neighbouring_blocks_of_one_role_are_one_message() -> None:
    talk = Conversation()
    talk.system("a")
    talk.system("b")
    talk.user("c")
    talk.user("d")
    talk.reasoned("hm")
    talk.said("e")
    talk.said("f")
    talk.called("1", "look", {"at": 1})
    talk.called("2", "time", {})
    talk.result("1", "seen")
    talk.result("2", "noon")
    talk.result("3", "unknown")
    talk.user("g")
    assert talk.messages() == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "c\n\nd"},
        {
            "role": "assistant",
            "content": "ef",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": 1}}},
                {"id": "2", "type": "function", "function": {"name": "time", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "seen", "tool_call_id": "1", "name": "look"},
        {"role": "tool", "content": "noon", "tool_call_id": "2", "name": "time"},
        {"role": "tool", "content": "unknown", "tool_call_id": "3"},
        {"role": "user", "content": "g"},
    ]


def contents(talk: Conversation) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in talk.messages()]


def test_instructions_within_a_conversation_leave_its_beginning_as_it_is() -> None:
    talk = Conversation()
    talk.system("rules")
    talk.user("hello")
    talk.system("note")
    assert contents(talk) == [("system", "rules"), ("user", f"hello\n\n{NOTE}")]

    talk = Conversation()
    talk.user("hello")
    talk.called("1", "look", {})
    talk.system("note")  # between a call and its result, where no other turn may be
    talk.result("1", "seen")
    assert contents(talk) == [("user", "hello"), ("assistant", ""), ("tool", f"seen\n\n{NOTE}")]
    talk.system("note")  # makes no turn of the user
    assert contents(talk)[-1] == ("tool", f"seen\n\n{NOTE}\n\n{NOTE}")


def test_instructions_behind_the_assistants_turn_wait_for_the_next_one() -> None:
    for end in ("user", "assistant", "nothing"):
        talk = Conversation()
        talk.user("hello")
        talk.said("hi")
        talk.system("note")
        if end == "user":
            talk.user("more")
        elif end == "assistant":
            talk.said("more")
        begun = [("user", "hello"), ("assistant", "hi")]
        more = {
            "user": [("user", f"{NOTE}\n\nmore")],
            "assistant": [("user", NOTE), ("assistant", "more")],
            "nothing": [("user", NOTE)],
        }
        assert contents(talk) == [*begun, *more[end]]


def test_reasoning_without_an_answer_is_a_turn() -> None:
    talk = Conversation()
    talk.user("hello")
    talk.reasoned("one")
    talk.reasoned("")
    talk.reasoned("two")
    assert talk.messages()[1:] == [{"role": "assistant", "content": "", "reasoning_content": "one\n\ntwo"}]
