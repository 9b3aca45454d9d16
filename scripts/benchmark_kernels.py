"""Times every kernel against torch, with one harness and shapes as data; on a CPU tiny shapes check that it runs.

    python scripts/benchmark_kernels.py --out runs/kernels [--only tree_attention]

On a GPU each time is the median of graph replays; the device-to-device copy of the same run gives the bandwidth that shares
refer to. Prints a table, writes kernels.json into the folder.
"""

# ruff: noqa: B023 (each closure runs before its loop moves on)
import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from headtrain_kernels import reference  # noqa: E402
from headtrain_kernels.ancestors import pack_ancestors, tree_mask  # noqa: E402
from headtrain_kernels.distill import distill  # noqa: E402
from headtrain_kernels.grouped_residual import grouped_residual  # noqa: E402
from headtrain_kernels.kv_commit import kv_commit  # noqa: E402
from headtrain_kernels.noise import counter_noise  # noqa: E402
from headtrain_kernels.topk_logprob import topk_logprob  # noqa: E402
from headtrain_kernels.tree_attention import tree_attention  # noqa: E402
from headtrain_kernels.tree_verify import tree_verify  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
DTYPE = torch.bfloat16 if GPU else torch.float32
REPEATS = 30 if GPU else 3
BUDGET_MS = 200  # time for one measurement, a slow form is run less often

ATTENTION = (
    [(length, n, 8, 4, 128) for length in (4096, 16_384, 32_768, 131_072) for n in (1, 4, 16, 64, 128)]
    if GPU
    else [(40, n, 2, 2, 64) for n in (1, 5)]
)  # prefix length, nodes, KV heads, group, head dim
FLEX = [(32_768, n, 8, 4, 128) for n in (1, 16, 64)]
VOCABULARY = 128_256 if GPU else 300
DRAFT_VOCABULARY = 32_000 if GPU else 200
HIDDEN = 4096 if GPU else 32


@dataclass
class Result:
    kernel: str
    case: str
    form: str
    time_ms: float
    gbytes_per_second: float
    share_of_copy: float | None = None


def measure(run: Callable[[], object]) -> float:
    """Median milliseconds; on a GPU of ten graph replays at a time, so that launches cost nothing."""
    run()
    if not GPU:
        times = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _time_events(graph.replay)


