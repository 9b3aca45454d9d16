"""Cost of a decoding step, plain and drafted, captured and eager; the guesses come from a draft with a fixed acceptance.

    python scripts/benchmark_step.py --shape 8b --out runs/step [--eager] [--train]
    python scripts/benchmark_step.py --target FOLDER [--head FOLDER] --out runs/step

A shape is a Llama of that size with random weights whose greedy reply is known: the embedding outweighs the layers, and
row x of the lm_head is the embedding of x - 1, so after token x comes x + 1. The draft runs a real EAGLE-3 layer with a
32k lm_head for each level and then lets its logits point at x + 1, except after every fourth token. Costs are those of a
trained pair, acceptance is fixed, and a wrong reply shows. Writes step-SHAPE.json, prints a table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from decode.engine import Engine, Output  # noqa: E402
from decode.graphs import GraphEngine  # noqa: E402
from decode.settings import Settings  # noqa: E402
from decode.tree import Chain, Plan, Static  # noqa: E402
from headtrain.checkpoint import load_head, write_text  # noqa: E402
from headtrain.evaluate import device_name  # noqa: E402
from headtrain.heads.base import Batch, load_family  # noqa: E402
from headtrain.target import Target  # noqa: E402

SHAPES = {  # hidden, intermediate, layers, heads, KV heads, head dim, vocabulary, draft vocabulary
    "8b": (4096, 14336, 32, 32, 8, 128, 128_256, 32_000),
    "1b": (2048, 8192, 16, 32, 8, 64, 128_256, 32_000),
    "tiny": (64, 96, 2, 4, 2, 64, 400, 200),
}
FIRST = 16  # the chain of tokens runs from here to the end of the draft vocabulary, so no special token is met
MISS = 4  # the draft's likeliest guess after tokens divisible by this is wrong, its second is right
PROMPTS = ("Write a short story about a lighthouse.", "Explain how a bicycle stays upright.", "List ten uses of salt.")


class FixedAcceptance:
    """A head whose logits point at the known reply after it has done all its work."""

    def __init__(self, head: Any, columns: int):
        self.head, self.columns = head, columns
        self.target_layers, self.max_depth = head.target_layers, head.max_depth

    @property
    def vocabulary(self) -> Tensor | None:
        return self.head.vocabulary

    def begin(self, features: Any, tokens: Tensor, lengths: Tensor, capacity: int) -> tuple[Any, Tensor]:
        state, logits = self.head.begin(features, tokens, lengths, capacity)
        return state, self._point(logits, tokens.gather(1, lengths[:, None]))

    def extend(self, state: Any, tokens: Tensor, parents: Tensor) -> Tensor:
        return self._point(self.head.extend(state, tokens, parents), tokens)

    def commit(self, state: Any, features: Any, tokens: Tensor, counts: Tensor) -> Tensor:
        return self._point(self.head.commit(state, features, tokens, counts), tokens.gather(1, counts[:, None] - 1))

    def select(self, state: Any, rows: Tensor) -> None:
        self.head.select(state, rows)

    def _point(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """logits [B, m, Vd] of the children of tokens [B, m]."""
        right = successor(tokens, self.columns)[..., None]
        wrong = successor(right, self.columns)
        missed = (tokens % MISS == 0)[..., None]
        logits = logits.scatter(2, wrong, torch.where(missed, 1e4, 5e3).to(logits.dtype))
        return logits.scatter(2, right, torch.where(missed, 5e3, 1e4).to(logits.dtype))


def successor(tokens: Tensor, columns: int) -> Tensor:
    return torch.where(tokens + 1 < columns, tokens + 1, FIRST)


def make_pair(shape: str, device: torch.device, dtype: torch.dtype) -> tuple[Target, FixedAcceptance]:
    hidden, intermediate, layers, heads, kv_heads, dim, vocabulary, columns = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=dim, vocab_size=vocabulary, max_position_embeddings=131_072,
        tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval().requires_grad_(False)
        embedding, rows = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        torch.nn.init.normal_(embedding)
        torch.nn.init.normal_(rows, std=0.01)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.01)
            layer.mlp.down_proj.weight.mul_(0.01)
        chain = torch.arange(FIRST, columns)
        rows[successor(chain, columns)] = embedding[chain] / hidden**0.5
        target = Target(model, name=shape)
        family = load_family("eagle3")
        head = family.build(family.Config(vocabulary=columns), target, torch.arange(columns))
    head = head.to(device, dtype).eval().requires_grad_(False)
    return target, FixedAcceptance(head, columns)


def tree_of(size: int, depth: int) -> Static:
    """The `size` - 1 likeliest paths when the r-th guess is right with probability 0.7 * 0.3^r."""
    paths: dict[tuple[int, ...], float] = {}
    border = {(rank,): 0.7 * 0.3**rank for rank in range(8)}
    while len(paths) < size - 1:
        best = max(border, key=lambda path: border[path])
        paths[best] = border.pop(best)
        if len(best) < depth:
            border |= {(*best, rank): paths[best] * 0.7 * 0.3**rank for rank in range(8)}
    return Static(paths)


def timed(run: Callable[[], list[Output]], repeats: int) -> tuple[list[Output], float]:
    """Outputs and the median seconds of decoding, without the prompt; one more call before pays for the capture."""
    outputs, seconds = run(), []
    for _ in range(repeats):
        outputs = run()
        timing = outputs[0].timing
        seconds.append(timing.draft + timing.verify + timing.other)
    return outputs, statistics.median(seconds)


def options(kind: type, device: torch.device) -> dict[str, Any]:
    """A CPU cannot capture but takes the same fixed step."""
    return {"capture": device.type == "cuda"} if kind is GraphEngine else {}


def row_of(name: str, outputs: list[Output], seconds: float, engine: Engine) -> dict[str, Any]:
    steps = outputs[0].timing.steps
    tokens = sum(len(output.tokens) - 1 for output in outputs)
    row = {"case": name, "step_ms": 1e3 * seconds / steps, "tokens_per_second": tokens / seconds}
    row["tokens_per_step"] = tokens / max(sum(len(output.accepted) for output in outputs), 1)
    row["eager_because"] = getattr(engine, "eager_because", "asked for")
    return row


def show(rows: list[dict[str, Any]]) -> None:
    plain = rows[0]["step_ms"]
    for row in rows:
        row["steps_of_plain"] = row["step_ms"] / plain
        print(
            f"{row['case']:34} {row['step_ms']:9.3f} ms/step {row['steps_of_plain']:6.2f} x plain"
            f" {row['tokens_per_step']:6.2f} tokens/step {row['tokens_per_second']:9.1f} tokens/s"
            f"{'' if row['eager_because'] is None else '  eager: ' + str(row['eager_because'])}",
            flush=True,
        )


def measure_shape(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    target, draft = make_pair(args.shape, device, dtype)
    columns = SHAPES[args.shape][-1]
    plans: dict[str, Plan | None] = {"plain": None, "chain 4": Chain(4), "tree 60, depth 8": tree_of(60, 8)}
    if args.shape == "tiny":
        plans = {"plain": None, "chain 4": Chain(4), "tree 8, depth 3": tree_of(8, 3)}
    cases = [(name, plan, GraphEngine) for name, plan in plans.items()]
    cases += [(f"{name}, eager", plan, Engine) for name, plan in plans.items()] if args.eager else []
    rows = []
    for length in args.context:
        prompt = [FIRST + i % (columns - FIRST) for i in range(length)]
        expected = [FIRST + i % (columns - FIRST) for i in range(length, length + args.tokens)]
        for name, plan, kind in cases:
            engine = kind(target.model, None if plan is None else draft, plan, **options(kind, device))
            settings = Settings(max_new_tokens=args.tokens, ignore_eos=True)
            outputs, seconds = timed(partial(engine.generate, [prompt], settings), args.repeats)
            assert outputs[0].tokens == expected, f"{name} at {length}: the reply is {outputs[0].tokens[:20]}"
            rows.append(row_of(f"{args.shape} L={length} {name}", outputs, seconds, engine))
        show(rows[-len(cases) :])
    if args.train:
        rows.append(measure_training(target, draft.head, args, device))
    return rows


def measure_training(target: Target, head: Any, args: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Seconds of loss and gradients of one batch of random features, and the memory they take beyond the model's."""
    head = head.requires_grad_(True).float().train()
    shape = (2, 2048) if device.type == "cuda" else (1, 32)
    features = torch.randn(*shape, len(head.target_layers) * target.hidden_size, device=device, dtype=target.dtype)
    hidden = torch.randn(*shape, target.hidden_size, device=device, dtype=target.dtype)
    ids = torch.randint(target.vocab_size, shape, device=device)
    batch = Batch(ids, torch.ones_like(ids), features, hidden)
    cuda, seconds = device.type == "cuda", []
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    with torch.enable_grad():
        for _ in range(args.repeats + 1):
            start = time.perf_counter()
            head.zero_grad(set_to_none=True)
            with torch.autocast(device.type, torch.bfloat16):
                loss = head.loss(batch, target).total
            loss.backward()
            if cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    second = statistics.median(seconds[1:])
    row = {
        "case": f"{args.shape} training step {shape}",
        "step_ms": 1e3 * second,
        "tokens_per_second": ids.numel() / second,
    }
    row["peak_bytes"] = torch.cuda.max_memory_allocated() - before if cuda else None
    memory = f", peak {row['peak_bytes'] / 2**30:.1f} GiB beyond the weights" if cuda else ""
    print(
        f"{row['case']:34} {row['step_ms']:9.3f} ms/step {row['tokens_per_second']:9.1f} tokens/s{memory}", flush=True
    )
    return row


