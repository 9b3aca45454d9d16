"""A report as `headtrain evaluate` writes it, with figures that cannot be mistaken for each other."""

from __future__ import annotations

from typing import Any


def make_report(target: str = "org/target", **settings: Any) -> dict[str, Any]:
    def row(name: str, shift: float) -> dict[str, Any]:
        return {
            "name": name,
            "prompts": 13,
            "new_tokens": 1234,
            "acceptance_length": 2.25 + shift,
            "acceptance_by_depth": [0.7101 + shift, 0.5302 + shift],
            "tokens_per_second": 31.417 + shift,
            "baseline": {"engine": 17.5, "transformers": 16.1},
            "speedup": {"engine": 1.7952 + shift, "transformers": 1.6613 + shift},
            "step_ms": {"draft": 3.1, "verify": 58.2, "other": 0.4},
            "parity": {"compared": 13, "identical": 9, "near_ties": 4, "mismatches": 0, "widest_gap": 0.1},
        }

    return {
        "head": "/tmp/somewhere/head",
        "target": target,
        "device": "some CPU, 2 cores",
        "dtype": "bfloat16",
        "versions": {"headtrain": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
        "date": "2026-11-30",
        "settings": {
            "rule": "greedy",
            "temperature": 0.0,
            "max_new_tokens": 96,
            "limit": 13,
            "draft_temperature": None,
            "seed": 0,
            "threads": 2,
            "batch_size": 1,
            "plan": {"kind": "chain", "depth": 2},
            **settings,
        },
        "sets": [row("mt_bench", 0.0), row("two|halves", 0.011)],
        "mean": {
            "acceptance_length": 2.3101,
            "tokens_per_second": 32.81,
            "speedup": {"engine": 1.8427, "transformers": 1.6239},
        },
    }
