"""Runs the gRPC server from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc

from meshnet import rpc
from meshnet.addresses import join_address
from meshnet.v1 import admin_pb2_grpc, tracker_pb2_grpc
from services.tracker.admin_servicer import AdminServicer
from services.tracker.config import Config
from services.tracker.servicer import TrackerServicer
from services.tracker.store import open_store
from services.tracker.tracker import Tracker

STOP_GRACE_SECONDS = 1.0


class CannotListen(RuntimeError):
    """The address is taken, or not one of this host."""


async def serve(config: Config, on_listening: Callable[[str], None]) -> None:
    """Runs until cancelled. `on_listening` gets the address once calls are answered. Raises CannotListen or
    StoreFailed."""
    with contextlib.closing(open_store(config.state)) as store:
        await _serve(config, Tracker(config, store), on_listening)


async def _serve(config: Config, tracker: Tracker, on_listening: Callable[[str], None]) -> None:
    server = rpc.server(config.secret)
    tracker_pb2_grpc.add_TrackerServicer_to_server(TrackerServicer(tracker), server)
    admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(tracker), server)
    await rpc.add_reflection_and_health(server, "meshnet.v1.Tracker", "meshnet.v1.Admin")
    port = _bind(server, config)
    await server.start()
    try:
        on_listening(join_address(config.host, port))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tracker.keep_time())
            tasks.create_task(tracker.saver.run())
    finally:
        tracker.changes.close()
        await server.stop(STOP_GRACE_SECONDS)
        await tracker.saver.close()


def _bind(server: grpc.aio.Server, config: Config) -> int:
    address = join_address(config.host, config.port)
    try:
        port: int = server.add_insecure_port(address)
    except RuntimeError as error:
        raise CannotListen(f"cannot listen on {address}: is the port in use, or the host another one?") from error
    if port == 0:
        raise CannotListen(f"cannot listen on {address}")
    return port
