from meshnet.v1 import common_pb2 as _common_pb2
from meshnet.v1 import tracker_pb2 as _tracker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_LEVEL_UNSPECIFIED: _ClassVar[EventLevel]
    EVENT_LEVEL_INFO: _ClassVar[EventLevel]
    EVENT_LEVEL_WARNING: _ClassVar[EventLevel]
EVENT_LEVEL_UNSPECIFIED: EventLevel
EVENT_LEVEL_INFO: EventLevel
EVENT_LEVEL_WARNING: EventLevel

class ListNodesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNodesResponse(_message.Message):
    __slots__ = ("nodes",)
    NODES_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.RepeatedCompositeFieldContainer[_common_pb2.Node]
    def __init__(self, nodes: _Optional[_Iterable[_Union[_common_pb2.Node, _Mapping]]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class KnownModel(_message.Message):
    __slots__ = ("manifest", "deployed", "node_ids")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    DEPLOYED_FIELD_NUMBER: _ClassVar[int]
    NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    manifest: _common_pb2.ModelManifest
    deployed: bool
    node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, manifest: _Optional[_Union[_common_pb2.ModelManifest, _Mapping]] = ..., deployed: _Optional[bool] = ..., node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[KnownModel]
    def __init__(self, models: _Optional[_Iterable[_Union[KnownModel, _Mapping]]] = ...) -> None: ...

class GetCoverageRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class CoverageSpan(_message.Message):
    __slots__ = ("layers", "ready_node_ids", "loading_node_ids")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    READY_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    LOADING_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    layers: _common_pb2.LayerRange
    ready_node_ids: _containers.RepeatedScalarFieldContainer[str]
    loading_node_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layers: _Optional[_Union[_common_pb2.LayerRange, _Mapping]] = ..., ready_node_ids: _Optional[_Iterable[str]] = ..., loading_node_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ModelCoverage(_message.Message):
    __slots__ = ("model_id", "num_layers", "spans", "missing", "complete", "shortfall")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_FIELD_NUMBER: _ClassVar[int]
    SHORTFALL_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    num_layers: int
    spans: _containers.RepeatedCompositeFieldContainer[CoverageSpan]
    missing: _containers.RepeatedCompositeFieldContainer[_common_pb2.LayerRange]
    complete: bool
    shortfall: str
    def __init__(self, model_id: _Optional[str] = ..., num_layers: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[CoverageSpan, _Mapping]]] = ..., missing: _Optional[_Iterable[_Union[_common_pb2.LayerRange, _Mapping]]] = ..., complete: _Optional[bool] = ..., shortfall: _Optional[str] = ...) -> None: ...

class GetCoverageResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelCoverage]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelCoverage, _Mapping]]] = ...) -> None: ...

class ListRoutesRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("model_id", "hops", "ready", "failure", "latency_seconds")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    hops: _containers.RepeatedCompositeFieldContainer[_common_pb2.Hop]
    ready: bool
    failure: str
    latency_seconds: float
    def __init__(self, model_id: _Optional[str] = ..., hops: _Optional[_Iterable[_Union[_common_pb2.Hop, _Mapping]]] = ..., ready: _Optional[bool] = ..., failure: _Optional[str] = ..., latency_seconds: _Optional[float] = ...) -> None: ...

class ListRoutesResponse(_message.Message):
    __slots__ = ("routes",)
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    def __init__(self, routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ...) -> None: ...

class DeployModelRequest(_message.Message):
    __slots__ = ("model_id", "kv_tokens", "priority", "context_length", "sessions", "replicas", "kv_precision")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    KV_PRECISION_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    kv_tokens: int
    priority: int
    context_length: int
    sessions: int
    replicas: int
    kv_precision: _common_pb2.KvPrecision
    def __init__(self, model_id: _Optional[str] = ..., kv_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., context_length: _Optional[int] = ..., sessions: _Optional[int] = ..., replicas: _Optional[int] = ..., kv_precision: _Optional[_Union[_common_pb2.KvPrecision, str]] = ...) -> None: ...

class DeployModelResponse(_message.Message):
    __slots__ = ("model", "directives", "shortfall")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    SHORTFALL_FIELD_NUMBER: _ClassVar[int]
    model: _common_pb2.DeployedModel
    directives: _containers.RepeatedCompositeFieldContainer[_tracker_pb2.Directive]
    shortfall: str
    def __init__(self, model: _Optional[_Union[_common_pb2.DeployedModel, _Mapping]] = ..., directives: _Optional[_Iterable[_Union[_tracker_pb2.Directive, _Mapping]]] = ..., shortfall: _Optional[str] = ...) -> None: ...

