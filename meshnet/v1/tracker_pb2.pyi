from meshnet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DirectiveKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTIVE_KIND_UNSPECIFIED: _ClassVar[DirectiveKind]
    DIRECTIVE_KIND_LOAD_SHARD: _ClassVar[DirectiveKind]
    DIRECTIVE_KIND_DROP_SHARD: _ClassVar[DirectiveKind]

class DirectiveState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTIVE_STATE_UNSPECIFIED: _ClassVar[DirectiveState]
    DIRECTIVE_STATE_PENDING: _ClassVar[DirectiveState]
    DIRECTIVE_STATE_ACCEPTED: _ClassVar[DirectiveState]
    DIRECTIVE_STATE_LOADING: _ClassVar[DirectiveState]
    DIRECTIVE_STATE_READY: _ClassVar[DirectiveState]
    DIRECTIVE_STATE_DROPPED: _ClassVar[DirectiveState]
    DIRECTIVE_STATE_FAILED: _ClassVar[DirectiveState]

class DirectiveFailure(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DIRECTIVE_FAILURE_UNSPECIFIED: _ClassVar[DirectiveFailure]
    DIRECTIVE_FAILURE_NO_ROOM: _ClassVar[DirectiveFailure]
    DIRECTIVE_FAILURE_STALE_PLAN: _ClassVar[DirectiveFailure]
    DIRECTIVE_FAILURE_BAD_FILES: _ClassVar[DirectiveFailure]
    DIRECTIVE_FAILURE_NO_ANSWER: _ClassVar[DirectiveFailure]
    DIRECTIVE_FAILURE_OTHER: _ClassVar[DirectiveFailure]
    DIRECTIVE_FAILURE_NO_SOURCE: _ClassVar[DirectiveFailure]
DIRECTIVE_KIND_UNSPECIFIED: DirectiveKind
DIRECTIVE_KIND_LOAD_SHARD: DirectiveKind
DIRECTIVE_KIND_DROP_SHARD: DirectiveKind
DIRECTIVE_STATE_UNSPECIFIED: DirectiveState
DIRECTIVE_STATE_PENDING: DirectiveState
DIRECTIVE_STATE_ACCEPTED: DirectiveState
DIRECTIVE_STATE_LOADING: DirectiveState
DIRECTIVE_STATE_READY: DirectiveState
DIRECTIVE_STATE_DROPPED: DirectiveState
DIRECTIVE_STATE_FAILED: DirectiveState
DIRECTIVE_FAILURE_UNSPECIFIED: DirectiveFailure
DIRECTIVE_FAILURE_NO_ROOM: DirectiveFailure
DIRECTIVE_FAILURE_STALE_PLAN: DirectiveFailure
DIRECTIVE_FAILURE_BAD_FILES: DirectiveFailure
DIRECTIVE_FAILURE_NO_ANSWER: DirectiveFailure
DIRECTIVE_FAILURE_OTHER: DirectiveFailure
DIRECTIVE_FAILURE_NO_SOURCE: DirectiveFailure

class Directive(_message.Message):
    __slots__ = ("directive_id", "node_id", "kind", "model_id", "layers", "quantization", "revision", "kv_tokens", "plan_version", "reason", "state", "bytes_done", "bytes_total", "failure", "failure_kind", "issued_unix_seconds", "kv_precision")
    DIRECTIVE_ID_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FAILURE_KIND_FIELD_NUMBER: _ClassVar[int]
    ISSUED_UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_PRECISION_FIELD_NUMBER: _ClassVar[int]
    directive_id: str
    node_id: str
    kind: DirectiveKind
    model_id: str
    layers: _common_pb2.LayerRange
    quantization: _common_pb2.Quantization
    revision: str
    kv_tokens: int
    plan_version: int
    reason: str
    state: DirectiveState
    bytes_done: int
    bytes_total: int
    failure: str
    failure_kind: DirectiveFailure
    issued_unix_seconds: float
    kv_precision: _common_pb2.KvPrecision
    def __init__(self, directive_id: _Optional[str] = ..., node_id: _Optional[str] = ..., kind: _Optional[_Union[DirectiveKind, str]] = ..., model_id: _Optional[str] = ..., layers: _Optional[_Union[_common_pb2.LayerRange, _Mapping]] = ..., quantization: _Optional[_Union[_common_pb2.Quantization, str]] = ..., revision: _Optional[str] = ..., kv_tokens: _Optional[int] = ..., plan_version: _Optional[int] = ..., reason: _Optional[str] = ..., state: _Optional[_Union[DirectiveState, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., failure: _Optional[str] = ..., failure_kind: _Optional[_Union[DirectiveFailure, str]] = ..., issued_unix_seconds: _Optional[float] = ..., kv_precision: _Optional[_Union[_common_pb2.KvPrecision, str]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("node", "incarnation", "manifests", "wire_version", "newest_plan_version")
    NODE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    WIRE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.Node
    incarnation: str
    manifests: _containers.RepeatedCompositeFieldContainer[_common_pb2.ModelManifest]
    wire_version: int
    newest_plan_version: int
    def __init__(self, node: _Optional[_Union[_common_pb2.Node, _Mapping]] = ..., incarnation: _Optional[str] = ..., manifests: _Optional[_Iterable[_Union[_common_pb2.ModelManifest, _Mapping]]] = ..., wire_version: _Optional[int] = ..., newest_plan_version: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_seconds", "heartbeat_seconds", "refused_models")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_MODELS_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    heartbeat_seconds: float
    refused_models: _containers.RepeatedCompositeFieldContainer[RefusedModel]
    def __init__(self, lease_seconds: _Optional[float] = ..., heartbeat_seconds: _Optional[float] = ..., refused_models: _Optional[_Iterable[_Union[RefusedModel, _Mapping]]] = ...) -> None: ...

class RefusedModel(_message.Message):
    __slots__ = ("model_id", "reason")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    reason: str
    def __init__(self, model_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "shards", "num_sessions", "resident_bytes", "kv_tokens_free", "probes", "memory_free_bytes", "workspace_bytes", "queue_length", "speeds", "links")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FREE_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shard]
    num_sessions: int
    resident_bytes: int
    kv_tokens_free: int
    probes: _containers.RepeatedCompositeFieldContainer[_common_pb2.RouteProbe]
    memory_free_bytes: int
    workspace_bytes: int
    queue_length: int
    speeds: _containers.RepeatedCompositeFieldContainer[_common_pb2.Speed]
    links: _containers.RepeatedCompositeFieldContainer[_common_pb2.Link]
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.Shard, _Mapping]]] = ..., num_sessions: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., kv_tokens_free: _Optional[int] = ..., probes: _Optional[_Iterable[_Union[_common_pb2.RouteProbe, _Mapping]]] = ..., memory_free_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., queue_length: _Optional[int] = ..., speeds: _Optional[_Iterable[_Union[_common_pb2.Speed, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[_common_pb2.Link, _Mapping]]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchDirectivesRequest(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class ReportDirectiveRequest(_message.Message):
    __slots__ = ("node_id", "incarnation", "directive_id", "state", "bytes_done", "bytes_total", "failure", "shards", "failure_kind", "newest_plan_version")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_KIND_FIELD_NUMBER: _ClassVar[int]
    NEWEST_PLAN_VERSION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    directive_id: str
    state: DirectiveState
    bytes_done: int
    bytes_total: int
    failure: str
    shards: _containers.RepeatedCompositeFieldContainer[_common_pb2.Shard]
    failure_kind: DirectiveFailure
    newest_plan_version: int
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., directive_id: _Optional[str] = ..., state: _Optional[_Union[DirectiveState, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., failure: _Optional[str] = ..., shards: _Optional[_Iterable[_Union[_common_pb2.Shard, _Mapping]]] = ..., failure_kind: _Optional[_Union[DirectiveFailure, str]] = ..., newest_plan_version: _Optional[int] = ...) -> None: ...

class ReportDirectiveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ("node_id", "incarnation")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchTopologyRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PingRequest(_message.Message):
    __slots__ = ("payload", "answer_bytes")
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    ANSWER_BYTES_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    answer_bytes: int
    def __init__(self, payload: _Optional[bytes] = ..., answer_bytes: _Optional[int] = ...) -> None: ...

class PingResponse(_message.Message):
    __slots__ = ("payload",)
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    payload: bytes
    def __init__(self, payload: _Optional[bytes] = ...) -> None: ...
