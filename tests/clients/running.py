"""Clients that are asked a few questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.clients.environments import ClientFailed, Environment

SCRIPTS = Path(__file__).parent / "scripts"
QUESTION = "What is the capital of France? Answer in one sentence."


@dataclass(frozen=True)
class Gateway:
    """What is asked: a gateway, one model of its mesh, and the file of that model."""

    url: str
    model: str
    gguf: Path

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


def script(name: str) -> Callable[[Environment, Gateway], str]:
    """Runs a script of `scripts/`, which is told the address and the model. It prints `did THING` for each."""

    def run(environment: Environment, gateway: Gateway) -> str:
        printed = environment.run(
            ["python", str(SCRIPTS / name), gateway.base_url, gateway.model],
            # A list of prices that it would fetch.
            LITELLM_LOCAL_MODEL_COST_MAP="True",
        )
        return ", ".join(line.removeprefix("did ") for line in printed.splitlines() if line.startswith("did "))

    return run


def command_llm(environment: Environment, gateway: Gateway) -> str:
    """The command `llm`: prompts, a conversation that goes on, a chat over standard input, and its log."""
    settings = environment.home / "settings"
    settings.mkdir(exist_ok=True)
    (settings / "extra-openai-models.yaml").write_text(
        f"- model_id: mesh\n  model_name: {gateway.model}\n  api_base: {gateway.base_url}\n"
        f"- model_id: mesh-text\n  model_name: {gateway.model}\n  api_base: {gateway.base_url}\n  completion: true\n"
    )

    def llm(*arguments: str, given: str = "") -> str:
        return environment.run(["llm", *arguments], given, LLM_USER_PATH=str(settings), OPENAI_API_KEY="none")

    exact = ("-o", "temperature", "0", "-o", "max_tokens", "40")
    streamed = llm("-m", "mesh", *exact, QUESTION)
    whole = llm("-m", "mesh", *exact, "--no-stream", QUESTION)
    follows = llm("-c", *exact, "And of Italy?")
    chat = llm("chat", "-m", "mesh", *exact, given=f"{QUESTION}\nAnd of Italy?\nquit\n")
    text = llm("-m", "mesh-text", *exact, "1, 2, 3, 4,")
    log = llm("logs", "-n", "3", "--usage")
    for has, wanted in ((streamed, "Paris"), (follows, "Rome"), (chat, "Rome"), (text, "5, 6"), (log, "output")):
        if wanted not in has:
            raise ClientFailed(f"no {wanted!r} in {has!r}")
    if streamed != whole:
        raise ClientFailed(f"streamed {streamed!r}, whole {whole!r}")
    return "prompt streamed and whole, conversation continued, chat, completion model, usage in its log"