class UndeployModelRequest(_message.Message):
    __slots__ = ("model_id",)
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    def __init__(self, model_id: _Optional[str] = ...) -> None: ...

class UndeployModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDirectivesRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class ListDirectivesResponse(_message.Message):
    __slots__ = ("directives",)
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    directives: _containers.RepeatedCompositeFieldContainer[_tracker_pb2.Directive]
    def __init__(self, directives: _Optional[_Iterable[_Union[_tracker_pb2.Directive, _Mapping]]] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("node_id", "cancel")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    cancel: bool
    def __init__(self, node_id: _Optional[str] = ..., cancel: _Optional[bool] = ...) -> None: ...

class DrainNodeResponse(_message.Message):
    __slots__ = ("node", "directives", "shortfalls")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.Node
    directives: _containers.RepeatedCompositeFieldContainer[_tracker_pb2.Directive]
    shortfalls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[_Union[_common_pb2.Node, _Mapping]] = ..., directives: _Optional[_Iterable[_Union[_tracker_pb2.Directive, _Mapping]]] = ..., shortfalls: _Optional[_Iterable[str]] = ...) -> None: ...

class EvictNodeRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class EvictNodeResponse(_message.Message):
    __slots__ = ("directives",)
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    directives: _containers.RepeatedCompositeFieldContainer[_tracker_pb2.Directive]
    def __init__(self, directives: _Optional[_Iterable[_Union[_tracker_pb2.Directive, _Mapping]]] = ...) -> None: ...

class DescribeNodeRequest(_message.Message):
    __slots__ = ("node_id",)
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    def __init__(self, node_id: _Optional[str] = ...) -> None: ...

class DescribeNodeResponse(_message.Message):
    __slots__ = ("node", "planned_bytes", "free_bytes", "believed_bytes", "directives", "silent_seconds")
    NODE_FIELD_NUMBER: _ClassVar[int]
    PLANNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BELIEVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    SILENT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    node: _common_pb2.Node
    planned_bytes: int
    free_bytes: int
    believed_bytes: int
    directives: _containers.RepeatedCompositeFieldContainer[_tracker_pb2.Directive]
    silent_seconds: float
    def __init__(self, node: _Optional[_Union[_common_pb2.Node, _Mapping]] = ..., planned_bytes: _Optional[int] = ..., free_bytes: _Optional[int] = ..., believed_bytes: _Optional[int] = ..., directives: _Optional[_Iterable[_Union[_tracker_pb2.Directive, _Mapping]]] = ..., silent_seconds: _Optional[float] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ("without_node_ids", "deploy", "rebalance")
    WITHOUT_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    DEPLOY_FIELD_NUMBER: _ClassVar[int]
    REBALANCE_FIELD_NUMBER: _ClassVar[int]
    without_node_ids: _containers.RepeatedScalarFieldContainer[str]
    deploy: DeployModelRequest
    rebalance: bool
    def __init__(self, without_node_ids: _Optional[_Iterable[str]] = ..., deploy: _Optional[_Union[DeployModelRequest, _Mapping]] = ..., rebalance: _Optional[bool] = ...) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("directives", "shortfalls")
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    SHORTFALLS_FIELD_NUMBER: _ClassVar[int]
    directives: _containers.RepeatedCompositeFieldContainer[_tracker_pb2.Directive]
    shortfalls: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, directives: _Optional[_Iterable[_Union[_tracker_pb2.Directive, _Mapping]]] = ..., shortfalls: _Optional[_Iterable[str]] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RebalanceResponse(_message.Message):
    __slots__ = ("directives",)
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    directives: _containers.RepeatedCompositeFieldContainer[_tracker_pb2.Directive]
    def __init__(self, directives: _Optional[_Iterable[_Union[_tracker_pb2.Directive, _Mapping]]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("past", "past_only")
    PAST_FIELD_NUMBER: _ClassVar[int]
    PAST_ONLY_FIELD_NUMBER: _ClassVar[int]
    past: int
    past_only: bool
    def __init__(self, past: _Optional[int] = ..., past_only: _Optional[bool] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("number", "unix_seconds", "level", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    UNIX_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: int
    unix_seconds: float
    level: EventLevel
    text: str
    def __init__(self, number: _Optional[int] = ..., unix_seconds: _Optional[float] = ..., level: _Optional[_Union[EventLevel, str]] = ..., text: _Optional[str] = ...) -> None: ...
