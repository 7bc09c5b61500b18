"""A mesh as a gateway sees it: a tracker that tells a topology and entry nodes that answer from a script.

It speaks the real gRPC services on real ports; only what is behind them is made up. The servers run in threads, because
grpc.aio allows one event loop a process and every test has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc

from meshnet import convert, rpc
from meshnet.errors import Busy, HopFailure, MeshnetError, UnknownVocabulary
from meshnet.model import LayerRange, ModelManifest, Quantization, WeightBytes
from meshnet.topology import DeployedModel, Hop, Node, RouteProbe, Shard, ShardState, Topology
from meshnet.v1 import inference_pb2, inference_pb2_grpc, tracker_pb2, tracker_pb2_grpc

NUM_LAYERS = 30
VOCAB_SIZE = 49152
CONTEXT_LENGTH = 8192
KV_TOKENS = 16384
# The tokens "a" to "z" of SmolLM2.
LETTERS = range(81, 107)
Script = Callable[[inference_pb2.GenerateRequest, "Call"], Iterator[inference_pb2.GenerateEvent]]


class Call:
    """What a script may do besides sending events."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self.ended = threading.Event()
        context.add_callback(self.ended.set)

    def fail(self, error: MeshnetError) -> None:
        """Ends the call as a node does."""
        trailers = [(rpc.ERROR_KEY, error.code)]
        if isinstance(error, Busy):
            trailers.append((rpc.RETRY_AFTER_KEY, f"{error.retry_after:g}"))
        if isinstance(error, HopFailure):
            trailers.append((rpc.NODE_KEY, error.node_id))
        self._context.set_trailing_metadata(tuple(trailers))
        self._context.abort(rpc.status_of(error), str(error))

    def break_off(self, status: grpc.StatusCode, message: str) -> None:
        """Ends the call as gRPC itself does."""
        self._context.abort(status, message)


def tokens(*token_ids: int, finish: int = inference_pb2.FINISH_REASON_STOP, cached: int = 0) -> Script:
    """Sends these tokens, as many as are asked for, and says why it ended. `cached`: what it reused of the prompt."""

    def script(request: inference_pb2.GenerateRequest, call: Call) -> Iterator[inference_pb2.GenerateEvent]:
        yield from _sent(request, token_ids[: request.max_new_tokens], cached)
        too_many = len(token_ids) > request.max_new_tokens
        reason = inference_pb2.FINISH_REASON_LENGTH if too_many else finish
        yield inference_pb2.GenerateEvent(finish_reason=reason)  # type: ignore[arg-type]

    return script


def tokens_then_wait(*token_ids: int) -> Script:
    """Sends these tokens and then nothing, until the call is cancelled."""

    def script(request: inference_pb2.GenerateRequest, call: Call) -> Iterator[inference_pb2.GenerateEvent]:
        yield from _sent(request, token_ids)
        call.ended.wait(60)

    return script


def tokens_then_fail(error: MeshnetError, *token_ids: int) -> Script:
    """Sends these tokens, and no more to those that come with them again."""

    def script(request: inference_pb2.GenerateRequest, call: Call) -> Iterator[inference_pb2.GenerateEvent]:
        yield from _sent(request, () if request.num_generated else token_ids)
        call.fail(error)

    return script


def by_request(choose: Callable[[inference_pb2.GenerateRequest], Script]) -> Script:
    """A script for each request."""
    return lambda request, call: choose(request)(request, call)


def drawn(num_tokens: int | None = None, error: MeshnetError | None = None) -> Script:
    """As a node draws: each token depends on the seed and on how many were generated before, by whichever call.

    Fails after `num_tokens`, if an error is given.
    """

    def script(request: inference_pb2.GenerateRequest, call: Call) -> Iterator[inference_pb2.GenerateEvent]:
        wanted = request.max_new_tokens if num_tokens is None else num_tokens
        yield from _sent(request, [draw(request.sampling.seed, request.num_generated + i) for i in range(wanted)])
        if error is not None:
            call.fail(error)
        yield inference_pb2.GenerateEvent(finish_reason=inference_pb2.FINISH_REASON_LENGTH)

    return script


