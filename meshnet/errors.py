"""The errors of meshnet, as one tree.

::

    MeshnetError
    ├── InvalidRequest          the caller must change the request (400)
    │   ├── InvalidGrammar      a text cannot be kept to what is asked for
    │   ├── NotFinite           hidden states that are not numbers
    │   ├── BadFrame            a frame breaks the wire format
    │   │   └── CorruptFrame    a frame is not what was sent; to be sent again
    │   └── WireVersionMismatch the frame is of another wire version
    ├── Unauthenticated         the mesh has a token, and the request does not show it (401)
    ├── UnknownModel            no such model here (404)
    ├── UnknownVocabulary       a grammar names a vocabulary that this node must be given first (412)
    ├── PositionMismatch        the KV cache is shorter than the frame's position (409)
    ├── FrameTooLarge           the body is over the node's limit (413)
    ├── WrongLayers             the layers asked for are not held here (421)
    ├── Busy                    try again later or elsewhere
    │   ├── KvFull              no room in the KV cache (429)
    │   └── Draining            the node is leaving (503)
    ├── MissingLayers           no node serves some layers of the model (503)
    ├── RouteNotReady           every layer is served, but no token has come through a route yet (503)
    ├── HopFailure              a hop behind this one failed; names the node
    │   ├── NextHopFailed       refused, reset, or answered nonsense (502)
    │   ├── NextHopTimeout      mute, or no answer within the deadline (504)
    │   └── BrokenNode          what it computed is not finite (502)
    ├── BrokenLayers            layers here made what is not finite of what is; others are told BrokenNode
    ├── LoadFailed              a shard could not be loaded; the reason is for people
    │   ├── NoRoom              it does not fit, or memory ran out on the way
    │   ├── BadFiles            the weight files are missing, damaged or of another revision
    │   └── NoSource            no node that has the files was reached, or gave what its revision says
    ├── TopologyGap             an update of the topology was missed: watch again from the whole
    └── Unregistered            the tracker does not know this node or incarnation
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshnet.model import LayerRange


class MeshnetError(Exception):
    """Base of all. `code` is the stable name on every wire, `status` the HTTP status."""

    code: ClassVar[str] = "internal"
    status: ClassVar[int] = 500


class InvalidRequest(MeshnetError):
    code = "invalid_request"
    status = 400


class InvalidGrammar(InvalidRequest):
    code = "invalid_grammar"


class NotFinite(InvalidRequest):
    code = "not_finite"


class BadFrame(InvalidRequest):
    code = "bad_frame"


class CorruptFrame(BadFrame):
    code = "corrupt_frame"


class WireVersionMismatch(InvalidRequest):
    code = "wire_version"


class Unauthenticated(MeshnetError):
    code = "unauthenticated"
    status = 401


class UnknownModel(MeshnetError):
    code = "unknown_model"
    status = 404


class UnknownVocabulary(MeshnetError):
    code = "unknown_vocabulary"
    status = 412


class PositionMismatch(MeshnetError):
    """`cached_length` is the number of tokens that the session has cached here."""

    code = "position"
    status = 409

    def __init__(self, message: str, cached_length: int) -> None:
        super().__init__(message)
        self.cached_length = cached_length


class FrameTooLarge(MeshnetError):
    code = "frame_too_large"
    status = 413


class WrongLayers(MeshnetError):
    code = "wrong_layers"
    status = 421


class Busy(MeshnetError):
    """`retry_after` is in seconds."""

    code = "busy"
    status = 503

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KvFull(Busy):
    code = "kv_full"
    status = 429


class Draining(Busy):
    code = "draining"


class MissingLayers(MeshnetError):
    """`missing` are the layer ranges that no node serves, `reason` what is known of why, for people."""

    code = "missing_layers"
    status = 503

    def __init__(self, model_id: str, missing: Sequence[LayerRange], reason: str = "") -> None:
        self.model_id = model_id
        self.missing = tuple(missing)
        why = f": {reason}" if reason else ""
        ranges = ", ".join(str(layers) for layers in self.missing) or "no connected route"
        super().__init__(f"model {model_id!r} is not fully served: missing layers {ranges}{why}")


class RouteNotReady(MeshnetError):
    """`failure` says why no route is ready, for people. `is_known`: it was tried, and is not only yet to be."""

    code = "route_not_ready"
    status = 503

    def __init__(self, model_id: str, failure: str, *, is_known: bool = True) -> None:
        self.model_id = model_id
        self.failure = failure
        self.is_known = is_known
        super().__init__(f"no route of model {model_id!r} is ready: {failure}")


class HopFailure(MeshnetError):
    """`node_id` is the node that failed, wherever on the route it is."""

    def __init__(self, message: str, node_id: str) -> None:
        super().__init__(message)
        self.node_id = node_id


class NextHopFailed(HopFailure):
    code = "next_hop_failed"
    status = 502


class NextHopTimeout(HopFailure):
    code = "next_hop_timeout"
    status = 504


class BrokenNode(HopFailure):
    code = "broken_node"
    status = 502


class BrokenLayers(MeshnetError):
    code = "broken_layers"


class LoadFailed(MeshnetError):
    code = "load_failed"


class NoRoom(LoadFailed):
    code = "no_room"


class BadFiles(LoadFailed):
    code = "bad_files"


class NoSource(LoadFailed):
    code = "no_source"


class Unregistered(MeshnetError):
    code = "unregistered"
    status = 404


class TopologyGap(MeshnetError):
    code = "topology_gap"
    status = 503
