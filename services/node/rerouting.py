"""Waiting for a route behind a failure: for as long as that is better than to say so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meshnet.errors import Draining, MeshnetError, MissingLayers
from meshnet.routing import Route
from services.node.changes import Changes
from services.node.prober import Prober

# For one of which nothing has been computed yet: whoever asked is told which layers are missing, and may ask again.
NEW_SECONDS = 0.3
# What has no route from here goes on at another entry node that says it has one, after so long: by then the tracker has
# told which nodes are gone, and what others say of routes through them counts no more.
HAND_OVER_SECONDS = 20.0


class RouteSearch:
    """`find` lays a route as things are, and raises MissingLayers."""

    def __init__(self, prober: Prober, model_id: str, find: Callable[[], Route]) -> None:
        self._prober = prober
        self._model_id = model_id
        self._find = find
        self._missing: MissingLayers | None = None

    async def at_once(self, changes: Changes, error: MeshnetError) -> Route:
        """For what has only come. Raises MissingLayers, for which `error` is the reason, or `error` itself
        where none are."""
        route = await changes.wait_until(self._found, NEW_SECONDS)
        if route is None and self._missing:
            raise MissingLayers(self._model_id, self._missing.missing, str(error)) from error
        if route is None:
            raise error
        return route

    async def until(self, changes: Changes, deadline: float, error: MeshnetError) -> Route:
        """For what has come some way. `deadline`: on the loop's clock. Raises `error` when there is none by then, or
        before if another entry node has one."""
        clock = asyncio.get_running_loop().time
        route = await changes.wait_until(self._found, min(HAND_OVER_SECONDS, deadline - clock()))
        if route is None:
            route = await changes.wait_until(lambda: self._found_here_or(error), deadline - clock())
        if route is None:
            raise error
        return route

    def _found_here_or(self, error: MeshnetError) -> Route | None:
        route = self._found()
        if route is None and self._prober.is_ready_elsewhere(self._model_id):
            raise error
        return route

    def _found(self) -> Route | None:
        if not self._prober.is_entry(self._model_id):
            # Its layers had to make room for others: whoever asked knows other nodes to go on at.
            raise Draining(f"this node no longer serves the first layers of {self._model_id!r}")
        try:
            return self._find()
        except MissingLayers as missing:
            self._missing = missing
            return None