def draw(seed: int, index: int) -> int:
    """A token that is a lower-case letter."""
    return LETTERS[(seed * 7 + index * 5) % len(LETTERS)]


def fake_logprobs(token_id: int, num_top: int) -> inference_pb2.TokenLogprobs:
    """Numbers that 32 bits hold exactly. The likeliest is the token itself if its id is even, else the one before."""
    first = token_id - token_id % 2
    top = [(first + i) % VOCAB_SIZE for i in range(num_top)]
    return inference_pb2.TokenLogprobs(
        logprob=-0.25 - token_id % 2, top_token_ids=top, top_logprobs=[-0.25 - i for i in range(num_top)]
    )


def _sent(
    request: inference_pb2.GenerateRequest, token_ids: Sequence[int], cached: int = 0
) -> Iterator[inference_pb2.GenerateEvent]:
    """With logprobs, if asked for; those of the prompt come first, in an event of their own."""
    num_top = request.top_logprobs if request.HasField("top_logprobs") else None
    if request.prompt_logprobs:
        of_prompt = [fake_logprobs(token_id, num_top or 0) for token_id in request.prompt_token_ids[1:]]
        yield inference_pb2.GenerateEvent(prompt_logprobs=of_prompt, cached_tokens=cached)
    for index, token_id in enumerate(token_ids):
        logprobs = None if num_top is None else fake_logprobs(token_id, num_top)
        first = index == 0 and not request.prompt_logprobs
        yield inference_pb2.GenerateEvent(token_id=token_id, cached_tokens=cached if first else 0, logprobs=logprobs)


class _Server:
    def __init__(self, address: str = "127.0.0.1:0") -> None:
        self.executor = ThreadPoolExecutor(max_workers=32)
        self.server = grpc.server(self.executor, options=list(rpc.SERVER_OPTIONS))
        self.address = f"127.0.0.1:{self.server.add_insecure_port(address)}"

    def stop(self) -> None:
        self.server.stop(grace=None).wait(10)
        self.executor.shutdown(wait=True)


