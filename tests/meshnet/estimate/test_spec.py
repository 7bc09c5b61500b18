"""SPECs of machines, and what is said of wrong ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import InvalidRequest
from meshnet.estimate.pipeline import Machine, Way
from meshnet.estimate.presets import DEFAULT_PRESET, PRESETS
from meshnet.estimate.spec import NodeSpec, machines_of, parse_nodes
from meshnet.estimate.surroundings import PAYLOAD_SHARE, surroundings_of_specs
from meshnet.model import Quantization

GB = 10**9


def one(text: str) -> NodeSpec:
    (node,) = parse_nodes([text])
    return node


def test_memory_alone_is_a_node_with_the_usual_rest() -> None:
    node = one("24GB")
    assert (node.node_id, node.memory_bytes) == ("node-0", 24 * GB)
    assert node.hardware == PRESETS[DEFAULT_PRESET].hardware
    assert node.quantizations == (Quantization.BFLOAT16,)
    assert node.link_bytes_per_second == 125e6


def test_everything_can_be_said() -> None:
    node = one(
        "name=a, memory=24GiB, quantization=bfloat16+int8, bandwidth=40GB/s, compute=2.5TFLOPS, layer=80us, "
        "link=2.5Gbit/s, delay=0.5ms, machine=m, cores=2, shared=50GB/s"
    )
    assert (node.node_id, node.memory_bytes, node.machine_id) == ("a", 24 << 30, "m")
    assert node.quantizations == (Quantization.BFLOAT16, Quantization.INT8)
    hardware = node.hardware
    assert (hardware.bytes_per_second, hardware.flops_per_second) == (40e9, 2.5e12)
    assert hardware.layer_seconds == pytest.approx(80e-6)
    assert (node.link_bytes_per_second, node.delay_seconds) == (312.5e6, 0.0005)
    assert node.shared == Machine(2, 50e9)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_a_whole_machine_of_which_parts_may_differ(name: str) -> None:
    assert one(name).hardware == PRESETS[name].hardware
    assert one(name).memory_bytes == PRESETS[name].memory_bytes
    changed = one(f"{name.upper()},memory=1GB,bandwidth=1GB/s")
    assert (changed.memory_bytes, changed.hardware.bytes_per_second) == (GB, 1e9)
    assert changed.hardware.flops_per_second == PRESETS[name].hardware.flops_per_second


def test_several_are_numbered_so_that_they_sort_as_they_count() -> None:
    names = [node.node_id for node in parse_nodes(["rtx4090", "2*name=b,8GB", "9 * 4GB"])]
    assert names == ["node-00", "b-0", "b-1", *(f"node-{number:02}" for number in range(3, 12))]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx9090", "'rtx9090' is neither a size such as 24GB nor one of cpu-core"),
        ("", "is neither a size"),
        ("name=a", "how much memory does it lend"),
        ("memory=0GB", "lends more than nothing"),
        ("24GB,vram=8GB", "'vram' is no property of a node: use name, memory"),
        ("24GB,48GB", "memory is there twice"),
        ("rtx3090,a100", "preset is there twice"),
        ("24GB,bandwidth=40", "bandwidth: '40' is no rate of bytes: write for example 40GB/s"),
        ("24GB,bandwidth=40GB", "is no rate of bytes"),
        ("24GB,bandwidth=40GB/s", "bandwidth and compute go together"),
        ("24GB,compute=fast", "compute: 'fast' is no speed of computing"),
        ("24GB,link=1Gb", "link: '1Gb' is no rate of a link: write for example 1Gbit/s"),
        ("24GB,delay=5", "delay: '5' is no time"),
        ("24GB,quantization=int3", "quantization: 'int3' is not a quantization: use bfloat16"),
        ("24GB,name=../x", "is not a node id"),
        ("24GB,cores=2", "name it with machine=NAME"),
        ("24GB,machine=m,cores=0", "cores: '0' is no number above 0"),
        ("0*24GB", "0 nodes are not between 1 and 1000"),
        ("2000*24GB", "2000 nodes are not between 1 and 1000"),
    ],
)
def test_what_is_wrong_is_said(text: str, said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_nodes([text])
    assert said in str(raised.value)
    assert str(raised.value).startswith(f"--node {text}: ")


def test_names_are_not_given_twice() -> None:
    with pytest.raises(InvalidRequest, match="two nodes are named 'a'"):
        parse_nodes(["name=a,1GB", "name=a,2GB"])


def test_nodes_of_a_machine_share_it_and_have_no_link_between_them() -> None:
    nodes = parse_nodes(["2*cpu-core,machine=m,cores=2", "cpu-core,machine=m,shared=20GB/s", "cpu-core,link=100Mbit/s"])
    assert machines_of(nodes) == {"m": Machine(2, 20e9)}
    assert machines_of(nodes[:2]) == {"m": Machine(2, PRESETS["cpu-core"].hardware.bytes_per_second)}
    assert machines_of(parse_nodes(["2*rtx3090,machine=m"])) == {"m": Machine()}
    found = surroundings_of_specs(nodes)
    assert found.way("node-0", "node-2") == Way()
    assert found.way("node-0", "node-3") == Way(0.0002, PAYLOAD_SHARE * 12.5e6)
    with pytest.raises(InvalidRequest, match="machine 'm' differ in cores= or shared="):
        machines_of(parse_nodes(["cpu-core,machine=m,cores=2", "cpu-core,machine=m,cores=4"]))


@given(st.text(max_size=60))
def test_no_text_does_more_than_be_refused(text: str) -> None:
    try:
        nodes = parse_nodes([text])
    except InvalidRequest:
        return
    assert nodes
    assert all(node.memory_bytes > 0 for node in nodes)


@given(st.sampled_from(["name", "memory", "bandwidth", "compute", "layer", "link", "delay", "cores"]), st.text())
def test_no_value_does_more_than_be_refused(key: str, value: str) -> None:
    try:
        parse_nodes([f"rtx3090,machine=m,{key}={value}"])
    except InvalidRequest as error:
        assert "--node" in str(error)  # noqa: PT017 (most values are refused, some are not)
