"""A conversation with a model, and what its last answer took. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """Turns of user and assistant in turn, behind the system message if there is one.

    The last question may lack an answer. Then it can be asked again, and the next question takes its place.
    """

    system: str | None = None
    _turns: list[Message] = field(default_factory=list)

    @property
    def messages(self) -> list[Message]:
        """As the API takes them."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self._turns]

    def ask(self, question: str) -> None:
        self._drop_last("user")
        self._turns.append({"role": "user", "content": question})

    def answered(self, text: str) -> None:
        """More of the answer to the last question."""
        if self._turns[-1]["role"] != "assistant":
            self._turns.append({"role": "assistant", "content": ""})
        self._turns[-1]["content"] += text

    def take_back(self) -> bool:
        """Forgets the answer to the last question. Returns whether there is a question."""
        self._drop_last("assistant")
        return bool(self._turns)

    def clear(self) -> None:
        self._turns.clear()

    def _drop_last(self, role: str) -> None:
        if self._turns and self._turns[-1]["role"] == role:
            self._turns.pop()


@dataclass(slots=True)
class Stats:
    """Of one answer. Times are in seconds by any clock; `usage` is what the gateway said at its end."""

    asked: float
    first: float | None = None
    last: float | None = None
    num_pieces: int = 0
    usage: dict[str, int] | None = None

    def piece(self, now: float) -> None:
        """Some text came."""
        self.first = now if self.first is None else self.first
        self.last = now
        self.num_pieces += 1

    def text(self) -> str:
        """For people. A speed needs two tokens; an answer that was stopped has no usage: its pieces are counted."""
        if self.first is None or self.last is None:
            return "nothing came"
        num_tokens = self.usage["completion_tokens"] if self.usage else self.num_pieces
        parts = [f"first token after {self.first - self.asked:.2f} s"]
        if num_tokens > 1 and self.last > self.first:
            parts.append(f"{(num_tokens - 1) / (self.last - self.first):.1f} tokens/s")
        parts.append(f"{'' if self.usage else 'about '}{num_tokens} tokens")
        if self.usage:
            parts.append(f"prompt of {self.usage['prompt_tokens']}, {self.usage['cached_tokens']} of them reused")
        return ", ".join(parts)
