"""Blocks of a conversation become the messages that chat templates expect."""

from gateway.conversation import Conversation


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


def test_instructions_stay_where_the_client_put_them() -> None:
    talk = Conversation()
    talk.system("rules")
    talk.user("hello")
    talk.said("hi")
    talk.system("note")
    talk.user("more")
    said = [(message["role"], message["content"]) for message in talk.messages()]
    assert said == [("system", "rules"), ("user", "hello"), ("assistant", "hi"), ("system", "note"), ("user", "more")]


def test_reasoning_without_an_answer_is_a_turn() -> None:
    talk = Conversation()
    talk.user("hello")
    talk.reasoned("one")
    talk.reasoned("")
    talk.reasoned("two")
    assert talk.messages()[1:] == [{"role": "assistant", "content": "", "reasoning_content": "one\n\ntwo"}]
