"""What a node is told when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from meshnet.model import Quantization
from meshnet.model_files import HubModel, ModelFiles
from meshnet.security.shared_secret import SharedSecret
from meshnet.speculate import Speculate
from services.node.core.compression import Compression


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One node process. Addresses are `host:port` (port 0: any free one); times are in seconds, sizes in bytes.

    `advertise_host` is the name by which the other machines reach this one. `quantization` is the preferred one; shards
    come at one of `fallbacks` where it does not fit. Nodes of one `site` may fail together. `cache_dir`: folder for
    what the node measured of itself and for weights that it fetches, None: nothing is kept. `fetch`: whether it takes
    layers of models whose files it lacks, and fetches their weights. `hub`: models that it takes from a hub.
    """

    node_id: str
    tracker_address: str
    forward_listen: str
    grpc_listen: str
    advertise_host: str
    vram_bytes: int
    quantization: Quantization
    fallbacks: tuple[Quantization, ...] = ()
    site: str = ""
    cache_dir: Path | None = None
    models: dict[str, ModelFiles] = field(default_factory=dict)
    hub: dict[str, HubModel] = field(default_factory=dict)
    device: str = "cpu"
    threads: int = 1
    secret: SharedSecret | None = None
    stub: bool = False
    tracker_node: bool = False
    fetch: bool = False
    compression: Compression = Compression.AUTO
    speculate: Speculate = Speculate.AUTO
    # A larger frame is answered with 413.
    max_frame_bytes: int = 256 << 20
    # A hop may take this long for its own part of a frame.
    hop_timeout: float = 60.0
    # A token that proves a route must be back within this time for each hop. More than a hop may take, so that it is
    # the hop that is mute which is named.
    probe_timeout: float = 75.0
    # When a hop fails under a generation, its next token must come within this time, over whatever route there is then.
    resume_timeout: float = 60.0
    # A chunk may overtake the one before it by this much.
    reorder_timeout: float = 10.0
    # A body that has not arrived whole by then is given up.
    body_timeout: float = 60.0
    # A session that nothing touched for this long is freed.
    session_lease: float = 300.0
    # Waits of a prompt for room in the KV cache, and how many prompts may wait.
    admission_timeout: float = 120.0
    max_waiting: int = 256
    # Whether KV caches of ended sessions are kept, in room that nobody needs, for prompts that begin in the same way.
    # And how long, if none does.
    prefix_reuse: bool = True
    kept_lease: float = 600.0
    # How long sessions may keep a shard alive that the tracker wants dropped.
    drain_timeout: float = 30.0

    @property
    def fetches(self) -> bool:
        return self.fetch and not self.stub and self.cache_dir is not None

    @property
    def weights_dir(self) -> Path | None:
        """Where what was fetched is kept. Nodes of one machine may have one cache folder."""
        return self.cache_dir / "weights" / self.node_id if self.cache_dir else None
