"""`meshnet models inspect`, on real files and as a picture."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from meshnet.cli.models import inspection_picture
from meshnet.inspection import Inspection
from meshnet.model import WeightBytes
from tests.e2e.commands import meshnet
from tests.models import manifest

GB = 10**9


def picture(inspection: Inspection) -> str:
    console = Console(width=140, color_system=None)
    with console.capture() as captured:
        console.print(inspection_picture(inspection))
    return captured.get()


def row(text: str, first: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if line.startswith(f"{first} "))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_unequal_layers_are_shown_as_smallest_mean_and_largest() -> None:
    layer, small = WeightBytes(3 * GB, 2 * GB, GB, 6 * GB), WeightBytes(GB, GB, GB, 2 * GB)
    model = replace(manifest(), layers=(small, layer), entry=small, kv_bytes_per_token=1000)
    text = picture(Inspection(model, 1000, small, small))
    assert row(text, "bfloat16")[:5] == ["bfloat16", "1.0 GB / 2.0 GB / 3.0 GB", "1.0 GB", "5.0 GB", "2.0 kB"]
    assert row(text, "nf4")[1] == "1.0 GB"
    # 1000 tokens are 8 blocks of 128.
    assert row(text, "float32")[5] == "4.1 MB"
    # Entry part, workspace and a layer of 1 GB each, and KV cache; the other layer and its workspace take 4 GB.
    assert row(text, "4 GB") == ["4 GB", "-", "1 / 1, 2 nodes", "1 / 1, 2 nodes", "-"]
    # 5 GB of weights, and 1 GB of workspace beside the KV cache, do not go into 6 GB.
    assert row(text, "6 GB")[1] == "1 / 1, 2 nodes"
    assert row(text, "8 GB")[1] == "all, 1 node"
    assert row(text, "80 GB")[1:] == ["all, 1 node"] * 4


def test_the_command_reads_headers_and_says_what_fits(smollm2_gguf: Path) -> None:
    said = meshnet("models", "inspect", f"smollm2={smollm2_gguf}", "--kv-tokens", "4096")
    assert "LlamaForCausalLM" in said
    assert "49,152 tokens" in said
    assert "for 4,096 tokens" in said
    # 30 layers, K and V, 3 heads of 64 values: of two bytes, or of one and two for a scale.
    assert "23.0 kB at bfloat16, 11.9 kB at int8, in all layers together" in said
    told = json.loads(meshnet("models", "inspect", str(smollm2_gguf), "--kv", "int8", "--json"))
    assert told["kv_precision"] == "int8"
    assert len(told["manifest"]["layers"]) == 30
    assert told["kv_tokens"] == 8192
    whole = {"vram_bytes": 4 * GB, "quantization": "bfloat16", "shards": [{"start": 0, "end": 30}]}
    assert whole in told["fits"]