def _time_events(run: Callable[[], object]) -> float:
    def times(runs: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(runs):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / runs

    once = times(1)
    runs = max(1, min(10, round(BUDGET_MS / 10 / once)))
    repeats = max(5, min(REPEATS, round(BUDGET_MS / (once * runs))))
    return statistics.median(times(runs) for _ in range(repeats))


def measure_eager(run: Callable[[], object]) -> float:
    """For code that cannot be captured (autograd)."""
    run()
    return _time_events(run) if GPU else measure(run)


def copy_bandwidth() -> float:
    """GB/s, bytes read plus bytes written."""
    source = torch.randn(2**29 if GPU else 2**20, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / measure(lambda: target.copy_(source)) / 1e6


def random_tree(num_nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """parents [1, n], depths [1, n], ancestors [1, n, n] of a breadth-first tree, three children a node."""
    parents = torch.tensor([-1, *((node - 1) // 3 for node in range(1, num_nodes))])
    depths, ancestors = torch.zeros(num_nodes, dtype=torch.int64), torch.eye(num_nodes, dtype=torch.bool)
    for node in range(1, num_nodes):
        depths[node] = depths[parents[node]] + 1
        ancestors[node] |= ancestors[parents[node]]
    return parents[None].to(DEVICE), depths[None].to(DEVICE), ancestors[None].to(DEVICE)


def bench_tree_attention() -> Iterator[tuple[str, str, int, float]]:
    for length, n, heads, group, dim in ATTENTION:
        total = length + n
        q = torch.randn(1, heads * group, n, dim, device=DEVICE, dtype=DTYPE)
        # prefixes up to 8k fit into the L2 of an H200 (50 MB): their replays are warm
        k, v = (torch.randn(1, heads, total, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
        lengths = torch.tensor([length], device=DEVICE)
        _, depths, ancestors = random_tree(n)
        words = pack_ancestors(ancestors)
        causal = pack_ancestors(torch.ones_like(ancestors).tril())
        chain = torch.arange(n, device=DEVICE)[None]
        mask = tree_mask(lengths, depths, words, total, dtype=DTYPE)[:, None]
        moved = k.nbytes + v.nbytes + 2 * q.nbytes
        case = f"L={length} n={n} Hkv={heads} G={group} d={dim}"
        forms: dict[str, Callable[[], object]] = {
            "tree": lambda: tree_attention(q, k, v, lengths, depths, words),
            "causal words": lambda: tree_attention(q, k, v, lengths, chain, causal),
            "deterministic": lambda: tree_attention(q, k, v, lengths, depths, words, deterministic=True),
            "SDPA with mask": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True),
        }
        if n == 1:
            forms["SDPA"] = lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        for form, run in forms.items():
            yield case, form, moved, measure(run)


def bench_flex_attention() -> Iterator[tuple[str, str, int, float]]:
    """torch's own answer to tree masks; apart from the rest and last, for each shape is compiled."""
    for length, n, heads, group, dim in FLEX if GPU else ():
        q = torch.randn(1, heads * group, n, dim, device=DEVICE, dtype=DTYPE)
        k, v = (torch.randn(1, heads, length + n, dim, device=DEVICE, dtype=DTYPE) for _ in range(2))
        run = _flex(q, k, v, length, random_tree(n)[2])
        case = f"L={length} n={n} Hkv={heads} G={group} d={dim}"
        yield case, "FlexAttention", k.nbytes + v.nbytes + 2 * q.nbytes, measure(run)


def _flex(q, k, v, length: int, ancestors: torch.Tensor) -> Callable[[], object]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    table, n = ancestors[0], q.shape[2]

    def sees(batch, head, node, slot):
        return (slot < length) | table[node, (slot - length).clamp(0, n - 1)]

    block_mask = create_block_mask(sees, 1, None, n, k.shape[2], device=DEVICE)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=block_mask, enable_gqa=True)


def bench_kv_commit() -> Iterator[tuple[str, str, int, float]]:
    layers, heads, capacity, dim, depth = (32, 8, 4096, 128, 8) if GPU else (3, 2, 64, 64, 4)
    cache = torch.randn(layers, 2, 1, heads, capacity, dim, device=DEVICE, dtype=DTYPE)
    lengths = torch.tensor([capacity // 2], device=DEVICE)
    path = torch.arange(depth + 1, device=DEVICE)[None] * 2
    moved = 2 * layers * 2 * heads * depth * dim * cache.element_size()
    case = f"{layers} layers, {depth} rows moved"
    yield case, "kv_commit", moved, measure(lambda: kv_commit(cache, lengths, path))
    source, target = capacity // 2 + path[0], capacity // 2 + torch.arange(depth + 1, device=DEVICE)
    yield (
        case,
        "index_select + index_copy",
        moved,
        measure(lambda: cache.index_copy_(4, target, cache.index_select(4, source))),
    )
    if not GPU:
        yield case, "reference", moved, measure(lambda: reference.kv_commit(cache, lengths, path))


def bench_tree_verify() -> Iterator[tuple[str, str, int, float]]:
    n = 60 if GPU else 6
    parents, depths, _ = random_tree(n)
    depth = int(depths.max())
    logits = torch.randn(1, n, VOCABULARY, device=DEVICE, dtype=DTYPE)
    tokens, valid = torch.zeros_like(parents), torch.ones_like(parents, dtype=torch.bool)
    row = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    case = f"n={n} V={VOCABULARY}"
    tree = (logits, tokens, parents, depths, valid, depth)
    yield case, "greedy", logits.nbytes, measure(lambda: tree_verify(*tree))
    yield case, "gumbel", logits.nbytes, measure(lambda: tree_verify(*tree, 3, row, row))
    yield case, "torch argmax alone", logits.nbytes, measure(lambda: logits.argmax(-1))


def bench_noise() -> Iterator[tuple[str, str, int, float]]:
    rows = torch.arange(9, device=DEVICE)
    case = f"9 positions, V={VOCABULARY}"
    moved = 9 * VOCABULARY * 4
    yield case, "counter_noise", moved, measure(lambda: counter_noise(1, rows, rows, VOCABULARY))
    out = torch.empty(9, VOCABULARY, device=DEVICE)
    yield case, "torch exponential_", moved, measure_eager(lambda: out.exponential_().log_().neg_())


def bench_topk_logprob() -> Iterator[tuple[str, str, int, float]]:
    for rows in (1, 10):
        hidden = torch.randn(rows, HIDDEN, device=DEVICE, dtype=DTYPE)
        weight = torch.randn(DRAFT_VOCABULARY, HIDDEN, device=DEVICE, dtype=DTYPE)
        keys = torch.arange(rows, device=DEVICE)
        case = f"M={rows} Vd={DRAFT_VOCABULARY} H={HIDDEN} k=10"
        yield case, "topk_logprob", weight.nbytes, measure(lambda: topk_logprob(hidden, weight, 10))
        yield (
            case,
            "with noise",
            weight.nbytes,
            measure(lambda: topk_logprob(hidden, weight, 10, None, 1.0, 1, keys, keys)),
        )
        plain = measure(lambda: torch.log_softmax((hidden @ weight.T).float(), -1).topk(10, -1))
        yield case, "torch", weight.nbytes, plain


def bench_distill() -> Iterator[tuple[str, str, int, float]]:
    steps, tokens = (4, 4096) if GPU else (2, 20)
    student = torch.randn(steps, tokens, HIDDEN, device=DEVICE, dtype=DTYPE, requires_grad=True)
    weight = (torch.randn(DRAFT_VOCABULARY, HIDDEN, device=DEVICE, dtype=DTYPE) / HIDDEN**0.5).requires_grad_()
    teacher, rows = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=DTYPE), weight.detach().clone()
    weights = torch.full((steps, tokens), 1 / tokens, device=DEVICE)

    def naive() -> None:
        p = torch.softmax((teacher @ rows.T).float(), -1)
        log_q = torch.log_softmax((student @ weight.T).float(), -1)
        torch.autograd.grad(-(weights * (p * log_q).sum(-1)).sum(), (student, weight))

    def fused() -> None:
        torch.autograd.grad(distill(student, weight, teacher, rows, weights)[0], (student, weight))

    forms = {"distill": fused, "torch": naive}
    for form, run in forms.items():
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if GPU else 0
        duration = measure_eager(run)
        peak = f", peak {(torch.cuda.max_memory_allocated() - before) / 2**30:.2f} GiB" if GPU else ""
        yield f"K={steps} N={tokens} Vd={DRAFT_VOCABULARY} D={HIDDEN}{peak}", form, weight.nbytes, duration


def bench_grouped_residual() -> Iterator[tuple[str, str, int, float]]:
    heads = 4
    weight = torch.randn(heads, HIDDEN, HIDDEN, device=DEVICE, dtype=DTYPE) / HIDDEN**0.5
    bias = torch.zeros(heads, HIDDEN, device=DEVICE, dtype=DTYPE)
    for rows in (1, 64):
        x = torch.randn(rows, HIDDEN, device=DEVICE, dtype=DTYPE)
        case = f"K={heads} N={rows} H={HIDDEN}"
        yield case, "grouped_residual", weight.nbytes, measure(lambda: grouped_residual(x, weight, bias))
        yield case, "reference", weight.nbytes, measure(lambda: reference.grouped_residual(x, weight, bias))


BENCHMARKS = {name.removeprefix("bench_"): run for name, run in list(globals().items()) if name.startswith("bench_")}
BENCHMARKS["flex_attention"] = BENCHMARKS.pop("flex_attention")


def targets(results: list[Result]) -> dict[str, dict[str, float | bool]]:
    """What the kernels shall reach, from the results at hand: the number, its bound, and whether it is kept."""
    times = {(r.kernel, r.case, r.form): r for r in results}

    def attention(length: int, n: int, form: str = "tree") -> Result:
        return times["tree_attention", f"L={length} n={n} Hkv=8 G=4 d=128", form]

    def ratio(a: Result, b: Result) -> float:
        return a.time_ms / b.time_ms

    found: dict[str, dict[str, float | bool]] = {}

    def check(name: str, bound: float, value: Callable[[], float], least: bool = False) -> None:
        try:
            number = value()
        except KeyError:
            return
        found[name] = {"value": number, "bound": bound, "kept": number >= bound if least else number <= bound}

    for length in (16_384, 32_768, 131_072):
        for n in (1, 4, 16):
            check(f"share of copy, L={length} n={n}", 0.85, lambda: attention(length, n).share_of_copy or 0, least=True)
        check(f"n=1 over SDPA, L={length}", 1.05, lambda: ratio(attention(length, 1), attention(length, 1, "SDPA")))
        check(
            f"tree over causal, L={length} n=64",
            1.03,
            lambda: ratio(attention(length, 64), attention(length, 64, "causal words")),
        )
    check("n=64 over n=16, L=32768", 1.3, lambda: ratio(attention(32_768, 64), attention(32_768, 16)))
    check("kv_commit, ms", 0.010, lambda: times["kv_commit", "32 layers, 8 rows moved", "kv_commit"].time_ms)
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for kernels.json")
    parser.add_argument("--only", nargs="*", choices=BENCHMARKS, default=list(BENCHMARKS), help="kernels to time")
    options = parser.parse_args()
    name = torch.cuda.get_device_name() if GPU else "cpu (tiny shapes: no speed)"
    copy = copy_bandwidth()
    print(f"{name}, torch {torch.__version__}, copy {copy:.0f} GB/s")
    results: list[Result] = []
    failures: dict[str, str] = {}
    options.out.mkdir(parents=True, exist_ok=True)

    def write() -> None:
        report = {"device": name, "torch": torch.__version__, "copy_gbytes_per_second": copy, "failures": failures}
        report |= {"targets": targets(results), "results": [asdict(result) for result in results]}
        partial = options.out / ".kernels.json"
        partial.write_text(json.dumps(report, indent=1))
        partial.replace(options.out / "kernels.json")

    for kernel in options.only:
        try:
            with torch.enable_grad() if kernel == "distill" else torch.no_grad():
                for case, form, moved, duration in BENCHMARKS[kernel]():
                    speed = moved / duration / 1e6
                    results.append(Result(kernel, case, form, duration, speed, speed / copy if GPU else None))
                    share = f"{100 * speed / copy:5.1f} %" if GPU else ""
                    print(f"{kernel:17} {case:44} {form:26} {duration:9.4f} ms {share}", flush=True)
        except Exception as error:  # the other kernels are still worth their times
            failures[kernel] = f"{type(error).__name__}: {error}"
            print(f"{kernel:17} failed: {failures[kernel].splitlines()[0]}", flush=True)
        write()  # a time limit may come before the next kernel is done
    for target, found in targets(results).items():
        print(
            f"target {target:40} {found['value']:8.3f} bound {found['bound']:6.3f} {'kept' if found['kept'] else 'MISSED'}"
        )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