class FakeEntryNode(inference_pb2_grpc.InferenceServicer):
    """`requests` are the calls seen since they were last cleared, `shown` what each call had as authorization."""

    def __init__(self, node_id: str) -> None:
        self.node_id = node_id
        self.script: Script = tokens()
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.shown: list[str] = []
        self.vocabularies: dict[str, inference_pb2.Vocabulary] = {}
        self._ended: set[str] = set()
        self._changed = threading.Condition()
        self._server = _Server()
        self.address = self._server.address
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server.server)
        self._server.server.start()

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Any
    ) -> Iterator[inference_pb2.GenerateEvent]:
        call = Call(context)
        context.add_callback(lambda: self._end(request.request_id))
        if request.HasField("grammar") and request.grammar.vocabulary_id not in self.vocabularies:
            call.fail(UnknownVocabulary("put it first"))
        self.requests.append(request)
        self.shown.append(_shown(context))
        yield from self.script(request, call)

    def PutVocabulary(  # noqa: N802
        self, request: inference_pb2.Vocabulary, context: Any
    ) -> inference_pb2.PutVocabularyResponse:
        self.vocabularies[request.vocabulary_id] = request
        return inference_pb2.PutVocabularyResponse()

    def _end(self, request_id: str) -> None:
        with self._changed:
            self._ended.add(request_id)
            self._changed.notify_all()

    def has_ended(self, request_id: str, timeout: float = 0) -> bool:
        """Whether the call is over, or will be within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: request_id in self._ended, timeout)

    def stop(self) -> None:
        self._server.stop()

    def node(self, *shards: Shard, num_sessions: int = 0, failure: str = "", probed: bool = True) -> Node:
        """It tells that its routes are ready, or of the failure, or nothing if it has not probed them."""
        return Node(
            node_id=self.node_id,
            forward_address="127.0.0.1:1",
            grpc_address=self.address,
            vram_bytes=1 << 30,
            quantization=Quantization.BFLOAT16,
            shards=shards,
            num_sessions=num_sessions,
            probes=tuple(probe(self.node_id, shard, failure) for shard in shards if probed and is_route(shard)),
        )


class FakeMesh(tracker_pb2_grpc.TrackerServicer):
    """A tracker, with the entry nodes "a" and "b"."""

    def __init__(self) -> None:
        self.a, self.b = FakeEntryNode("a"), FakeEntryNode("b")
        self._changed = threading.Condition()
        self._topology: Topology | None = None
        self._stopped = False
        self.shown: set[str] = set()
        self._server = _Server()
        self.address = self._server.address
        tracker_pb2_grpc.add_TrackerServicer_to_server(self, self._server.server)
        self._server.server.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop_tracker()
        self.a.stop()
        self.b.stop()

    def stop_tracker(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._server.stop()

    def restart_tracker(self) -> None:
        """On the same port, as a tracker that was started again."""
        self._stopped = False
        self._server = _Server(self.address)
        tracker_pb2_grpc.add_TrackerServicer_to_server(self, self._server.server)
        self._server.server.start()

    def tell(self, *nodes: Node, **models: DeployedModel) -> None:
        """A new topology."""
        with self._changed:
            version = self._topology.version + 1 if self._topology else 1
            ids = {node.node_id: node for node in nodes}
            self._topology = Topology(version, ids, {model.model_id: model for model in models.values()})
            self._changed.notify_all()

    def WatchTopology(self, request: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        context.add_callback(self._wake)
        self.shown.add(_shown(context))
        topology: Topology | None = None
        while (topology := self._newer(topology, context)) is not None:
            yield convert.update_to_proto(topology.update_since(None))

    def _newer(self, seen: Topology | None, context: Any) -> Topology | None:
        """The next topology, or None when the stream is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over(context) or self._topology is not seen, timeout=60)
            return None if self._is_over(context) else self._topology

    def _is_over(self, context: Any) -> bool:
        return self._stopped or not context.is_active()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def GetTopology(self, request: tracker_pb2.GetTopologyRequest, context: Any) -> Any:  # noqa: N802
        return convert.topology_to_proto(self._topology or Topology())


def _shown(context: Any) -> str:
    return str(dict(context.invocation_metadata()).get("authorization", ""))


def is_route(shard: Shard) -> bool:
    """Whether a node needs no other one to run the model."""
    return shard.state is ShardState.READY and shard.layers == LayerRange(0, NUM_LAYERS)


def probe(node_id: str, shard: Shard, failure: str = "") -> RouteProbe:
    """Of the route that is this shard."""
    hops = (Hop(node_id, shard.layers),)
    return RouteProbe(shard.model_id, hops, failure, latency_seconds=None if failure else 0.5)


def model(
    model_id: str, kv_tokens: int = KV_TOKENS, num_layers: int = NUM_LAYERS, context_length: int = CONTEXT_LENGTH
) -> DeployedModel:
    manifest = ModelManifest(
        model_id=model_id,
        revision="0" * 64,
        architecture="llama",
        hidden_size=576,
        vocab_size=VOCAB_SIZE,
        context_length=context_length,
        layers=(WeightBytes(2, 1, 1, 4),) * num_layers,
        entry=WeightBytes(2, 1, 1, 4),
        kv_bytes_per_token=768,
    )
    return DeployedModel(manifest, kv_tokens)


def shard(model_id: str, start: int = 0, end: int = NUM_LAYERS, state: ShardState = ShardState.READY) -> Shard:
    return Shard(model_id, LayerRange(start, end), Quantization.BFLOAT16, state)
