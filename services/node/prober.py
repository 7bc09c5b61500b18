"""Proves routes and chooses among them: one token goes through each route before anyone depends on it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable

from meshnet.errors import Busy, HopFailure, MeshnetError, UnknownModel
from meshnet.routing import find_route
from meshnet.topology import DeployedModel, RouteProbe, Topology
from services.node.core.probing import Probe, ProbeTable, Route
from services.node.forwarding import Forwarding
from services.node.generation import GenerationRequest, Sequence

log = logging.getLogger(__name__)

PROMPT = (0,)
MAX_FAILURE_CHARS = 500


class Prober:
    """`topology` gives the latest snapshot; `on_outcome` is called when what `outcomes` returns may have changed.

    A probe that brings no token back within `timeout` seconds has failed.
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

    async def run(self) -> None:
        """Probes for ever. Call `wake` when the topology has changed."""
        async with asyncio.TaskGroup() as group:
            while True:
                self._news.clear()
                for probe in self._table.start(self._topology(), time.monotonic()):
                    group.create_task(self._probe(probe))
                self._tell()
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

    def route(self, model_id: str) -> Route:
        """The route for a generation: the cheapest, or one that is ready if that is not.

        Raises UnknownModel or MissingLayers.
        """
        topology = self._topology()
        return self._table.choose(topology, model_id, find_route(topology, model_id, self._node_id))

    def deployed(self, model_id: str) -> DeployedModel:
        """The model as the mesh serves it now. Raises UnknownModel."""
        if model_id not in (models := self._topology().models):
            raise UnknownModel(f"model {model_id!r} is not deployed")
        return models[model_id]

    def generation_failed(self, model_id: str, route: Route, error: HopFailure) -> None:
        """A hop failed under a generation: its route is not ready until a new probe comes through."""
        self._table.generation_failed(model_id, route, str(error)[:MAX_FAILURE_CHARS], time.monotonic())
        self._tell()
        self.wake()

    async def _probe(self, probe: Probe) -> None:
        try:
            async with asyncio.timeout(self._timeout):
                latency = await self._send_token(probe)
        except Busy as error:
            log.info("the probe of %s waits: %s", _name(probe), error)
            self._table.postponed(probe, time.monotonic())
        except TimeoutError:
            self._failed(probe, f"no token came back through {_hops(probe)} within {self._timeout:g} s")
        except MeshnetError as error:
            self._failed(probe, str(error))
        except Exception as error:
            log.exception("a probe failed")
            self._failed(probe, str(error) or type(error).__name__)
        else:
            log.info("%s is ready: a token came through in %.3f s", _name(probe), latency)
            self._table.succeeded(probe, latency)
        self._tell()
        self.wake()

    def _failed(self, probe: Probe, failure: str) -> None:
        log.warning("%s is not ready: %s", _name(probe), failure)
        self._table.failed(probe, failure[:MAX_FAILURE_CHARS], time.monotonic())

    def _tell(self) -> None:
        outcomes = self._table.outcomes()
        if outcomes != self._told:
            self._told = outcomes
            self._on_outcome()

    async def _send_token(self, probe: Probe) -> float:
        """As a generation of one token does. Returns the seconds until it was back; its session is freed after that."""
        request = GenerationRequest(str(uuid.uuid4()), probe.model_id, PROMPT, max_new_tokens=1)
        sequence = Sequence(request, probe.route, self._forwarding)
        started = time.monotonic()
        self._forwarding.sessions.open(sequence.key, len(PROMPT) + 1, started)
        try:
            async for _ in sequence.tokens():
                pass
            return time.monotonic() - started
        finally:
            await asyncio.shield(sequence.close())


def _hops(probe: Probe) -> str:
    return " ".join(map(str, probe.route))


def _name(probe: Probe) -> str:
    return f"the route of {probe.model_id} through {_hops(probe)}"
