"""One mesh on this machine from its start to Ctrl-C, as `meshnet up` and `meshnet tracker-node` show it."""

from __future__ import annotations

import shlex
import socket

import typer
from rich.console import Console

from meshnet.addresses import WILDCARD_HOSTS, is_loopback, join_address, split_address
from meshnet.cli.chat import print_answer
from meshnet.cli.chat_client import Answering, ChatFailed, first_model
from meshnet.cli.conversation import Conversation
from meshnet.cli.coverage_picture import coverage_picture
from meshnet.cli.launch import Launcher, MeshPlan, RunningMesh, sigterm_interrupts
from meshnet.cli.node_tables import measures_table, nodes_table
from meshnet.cli.processes import ProcessFailed
from meshnet.errors import InvalidRequest
from meshnet.security.options import TOKEN_FILE
from meshnet.security.startup import check_listens

MAX_ANSWER_TOKENS = 256


def run_mesh(plan: MeshPlan, ask: str | None, console: Console) -> None:
    """Returns when it was told to stop and all processes have ended. Raises typer.Exit if one failed."""
    try:
        check_listens(plan.listens, plan.secret, insecure=plan.insecure)
    except InvalidRequest as error:
        typer.echo(f"meshnet: {error}", err=True)
        raise typer.Exit(1) from None
    launcher = Launcher(plan, console)
    with sigterm_interrupts():
        try:
            mesh = launcher.start()
            if plan.waits_for_others:
                _invite(plan, console)
            topology = launcher.wait_until_served(mesh)
            for table in (nodes_table(topology), measures_table(topology)):
                console.print(table)
                console.print()
            console.print(coverage_picture(topology, {}))
            if ask:
                _ask(mesh, plan, ask, console)
            _how_to_go_on(mesh, plan, launcher, console)
            launcher.wait()
        except KeyboardInterrupt:
            console.print("\nstopping")
        except ProcessFailed as error:
            console.print(f"{error}\n", style="red")
            raise typer.Exit(1) from None
        finally:
            launcher.processes.stop()


def _invite(plan: MeshPlan, console: Console) -> None:
    host, port = split_address(plan.tracker_listen)
    if is_loopback(host):
        console.print("Only this machine can join: it listens at loopback. --listen 0.0.0.0 lets others in.\n")
        return
    tracker = join_address(plan.advertise or (socket.gethostname() if host in WILDCARD_HOSTS else host), port)
    console.print(
        f"Other machines join with\n  meshnet node --tracker {tracker} --listen 0.0.0.0:7710 --model ID=PATH "
        f"{_security_options(plan) or '--insecure'}\n",
        markup=False,
        soft_wrap=True,
    )


def _security_options(plan: MeshPlan) -> str:
    """As other commands of this mesh need them."""
    return f"{TOKEN_FILE} {shlex.quote(str(plan.secret.path))}" if plan.secret else ""


def _ask(mesh: RunningMesh, plan: MeshPlan, question: str, console: Console) -> None:
    console.print(f"[bold]{question}[/bold]")
    model = first_model(mesh.gateway_url, plan.secret)
    answering = Answering(mesh.gateway_url, model, max_tokens=MAX_ANSWER_TOKENS, secret=plan.secret)
    conversation = Conversation()
    conversation.ask(question)
    try:
        print_answer(answering, conversation)
    except ChatFailed as error:
        console.print(f"[{error}]", style="red", markup=False)
    console.print()


def _how_to_go_on(mesh: RunningMesh, plan: MeshPlan, launcher: Launcher, console: Console) -> None:
    model = first_model(mesh.gateway_url, plan.secret)
    url, tracker = mesh.gateway_url, mesh.tracker_address
    options = export = curl_header = grpcurl_header = ""
    if plan.secret:
        # Not in arguments: other users of a machine see command lines.
        options = f" {_security_options(plan)}"
        export = f"\n  export TOKEN=$(head -n 1 {shlex.quote(str(plan.secret.path))})"
        curl_header = ' -H @<(echo "Authorization: Bearer $TOKEN")'
        grpcurl_header = " -expand-headers -H 'authorization: Bearer ${TOKEN}'"
    console.print(
        f"The mesh is up. In another terminal:\n{export}\n"
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{curl_header} -d \\\n"
        f"""    '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Say hello."}}]}}'\n"""
        f"  meshnet chat --url {url}{options}\n"
        f"  meshnet status --tracker {tracker}{options}\n"
        f"  grpcurl -plaintext{grpcurl_header} {tracker} meshnet.v1.Admin/GetCoverage\n\n"
        f"Logs are in {launcher.log_place}. Ctrl-C ends everything.",
        markup=False,
        soft_wrap=True,
    )
