"""Proves routes and chooses among them: one token goes through each route before anyone depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection

from meshnet.errors import Busy, HopFailure, MeshnetError, UnknownModel
from meshnet.hop_cost import NO_WISH, Wish
from meshnet.routing import Route
from meshnet.topology import DeployedModel, RouteProbe, Topology
from services.node.core.probing import Probe, ProbeTable, said_of
from services.node.core.request import GenerationRequest
from services.node.forwarding import Forwarding
from services.node.generation import Sequence
from services.node.lane import Lanes

log = logging.getLogger(__name__)

PROMPT = (0,)
MAX_FAILURE_CHARS = 500
# Laying routes through a large mesh takes its time: between two times the loop is free nine times as long.
PLAN_SHARE = 0.1


class Prober:
    """`topology` gives the latest snapshot; `on_outcome` is called when what `outcomes` returns may have changed.

    A probe that brings no token back within `timeout` seconds for each hop has failed. That is more than a hop may take
    for a frame, so that the hop that is mute is named.
    """

    def __init__(
        self,
        node_id: str,
        forwarding: Forwarding,
        topology: Callable[[], Topology],
        timeout: float,
        on_outcome: Callable[[], None],
    ) -> None:
        self._node_id = node_id
        self._table = ProbeTable(node_id)
        self._forwarding = forwarding
        self._topology = topology
        self._timeout = timeout
        self._on_outcome = on_outcome
        self._told: tuple[RouteProbe, ...] = ()
        self._news = asyncio.Event()
        # Its own: a token of a probe is never in a frame with those of people.
        self._lanes = Lanes(forwarding)

    async def run(self) -> None:
        """Probes for ever. Call `wake` when the topology has changed."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                began = time.monotonic()
                for probe in self._table.start(self._topology(), time.monotonic()):
                    group.create_task(self._probe(probe))
                self._tell()
                await asyncio.sleep((time.monotonic() - began) * (1 / PLAN_SHARE - 1))
                retry_at = self._table.retry_at()
                pause = None if retry_at is None else max(retry_at - time.monotonic(), 0.0)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._news.wait()

    def wake(self) -> None:
        self._news.set()

    def outcomes(self) -> tuple[RouteProbe, ...]:
        """What is known of the routes that this node would use, at most one for each model."""
        return self._table.outcomes()

    def route(self, model_id: str, wish: Wish = NO_WISH, avoid: Collection[str] = ()) -> Route:
        """The route for a generation: the cheapest that is ready; if none is, any that passes no node of `avoid`.
        Raises UnknownModel or MissingLayers."""
        return self._table.choose(self._topology(), model_id, wish, avoid)

    def is_entry(self, model_id: str) -> bool:
        """Whether routes of the model may begin here."""
        node = self._topology().nodes.get(self._node_id)
        return node is not None and 0 in node.layers(model_id)

    def is_ready_elsewhere(self, model_id: str) -> bool:
        """Whether another entry node says that a route of the model is ready."""
        return any(
            probe.ready and probe.hops[0].node_id != self._node_id for probe in self._topology().probes(model_id)
        )

    def deployed(self, model_id: str) -> DeployedModel:
        """The model as the mesh serves it now. Raises UnknownModel."""
        if model_id not in (models := self._topology().models):
            raise UnknownModel(f"model {model_id!r} is not deployed")
        return models[model_id]

    def generation_failed(self, model_id: str, error: HopFailure) -> None:
        """A hop failed under a generation: no route through it is ready until a new probe comes through."""
        failure = str(error)[:MAX_FAILURE_CHARS]
        self._table.generation_failed(model_id, error.node_id, failure, time.monotonic())
        self._tell()
        self.wake()

    async def _probe(self, probe: Probe) -> None:
        timeout = self._timeout * max(len(probe.route) - 1, 1)
        try:
            async with asyncio.timeout(timeout):
                latency = await self._send_token(probe)
        except Busy as error:
            log.info("the probe of %s waits: %s", _name(probe.model_id, probe.route), error)
            self._table.postponed(probe, time.monotonic())
        except TimeoutError:
            self._failed(probe, f"no token came back through {_hops(probe.route)} within {timeout:g} s")
        except HopFailure as error:
            self._failed(probe, said_of(probe.route, error.node_id, str(error)))
        except MeshnetError as error:
            self._failed(probe, str(error))
        except Exception as error:
            log.exception("a probe failed")
            self._failed(probe, str(error) or type(error).__name__)
        else:
            log.debug("%s is ready: a token came through in %.3f s", _name(probe.model_id, probe.route), latency)
            self._table.succeeded(probe, latency, time.monotonic())
            # Generations whose hop has failed wait for a route.
            self._forwarding.changes.announce()
        self._tell()
        self.wake()

    def _failed(self, probe: Probe, failure: str) -> None:
        log.warning("%s is not ready: %s", _name(probe.model_id, probe.route), failure)
        self._table.failed(probe, failure[:MAX_FAILURE_CHARS], time.monotonic())

    def _tell(self) -> None:
        outcomes = self._table.outcomes()
        if outcomes != self._told:
            for outcome in outcomes:
                if outcome.ready and not any(old.ready and old.hops == outcome.hops for old in self._told):
                    log.info(
                        "%s is ready: a token came through in %g s",
                        _name(outcome.model_id, outcome.hops),
                        outcome.latency_seconds,
                    )
            self._told = outcomes
            self._on_outcome()

    async def _send_token(self, probe: Probe) -> float:
        """As a generation of one token does. Returns the seconds until it was back; its session is freed after that."""
        request = GenerationRequest(str(uuid.uuid4()), probe.model_id, PROMPT, max_new_tokens=1)
        sequence = Sequence(request, probe.route, self._forwarding, self._lanes)
        started = time.monotonic()
        self._forwarding.open(sequence.key, len(PROMPT) + 1)
        try:
            async for _ in sequence.tokens():
                pass
            return float(f"{time.monotonic() - started:.3g}")
        finally:
            await asyncio.shield(sequence.close())


def _hops(route: Route) -> str:
    return " ".join(map(str, route))


def _name(model_id: str, route: Route) -> str:
    return f"the route of {model_id} through {_hops(route)}"
