from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Quantization(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUANTIZATION_UNSPECIFIED: _ClassVar[Quantization]
    QUANTIZATION_BFLOAT16: _ClassVar[Quantization]
    QUANTIZATION_INT8: _ClassVar[Quantization]
    QUANTIZATION_NF4: _ClassVar[Quantization]
    QUANTIZATION_FLOAT32: _ClassVar[Quantization]

class KvPrecision(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_PRECISION_UNSPECIFIED: _ClassVar[KvPrecision]
    KV_PRECISION_BFLOAT16: _ClassVar[KvPrecision]
    KV_PRECISION_INT8: _ClassVar[KvPrecision]

class ShardState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARD_STATE_UNSPECIFIED: _ClassVar[ShardState]
    SHARD_STATE_LOADING: _ClassVar[ShardState]
    SHARD_STATE_READY: _ClassVar[ShardState]
QUANTIZATION_UNSPECIFIED: Quantization
QUANTIZATION_BFLOAT16: Quantization
QUANTIZATION_INT8: Quantization
QUANTIZATION_NF4: Quantization
QUANTIZATION_FLOAT32: Quantization
KV_PRECISION_UNSPECIFIED: KvPrecision
KV_PRECISION_BFLOAT16: KvPrecision
KV_PRECISION_INT8: KvPrecision
SHARD_STATE_UNSPECIFIED: ShardState
SHARD_STATE_LOADING: ShardState
SHARD_STATE_READY: ShardState

class LayerRange(_message.Message):
    __slots__ = ("start", "end")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class WeightBytes(_message.Message):
    __slots__ = ("bfloat16", "int8", "nf4", "float32")
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    INT8_FIELD_NUMBER: _ClassVar[int]
    NF4_FIELD_NUMBER: _ClassVar[int]
    FLOAT32_FIELD_NUMBER: _ClassVar[int]
    bfloat16: int
    int8: int
    nf4: int
    float32: int
    def __init__(self, bfloat16: _Optional[int] = ..., int8: _Optional[int] = ..., nf4: _Optional[int] = ..., float32: _Optional[int] = ...) -> None: ...

class Workspace(_message.Message):
    __slots__ = ("kv_tokens", "at_precision")
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_PRECISION_FIELD_NUMBER: _ClassVar[int]
    kv_tokens: int
    at_precision: WeightBytes
    def __init__(self, kv_tokens: _Optional[int] = ..., at_precision: _Optional[_Union[WeightBytes, _Mapping]] = ...) -> None: ...

class ModelManifest(_message.Message):
    __slots__ = ("model_id", "revision", "architecture", "hidden_size", "vocab_size", "context_length", "layers", "entry", "kv_bytes_per_token", "kv_scales_per_token", "workspaces")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    KV_SCALES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    WORKSPACES_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    revision: str
    architecture: str
    hidden_size: int
    vocab_size: int
    context_length: int
    layers: _containers.RepeatedCompositeFieldContainer[WeightBytes]
    entry: WeightBytes
    kv_bytes_per_token: int
    kv_scales_per_token: int
    workspaces: _containers.RepeatedCompositeFieldContainer[Workspace]
    def __init__(self, model_id: _Optional[str] = ..., revision: _Optional[str] = ..., architecture: _Optional[str] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., context_length: _Optional[int] = ..., layers: _Optional[_Iterable[_Union[WeightBytes, _Mapping]]] = ..., entry: _Optional[_Union[WeightBytes, _Mapping]] = ..., kv_bytes_per_token: _Optional[int] = ..., kv_scales_per_token: _Optional[int] = ..., workspaces: _Optional[_Iterable[_Union[Workspace, _Mapping]]] = ...) -> None: ...

class Shard(_message.Message):
    __slots__ = ("model_id", "layers", "quantization", "state", "bytes_done", "bytes_total", "revision")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BYTES_DONE_FIELD_NUMBER: _ClassVar[int]
    BYTES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    layers: LayerRange
    quantization: Quantization
    state: ShardState
    bytes_done: int
    bytes_total: int
    revision: str
    def __init__(self, model_id: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ..., quantization: _Optional[_Union[Quantization, str]] = ..., state: _Optional[_Union[ShardState, str]] = ..., bytes_done: _Optional[int] = ..., bytes_total: _Optional[int] = ..., revision: _Optional[str] = ...) -> None: ...

class Hop(_message.Message):
    __slots__ = ("node_id", "layers")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    layers: LayerRange
    def __init__(self, node_id: _Optional[str] = ..., layers: _Optional[_Union[LayerRange, _Mapping]] = ...) -> None: ...

class RouteProbe(_message.Message):
    __slots__ = ("model_id", "hops", "failure", "latency_seconds")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    HOPS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    LATENCY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    hops: _containers.RepeatedCompositeFieldContainer[Hop]
    failure: str
    latency_seconds: float
    def __init__(self, model_id: _Optional[str] = ..., hops: _Optional[_Iterable[_Union[Hop, _Mapping]]] = ..., failure: _Optional[str] = ..., latency_seconds: _Optional[float] = ...) -> None: ...

class Speed(_message.Message):
    __slots__ = ("model_id", "quantization", "prefill_tokens_per_second", "decode_tokens_per_second")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    quantization: Quantization
    prefill_tokens_per_second: float
    decode_tokens_per_second: float
    def __init__(self, model_id: _Optional[str] = ..., quantization: _Optional[_Union[Quantization, str]] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_tokens_per_second: _Optional[float] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("node_id", "rtt_seconds", "bytes_per_second")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    RTT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    rtt_seconds: float
    bytes_per_second: float
    def __init__(self, node_id: _Optional[str] = ..., rtt_seconds: _Optional[float] = ..., bytes_per_second: _Optional[float] = ...) -> None: ...

class Node(_message.Message):
    __slots__ = ("node_id", "forward_address", "grpc_address", "stub", "tracker_node", "vram_bytes", "quantization", "shards", "available_models", "num_sessions", "resident_bytes", "software_version", "device", "alive", "kv_tokens_free", "probes", "draining", "fallback_quantizations", "site", "memory_free_bytes", "workspace_bytes", "queue_length", "speeds", "links", "fetches")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    FORWARD_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    GRPC_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STUB_FIELD_NUMBER: _ClassVar[int]
    TRACKER_NODE_FIELD_NUMBER: _ClassVar[int]
    VRAM_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_MODELS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    SOFTWARE_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FREE_FIELD_NUMBER: _ClassVar[int]
    PROBES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_QUANTIZATIONS_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    WORKSPACE_BYTES_FIELD_NUMBER: _ClassVar[int]
    QUEUE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SPEEDS_FIELD_NUMBER: _ClassVar[int]
    LINKS_FIELD_NUMBER: _ClassVar[int]
    FETCHES_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    forward_address: str
    grpc_address: str
    stub: bool
    tracker_node: bool
    vram_bytes: int
    quantization: Quantization
    shards: _containers.RepeatedCompositeFieldContainer[Shard]
    available_models: _containers.RepeatedScalarFieldContainer[str]
    num_sessions: int
    resident_bytes: int
    software_version: str
    device: str
    alive: bool
    kv_tokens_free: int
    probes: _containers.RepeatedCompositeFieldContainer[RouteProbe]
    draining: bool
    fallback_quantizations: _containers.RepeatedScalarFieldContainer[Quantization]
    site: str
    memory_free_bytes: int
    workspace_bytes: int
    queue_length: int
    speeds: _containers.RepeatedCompositeFieldContainer[Speed]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    fetches: bool
    def __init__(self, node_id: _Optional[str] = ..., forward_address: _Optional[str] = ..., grpc_address: _Optional[str] = ..., stub: _Optional[bool] = ..., tracker_node: _Optional[bool] = ..., vram_bytes: _Optional[int] = ..., quantization: _Optional[_Union[Quantization, str]] = ..., shards: _Optional[_Iterable[_Union[Shard, _Mapping]]] = ..., available_models: _Optional[_Iterable[str]] = ..., num_sessions: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., software_version: _Optional[str] = ..., device: _Optional[str] = ..., alive: _Optional[bool] = ..., kv_tokens_free: _Optional[int] = ..., probes: _Optional[_Iterable[_Union[RouteProbe, _Mapping]]] = ..., draining: _Optional[bool] = ..., fallback_quantizations: _Optional[_Iterable[_Union[Quantization, str]]] = ..., site: _Optional[str] = ..., memory_free_bytes: _Optional[int] = ..., workspace_bytes: _Optional[int] = ..., queue_length: _Optional[int] = ..., speeds: _Optional[_Iterable[_Union[Speed, _Mapping]]] = ..., links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ..., fetches: _Optional[bool] = ...) -> None: ...

class DeployedModel(_message.Message):
    __slots__ = ("manifest", "kv_tokens", "priority", "context_length", "replicas", "kv_precision")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    KV_PRECISION_FIELD_NUMBER: _ClassVar[int]
    manifest: ModelManifest
    kv_tokens: int
    priority: int
    context_length: int
    replicas: int
    kv_precision: KvPrecision
    def __init__(self, manifest: _Optional[_Union[ModelManifest, _Mapping]] = ..., kv_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., context_length: _Optional[int] = ..., replicas: _Optional[int] = ..., kv_precision: _Optional[_Union[KvPrecision, str]] = ...) -> None: ...

class Topology(_message.Message):
    __slots__ = ("version", "nodes", "models")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    version: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    models: _containers.RepeatedCompositeFieldContainer[DeployedModel]
    def __init__(self, version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., models: _Optional[_Iterable[_Union[DeployedModel, _Mapping]]] = ...) -> None: ...

class TopologyUpdate(_message.Message):
    __slots__ = ("version", "base_version", "nodes", "removed_node_ids", "models", "removed_model_ids")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REMOVED_NODE_IDS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    REMOVED_MODEL_IDS_FIELD_NUMBER: _ClassVar[int]
    version: int
    base_version: int
    nodes: _containers.RepeatedCompositeFieldContainer[Node]
    removed_node_ids: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedCompositeFieldContainer[DeployedModel]
    removed_model_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[int] = ..., base_version: _Optional[int] = ..., nodes: _Optional[_Iterable[_Union[Node, _Mapping]]] = ..., removed_node_ids: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[_Union[DeployedModel, _Mapping]]] = ..., removed_model_ids: _Optional[_Iterable[str]] = ...) -> None: ...
