"""An estimate for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshnet.cli.output import table
from meshnet.estimate.mesh import Estimate, Questions
from meshnet.routing import Route
from meshnet.sizes import format_size

NONE = "-"
SHOWN_ROUTES = 4


def estimate_picture(told: Estimate, questions: Questions) -> RenderableType:
    return Group(*_parts(told, questions))


def _parts(told: Estimate, questions: Questions) -> Iterator[RenderableType]:
    yield _nodes(told)
    yield ""
    yield from (Text(shortfall, "red") for shortfall in told.shortfalls)
    if not told.routes:
        yield Text("no route passes all layers, so there is nothing to say of speed", "red")
        return
    yield from _routes(told.routes)
    yield ""
    yield _prompts(told)
    yield ""
    yield _streams(told, questions)


def _nodes(told: Estimate) -> Table:
    made = table(
        f"{told.model_id}, KV cache for {told.kv_tokens:,} tokens in each layer",
        "node", "layers", "stored", "lends", "weights", "KV", "workspace", "free", "step",
    )  # fmt: skip
    for node in told.nodes:
        sizes = (node.vram_bytes, node.weight_bytes, node.kv_bytes, node.workspace_bytes, node.free_bytes)
        made.add_row(
            node.node_id,
            ", ".join(map(str, node.layers)) or NONE,
            ", ".join(node.quantizations) or NONE,
            *(format_size(size) if size >= 0 else f"-{format_size(-size)}" for size in sizes),
            format_time(node.step_seconds),
        )
    made.caption = Text("step: of one session, through the node's layers", "dim", justify="left")
    return made


def _routes(routes: Sequence[Route]) -> Iterator[Text]:
    for route in routes[:SHOWN_ROUTES]:
        yield Text("route: " + " > ".join(map(str, route)))
    if len(routes) > SHOWN_ROUTES:
        yield Text(f"and {len(routes) - SHOWN_ROUTES} more routes")


def _prompts(told: Estimate) -> Table:
    made = table("Prompts, on an idle mesh", "tokens", "prefill", "first token after")
    for prompt in told.prompts:
        made.add_row(f"{prompt.num_tokens:,}", _rate(prompt.tokens_per_second), format_time(prompt.first_token_seconds))
    return made


def _streams(told: Estimate, questions: Questions) -> Table:
    made = table(
        f"Streams, each behind {questions.cached:,.0f} tokens", "streams", "at once", "in all", "each", "limited by"
    )
    for found in told.streams:
        each = found.tokens_per_second / found.at_once if found.at_once else 0.0
        made.add_row(
            f"{found.num_streams}", f"{found.at_once}", _rate(found.tokens_per_second), _rate(each), found.limit
        )
    return made


def _rate(tokens_per_second: float) -> str:
    return f"{three_digits(tokens_per_second)} tokens/s"


def format_time(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    for size, unit in ((60.0, "min"), (1.0, "s")):
        if seconds >= 2 * size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(1000 * seconds)} ms"


def three_digits(number: float) -> str:
    """Never as a power of ten."""
    if number >= 100:
        return f"{float(f'{number:.3g}'):,.0f}"
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"
