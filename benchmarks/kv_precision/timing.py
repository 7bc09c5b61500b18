"""How long decode steps take at each precision of KV caches, in turn in one process."""

from __future__ import annotations

import statistics
import time

from rich.table import Table

from benchmarks.kv_precision.running import Whole, load
from meshnet.chunks import CHUNK_TOKENS
from meshnet.model import KvPrecision, Quantization

CACHED_TOKENS = (200, 1000)
SESSIONS = (1, 16)
KV_TOKENS = max(SESSIONS) * 1152
REPEATS = 15


def timing_table() -> Table:
    wholes = {kv: load(Quantization.BFLOAT16, kv, KV_TOKENS) for kv in KvPrecision}
    table = Table(
        title=f"A decode step through all layers, ms of CPU time: median of {REPEATS}, in turn; bfloat16 weights"
    )
    for column in ("cached tokens", "sessions", *KvPrecision, "int8 / bfloat16, median of pairs", "by the fastest"):
        table.add_column(column)
    for cached in CACHED_TOKENS:
        for whole in wholes.values():
            fill(whole, cached)
        for sessions in SESSIONS:
            times: dict[KvPrecision, list[float]] = {kv: [] for kv in KvPrecision}
            for repeat in range(REPEATS + 1):
                for kv in KvPrecision if repeat % 2 else reversed(KvPrecision):
                    took = step_ms(wholes[kv], cached, sessions)
                    if repeat:
                        times[kv].append(took)
            plain, whole_numbers = times[KvPrecision.BFLOAT16], times[KvPrecision.INT8]
            pairs = statistics.median(b / a for a, b in zip(plain, whole_numbers, strict=True))
            medians = (f"{statistics.median(times[kv]):.1f}" for kv in KvPrecision)
            fastest = min(whole_numbers) / min(plain)
            table.add_row(str(cached), str(sessions), *medians, f"{pairs:.2f}", f"{fastest:.2f}")
    table.add_row("", "", *(f"{chunk_ms(whole):.0f}" for whole in wholes.values()), "", "", end_section=True)
    table.caption = f"last row: a chunk of {CHUNK_TOKENS} tokens of a prompt behind {CACHED_TOKENS[-1]} tokens"
    return table


def fill(whole: Whole, cached: int) -> None:
    for start in range(0, cached, CHUNK_TOKENS):
        tokens = [1000 + index for index in range(min(CHUNK_TOKENS, cached - start))]
        whole.run([whole.work(f"s{session}", start, tokens, 0) for session in range(max(SESSIONS))])


def step_ms(whole: Whole, cached: int, sessions: int) -> float:
    works = [whole.work(f"s{session}", cached, [17], 1) for session in range(sessions)]
    started = time.process_time()
    whole.run(works)
    return 1e3 * (time.process_time() - started)


def chunk_ms(whole: Whole) -> float:
    work = whole.work("s0", CACHED_TOKENS[-1], range(1000, 1000 + CHUNK_TOKENS), 1)
    times = []
    for _ in range(5):
        started = time.process_time()
        whole.run([work])
        times.append(1e3 * (time.process_time() - started))
    return statistics.median(times)
