"""What a chat asks with, whatever became of earlier answers."""

from __future__ import annotations

import pytest

from meshnet.cli.conversation import Conversation, Stats


def roles(conversation: Conversation) -> list[str]:
    return [message["role"] for message in conversation.messages]


def test_an_answer_grows_by_its_pieces() -> None:
    conversation = Conversation("Be brief.")
    conversation.ask("Why?")
    conversation.answered("Be")
    conversation.answered("cause.")
    conversation.ask("And?")
    assert conversation.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "And?"},
    ]


def test_a_question_without_an_answer_gives_way_to_the_next() -> None:
    conversation = Conversation()
    conversation.ask("one")
    conversation.ask("two")
    assert conversation.messages == [{"role": "user", "content": "two"}]


def test_a_question_can_be_asked_again_with_or_without_an_answer() -> None:
    conversation = Conversation()
    assert not conversation.take_back()
    conversation.ask("one")
    assert conversation.take_back()
    conversation.answered("first")
    assert conversation.take_back()
    assert conversation.messages == [{"role": "user", "content": "one"}]


def test_clearing_keeps_the_system_message() -> None:
    conversation = Conversation("Be brief.")
    conversation.ask("one")
    conversation.clear()
    assert roles(conversation) == ["system"]
    assert not conversation.take_back()
    conversation.system = None
    assert conversation.messages == []


def test_stats_of_a_whole_answer_a_stopped_one_and_none() -> None:
    stats = Stats(asked=10.0)
    assert stats.text() == "nothing came"
    for now in (10.5, 11.0, 12.5):
        stats.piece(now)
    assert stats.text() == "first token after 0.50 s, 1.0 tokens/s, about 3 tokens"
    stats.usage = {"prompt_tokens": 200, "completion_tokens": 5, "cached_tokens": 128}
    assert stats.text() == "first token after 0.50 s, 2.0 tokens/s, 5 tokens, prompt of 200, 128 of them reused"


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 3, "completion_tokens": 1, "cached_tokens": 0}])
def test_one_token_has_no_speed(usage: dict[str, int] | None) -> None:
    stats = Stats(asked=0.0, usage=usage)
    stats.piece(1.0)
    assert "tokens/s" not in stats.text()
