"""A mesh of real processes with a token: closed to who does not show it, and open to who does while it is changed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import openai
import psutil
import pytest
from typer.testing import CliRunner

from meshnet.cli.main import app
from meshnet.security.shared_secret import SharedSecret
from meshnet.security.token_file import create_file, read_tokens
from meshnet.security.tokens import make_token
from meshnet.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc, tracker_pb2, tracker_pb2_grpc
from meshnet.wire import DTYPE, SESSION, SHAPE
from tests.e2e.eight_nodes import prompts
from tests.e2e.mesh import Mesh, NodeSpec, running_mesh
from tests.e2e.streams import streams
from tests.e2e.tiny import KV_TOKENS, room_for, save_tiny_llama, token_ids
from tests.processes import RunningProcess, start, wait_until

MODEL = "tiny"
NUM_STREAMS = 3
NEW_TOKENS = 600
SESSION_ID = "3f2504e0-4f89-41d3-9a0c-0305e82c3301"
FRAME = {SHAPE: "1,1,64", DTYPE: "bfloat16", SESSION: SESSION_ID}
GRPCURL = str(Path(sys.executable).parent / "grpcurl")


@dataclass
class Guarded:
    """A mesh with a token. `tokens`: all that it has ever had, and one that it has not."""

    mesh: Mesh
    path: Path
    other: Path
    tokens: set[str] = field(default_factory=set)

    @property
    def processes(self) -> list[RunningProcess]:
        assert self.mesh.gateway
        return [self.mesh.tracker, self.mesh.gateway, *self.mesh.nodes.values()]

    @property
    def token(self) -> str:
        return read_tokens(self.path)[0]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """Two nodes with half of the layers each. The second has no files: it fetches its weights from the first."""
    folder = tmp_path_factory.mktemp("token")
    path, other = folder / "token", folder / "other"
    create_file(path, [make_token()])
    create_file(other, [make_token()])
    weights = save_tiny_llama(folder / "tiny", vocabulary=True, context_length=2048)
    specs = [
        NodeSpec("a", room_for(3), tracker_node=True),
        NodeSpec("b", room_for(3), models=(), options=("--cache-dir", str(folder / "cache"))),
    ]
    with running_mesh(
        [f"{MODEL}={weights}"], specs, deploy=[MODEL], kv_tokens=KV_TOKENS, gateway=True, secret=SharedSecret(path)
    ) as mesh:
        assert mesh.layers(MODEL) == {"a": ["0-3"], "b": ["3-6"]}
        yield Guarded(mesh, path, other, {*read_tokens(path), *read_tokens(other)})


def run(*arguments: str, env: dict[str, str] | None = None, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments,
        env={**os.environ, **(env or {})},
        input=given,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def meshnet(*arguments: str, env: dict[str, str] | None = None, given: str = "") -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "meshnet.cli", *arguments, env={"COLUMNS": "200", **(env or {})}, given=given)


@pytest.mark.parametrize("shown", ["nothing", "another mesh's"])
def test_grpc_refuses_who_does_not_show_it(guarded: Guarded, shown: str) -> None:
    metadata = [] if shown == "nothing" else [("authorization", f"Bearer {read_tokens(guarded.other)[0]}")]
    tracker, entry = guarded.mesh.tracker_address, guarded.mesh.nodes["a"].match[2]
    with grpc.insecure_channel(tracker) as to_tracker, grpc.insecure_channel(entry) as to_entry:
        tracking = tracker_pb2_grpc.TrackerStub(to_tracker)
        admin = admin_pb2_grpc.AdminStub(to_tracker)
        inference = inference_pb2_grpc.InferenceStub(to_entry)
        generate = inference_pb2.GenerateRequest(
            request_id=SESSION_ID, model_id=MODEL, prompt_token_ids=[1], max_new_tokens=1
        )
        for call in (
            lambda: tracking.Register(tracker_pb2.RegisterRequest(), metadata=metadata, timeout=10),
            lambda: tracking.GetTopology(tracker_pb2.GetTopologyRequest(), metadata=metadata, timeout=10),
            lambda: list(tracking.WatchTopology(tracker_pb2.WatchTopologyRequest(), metadata=metadata, timeout=10)),
            lambda: admin.ListNodes(admin_pb2.ListNodesRequest(), metadata=metadata, timeout=10),
            lambda: admin.EvictNode(admin_pb2.EvictNodeRequest(node_id="b"), metadata=metadata, timeout=10),
            lambda: list(inference.Generate(generate, metadata=metadata, timeout=10)),
            lambda: inference.PutVocabulary(inference_pb2.Vocabulary(), metadata=metadata, timeout=10),
        ):
            with pytest.raises(grpc.RpcError) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert set(guarded.mesh.topology().nodes) == {"a", "b"}


@pytest.mark.parametrize("shown", ["nothing", "another mesh's"])
def test_http_refuses_who_does_not_show_it(guarded: Guarded, shown: str) -> None:
    headers = {} if shown == "nothing" else {"Authorization": f"Bearer {read_tokens(guarded.other)[0]}"}
    node, gateway = f"http://{guarded.mesh.nodes['a'].match[1]}", guarded.mesh.gateway_url
    revision = guarded.mesh.topology().models[MODEL].manifest.revision
    for method, url, more in (
        ("POST", f"{node}/forward", FRAME),
        ("DELETE", f"{node}/sessions/{SESSION_ID}", {}),
        ("POST", f"{node}/echo", {}),
        ("GET", f"{node}/models/{MODEL}/{revision}", {}),
        ("GET", f"{node}/models/{MODEL}/{revision}/files/model.safetensors", {}),
        ("GET", f"{gateway}/v1/models", {}),
        ("POST", f"{gateway}/v1/completions", {}),
        ("GET", f"{gateway}/metrics", {}),
        ("GET", f"{gateway}/v1/mesh/coverage", {}),
    ):
        body = bytes(128) if method == "POST" else None
        answer = httpx.request(method, url, headers=headers | more, content=body, timeout=10)
        assert answer.status_code == 401, url
        assert answer.json()["error"]["code"] in ("unauthenticated", "invalid_api_key")
    for url in (node, gateway):
        live = httpx.get(f"{url}/health", headers=headers, timeout=10)
        assert live.json()["status"] == "ok"
        assert MODEL not in live.text


def test_commands_need_it(guarded: Guarded) -> None:
    tracker = ("--tracker", guarded.mesh.tracker_address)
    for options in ((), ("--token-file", str(guarded.other))):
        refused = meshnet("status", *tracker, *options)
        assert refused.returncode == 1
        assert "--token-file FILE or MESHNET_TOKEN_FILE" in refused.stderr
        refused = meshnet("chat", "--url", guarded.mesh.gateway_url, *options, given="hello\n")
        assert refused.returncode == 1
        assert "wants the token" in refused.stderr
    shown = ("--token-file", str(guarded.path))
    for command in (("status", "--json"), ("describe", "a"), ("directives",), ("plan",), ("events", "--no-follow")):
        told = meshnet(*command, *tracker, *shown)
        assert told.returncode == 0, (command, told.stderr)
    told = meshnet("status", *tracker, env={"MESHNET_TOKEN_FILE": str(guarded.path)})
    assert "complete" in told.stdout, told.stderr
    chat = meshnet("chat", "--url", guarded.mesh.gateway_url, "--max-tokens", "3", *shown, given="t1 t2 t3\n")
    # The tiny model has no chat template: that it is told so proves that it was let in.
    assert "wants the token" not in chat.stderr


def test_grpcurl_works_with_the_header_alone(guarded: Guarded) -> None:
    tracker, entry = guarded.mesh.tracker_address, guarded.mesh.nodes["a"].match[2]
    assert "Unauthenticated" in run(GRPCURL, "-plaintext", tracker, "list").stderr
    header, env = ("-H", "authorization: Bearer ${TOKEN}", "-expand-headers"), {"TOKEN": guarded.token}
    for address, service in ((tracker, "meshnet.v1.Admin"), (entry, "meshnet.v1.Inference")):
        listed = run(GRPCURL, "-plaintext", *header, address, "list", env=env)
        assert service in listed.stdout, listed.stderr
    covered = run(GRPCURL, "-plaintext", *header, tracker, "meshnet.v1.Admin/GetCoverage", env=env)
    assert MODEL in covered.stdout, covered.stderr
    plain = run(GRPCURL, "-plaintext", "-H", f"authorization: Bearer {guarded.token}", tracker, "list")
    assert "meshnet.v1.Tracker" in plain.stdout


def test_health_checks_of_grpc_need_nothing(guarded: Guarded, tmp_path: Path) -> None:
    """But the schema, since reflection is not for strangers."""
    (tmp_path / "health.proto").write_text(
        'syntax = "proto3"; package grpc.health.v1;'
        "message HealthCheckRequest { string service = 1; }"
        "message HealthCheckResponse { enum Status { UNKNOWN = 0; SERVING = 1; } Status status = 1; }"
        "service Health { rpc Check(HealthCheckRequest) returns (HealthCheckResponse); }"
    )
    schema = ("-import-path", str(tmp_path), "-proto", "health.proto")
    for address in (guarded.mesh.tracker_address, guarded.mesh.nodes["b"].match[2]):
        healthy = run(GRPCURL, "-plaintext", *schema, address, "grpc.health.v1.Health/Check")
        assert "SERVING" in healthy.stdout, healthy.stderr


def test_a_rotation_under_running_streams_loses_nothing(guarded: Guarded) -> None:
    mesh, old = guarded.mesh, guarded.token
    asked = prompts(NUM_STREAMS)
    expected = [mesh.generate(MODEL, prompt, NEW_TOKENS) for prompt in asked]
    logged = [len(process.output()) for process in guarded.processes]

    def step(*options: str) -> None:
        outcome = CliRunner().invoke(app, ["token", str(guarded.path), *options])
        assert outcome.exit_code == 0, outcome.output
        guarded.tokens.update(read_tokens(guarded.path))

    with streams(mesh.gateway_url, MODEL, asked, NEW_TOKENS, api_key=old) as clients:
        clients.wait_until_all_run()
        for option in ("--add", "--rotate", "--drop-old"):
            step(option)
            counts = [len(arrivals) + 50 for arrivals in clients.arrivals]
            wait_until(
                lambda counts=counts: all(len(a) >= n for a, n in zip(clients.arrivals, counts, strict=True)),  # type: ignore[misc]
                60,
                f"all streams go on after {option}",
                mesh.logs,
            )
        assert clients.num_running == NUM_STREAMS, "the streams were too short to outlive the rotation"
        assert clients.tokens() == expected
    for process, before in zip(guarded.processes, logged, strict=True):
        said = process.output()[before:]
        # Who has nothing to send or to check meanwhile does not look.
        assert "the tokens in" in said or process not in mesh.nodes.values(), said
        assert not re.search(r"WARNING|ERROR|CRITICAL", said), said

    new = guarded.token
    assert new != old
    assert httpx.get(f"{mesh.gateway_url}/v1/models", headers={"Authorization": f"Bearer {new}"}).status_code == 200
    wait_until(
        lambda: (
            httpx.get(f"{mesh.gateway_url}/v1/models", headers={"Authorization": f"Bearer {old}"}).status_code == 401
        )
    )
    # And what begins now goes from one to the other with the new one alone.
    with openai.OpenAI(base_url=f"{mesh.gateway_url}/v1", api_key=new, max_retries=0) as client:
        answer = client.completions.create(
            model=MODEL, prompt=asked[0], max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
        )
    assert token_ids(answer.choices[0].text) == expected[0][:20]
    stale = openai.OpenAI(base_url=f"{mesh.gateway_url}/v1", api_key=old, max_retries=0)
    with stale, pytest.raises(openai.AuthenticationError):
        stale.models.list()
    mesh.wait_until_idle()


def test_the_secret_is_in_no_log_and_no_process_list(guarded: Guarded) -> None:
    mesh, processes = guarded.mesh, guarded.processes
    texts = [process.output() for process in processes]
    for process in psutil.process_iter():
        try:
            texts.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    texts += [str(psutil.Process(process.process.pid).environ()) for process in processes]
    shown = {"Authorization": f"Bearer {guarded.token}"}
    texts.append(httpx.get(f"{mesh.gateway_url}/metrics", headers=shown).text)
    texts += [json.dumps(mesh.health(node_id)) for node_id in mesh.nodes]
    assert len(guarded.tokens) >= 2
    for token in guarded.tokens:
        assert not [text for text in texts if token in text]


@pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl"))), reason="what it says is for bash and curl")
def test_what_up_says_how_to_go_on_works_as_it_stands(tmp_path: Path) -> None:
    create_file(tmp_path / "token", [make_token()])
    model = save_tiny_llama(tmp_path / "tiny", vocabulary=True)
    listen = ("--gateway-listen", "127.0.0.1:0", "--tracker-listen", "127.0.0.1:0")
    arguments = (
        "--model",
        str(model),
        "--nodes",
        "2",
        "--stub",
        "--vram",
        "80MB",
        "--token-file",
        str(tmp_path / "token"),
    )
    command = [sys.executable, "-m", "meshnet.cli", "up", *listen, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as mesh:
        try:
            assert mesh.stdout
            said = ""
            while "Ctrl-C ends everything" not in said:
                line = mesh.stdout.readline()
                assert line, said
                said += line
            shown = re.search(r"In another terminal:\n(.*)\n\nLogs are in", said, re.DOTALL)
            assert shown, said
            script = re.sub(r"(meshnet chat .*)", r"echo t1 | \1 --max-tokens 1 || true", shown[1])
            # A tiny model has no template for a chat.
            script = script.replace("/v1/chat/completions", "/v1/completions")
            script = re.sub(r'"messages": \[.*?\]', '"prompt": "t1"', script)
            env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "200"}
            done = run("bash", "-e", "-c", script, env=env)
            assert done.returncode == 0, done.stderr
            for part in ("[DONE]", "complete", '"models"'):
                assert part in done.stdout, done.stdout + done.stderr
            children = psutil.Process(mesh.pid).children(recursive=True)
            texts = [said, *(" ".join(child.cmdline()) for child in children)]
            assert not [text for text in texts if read_tokens(tmp_path / "token")[0] in text]
        finally:
            mesh.terminate()
            mesh.wait(60)


@pytest.mark.parametrize(
    "arguments",
    [
        ("tracker", "--listen", "0.0.0.0:0"),
        ("node", "--stub", "--listen", "0.0.0.0:0"),
        ("node", "--stub", "--listen", "127.0.0.1:0", "--grpc-listen", "[::]:0"),
        ("gateway", "--listen", "0.0.0.0:0"),
        ("tracker-node", "--listen", "0.0.0.0", "--model", "MODEL"),
        ("up", "--gateway-listen", "0.0.0.0:0", "--model", "MODEL"),
    ],
    ids=["tracker", "node", "node-grpc", "gateway", "tracker-node", "up"],
)
def test_nothing_opens_itself_to_others_by_accident(arguments: tuple[str, ...], tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    refused = meshnet(*(str(model) if argument == "MODEL" else argument for argument in arguments))
    said = " ".join(re.sub("[│╭╮╰╯─]", " ", refused.stderr + refused.stdout).split())
    assert refused.returncode != 0
    assert "Traceback" not in said
    for way in (
        "meshnet token FILE",
        "--token-file FILE or MESHNET_TOKEN_FILE",
        "Or listen at 127.0.0.1",
        "--insecure",
    ):
        assert way in said


@pytest.mark.parametrize("how", ["--insecure", "--token-file"])
def test_it_opens_where_somebody_has_said_so(how: str, tmp_path: Path) -> None:
    create_file(tmp_path / "token", [make_token()])
    option = [how] if how == "--insecure" else [how, str(tmp_path / "token")]
    arguments = ["-m", "services.tracker", "--listen", "0.0.0.0:0", *option]
    with start(arguments, re.compile(r"listening on (\S+)")) as tracker:
        assert ("INSECURE" in tracker.output()) == (how == "--insecure")


def test_a_token_file_that_others_can_read_starts_nothing(tmp_path: Path) -> None:
    create_file(tmp_path / "token", [make_token()])
    (tmp_path / "token").chmod(0o644)
    for command in (["tracker"], ["node", "--stub"], ["gateway"], ["status"], ["chat"], ["up", "--model", "x"]):
        refused = meshnet(*command, "--token-file", str(tmp_path / "token"))
        assert refused.returncode != 0
        assert f"chmod 600 {tmp_path / 'token'}" in refused.stderr, (command, refused.stderr)
        assert "Traceback" not in refused.stderr