def measure_target(args: argparse.Namespace, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """A real target, and its head if one is given: chat prompts, greedy and sampled; parity with plain decoding."""
    target = Target.load(args.target, str(dtype).removeprefix("torch."), device=device)
    prompts = [target.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                                    return_dict=False) for text in PROMPTS]  # fmt: skip
    cases: list[tuple[str, Any, Plan | None]] = [("plain", None, None)]
    if args.head:
        head = load_head(Path(args.head), target)
        cases += [("head, chain 4", head, Chain(min(4, head.max_depth or 4)))]
        cases += [("head, tree 30", head, tree_of(30, min(6, head.max_depth or 6)))]
    rows = []
    for temperature in (0.0, 1.0):
        settings = Settings(max_new_tokens=args.tokens, temperature=temperature, ignore_eos=True)
        replies: list[list[int]] = []
        for name, draft, plan in cases:
            engine = GraphEngine(target.model, draft, plan, target.tokenizer, **options(GraphEngine, device))
            outputs: list[Output] = []
            seconds = 0.0
            for prompt in prompts:
                one, taken = timed(partial(engine.generate, [prompt], settings), 1)
                outputs, seconds = outputs + one, seconds + taken
            replies = replies or [output.tokens for output in outputs]
            row = row_of(f"{Path(args.target).name} T={temperature} {name}", outputs, seconds, engine)
            row["step_ms"] = 1e3 * seconds / sum(output.timing.steps for output in outputs)
            row["same_as_plain"] = statistics.mean(
                float(output.tokens == reply) for output, reply in zip(outputs, replies, strict=True)
            )
            rows.append(row)
        show(rows[-len(cases) :])
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--shape", choices=SHAPES)
    what.add_argument("--target", help="model folder")
    parser.add_argument("--head", help="folder of a head for the target")
    parser.add_argument("--context", type=int, nargs="+", default=[1024], help="prompt lengths of a shape")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of a reply")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--eager", action="store_true", help="time the eager engine as well")
    parser.add_argument("--train", action="store_true", help="time a training step of the head as well")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = (measure_shape if args.shape else measure_target)(args, device, dtype)
    report = {
        "device": device_name(device),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "rows": rows,
    }
    write_text(args.out / f"step-{args.shape or Path(args.target).name}.json", json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
