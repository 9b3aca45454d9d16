"""Prompt sets that papers report on, by name, from the Hub or from a file of one's own: `gsm8k`, `gsm8k=FILE`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from decode.errors import UserError, one_line
from headtrain.conversations import Message, file_records, load_prompts
from headtrain.recipe import source_kind

COUNT = 80  # prompts of a named set where no limit is given, as in Spec-Bench (arXiv 2401.07851)
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
FIELDS = ("prompt", "turns", "question", "instruction", "article")
SPEC_BENCH = "spec_bench"


@dataclass(frozen=True)
class PromptSet:
    """Where a set lies on the Hub and how a row becomes a prompt. Of several turns the first is asked."""

    dataset: str
    config: str | None = None
    split: str = "train"
    file: str | None = None
    form: str = "{}"
    categories: tuple[str, ...] = ()
    """Of a file that holds several sets."""


def _spec(file: str, *categories: str) -> PromptSet:
    return PromptSet("RedHatAI/speculator_benchmarks", file=file, categories=categories)


SETS: dict[str, PromptSet] = {
    "mt_bench": PromptSet("HuggingFaceH4/mt_bench_prompts"),
    "humaneval": PromptSet("openai/openai_humaneval", split="test", form="Complete this Python function.\n\n{}"),
    "gsm8k": PromptSet("openai/gsm8k", "main", "test"),
    "alpaca": PromptSet("tatsu-lab/alpaca"),
    "cnn_dm": PromptSet("abisee/cnn_dailymail", "3.0.0", "test", form="Summarize: {}"),
    "nq": PromptSet("google-research-datasets/nq_open", split="validation"),
    "spec_multi_turn": _spec("question.jsonl", *MT_BENCH),
    "spec_translation": _spec("translation.jsonl", "translation"),
    "spec_summarization": _spec("summarization.jsonl", "summarization"),
    "spec_qa": _spec("qa.jsonl", "qa"),
    "spec_math": _spec("math_reasoning.jsonl", "math_reasoning"),
    "spec_rag": _spec("rag.jsonl", "rag"),
}


def load_sets(sources: Sequence[str], limit: int | None = None) -> dict[str, list[list[Message]]]:
    """Prompts of each set by its name, which for files is that of the file without its ending.

    A source is a name of `SETS`, `spec_bench` for the six that begin with spec_, one of these with `=FILE`, a file, a
    folder or a Hub name. Raises UserError for one that is unknown (the nearest is suggested), empty or given twice.
    """
    if limit is not None and limit < 1:
        raise UserError(f"--limit: {limit} leaves no prompts; give at least 1")
    found: dict[str, list[list[Message]]] = {}
    for source in _expand(sources):
        name, _, file = source.partition("=")
        if name in SETS and not Path(source).exists():
            rows = _load_named(name, file or None, limit)
        elif source_kind(source) == "missing":
            raise UserError(f"--prompts: {_unknown(source)}")
        else:
            name, rows = Path(source).stem, load_prompts(source, limit)
        if name in found:
            raise UserError(f"--prompts: two sets are called {name}; rename one of the files")
        found[name] = rows
    return found


def _expand(sources: Iterable[str]) -> Iterator[str]:
    for source in sources:
        name, _, file = source.partition("=")
        if name == SPEC_BENCH and not Path(source).exists():
            yield from (f"{key}={file}" if file else key for key in SETS if key.startswith("spec_"))
        else:
            yield source


def _unknown(source: str) -> str:
    near = difflib.get_close_matches(source.partition("=")[0], [*SETS, SPEC_BENCH], n=1)
    if near:
        return f"{source} is neither a set nor a file; did you mean {near[0]}?"
    return f"{source}: no such file, and no set of that name; sets: {', '.join([*SETS, SPEC_BENCH])}"


def _load_named(name: str, file: str | None, limit: int | None) -> list[list[Message]]:
    chosen = SETS[name]
    if file is None:
        records = _hub_records(name, chosen)
    elif Path(file).expanduser().is_file():
        records = file_records(Path(file).expanduser())
    else:
        raise UserError(f"--prompts: {name}={file}: no such file")
    prompts = []
    for record, where in records:
        if (
            chosen.categories
            and isinstance(record, dict)
            and record.get("category", "") not in ("", *chosen.categories)
        ):
            continue
        prompts.append([{"role": "user", "content": _text(record, chosen.form, where)}])
        if len(prompts) == (limit or COUNT):
            break
    if not prompts:
        kind = f" of category {' or '.join(chosen.categories)}" if chosen.categories else ""
        raise UserError(f"--prompts: {name}{f'={file}' if file else ''} has no rows{kind}")
    return prompts


def _hub_records(name: str, chosen: PromptSet) -> Iterator[tuple[Any, str]]:
    try:
        import datasets
    except ImportError:
        raise UserError(f"--prompts: {name} needs the package datasets; install it or give {name}=FILE") from None
    options: dict[str, Any] = {"split": chosen.split, "streaming": True}  # the first rows of what may be gigabytes
    if chosen.file:
        options["data_files"] = chosen.file
    try:
        rows = datasets.load_dataset(chosen.dataset, chosen.config, **options)
        yield from ((record, f"{chosen.dataset}[{index}]") for index, record in enumerate(islice(rows, 100_000)))
    except Exception as error:  # the library and the network raise many kinds; the mend is the same
        raise UserError(
            f"--prompts: {name}: cannot load {chosen.dataset} from the Hub ({one_line(error)}); check the connection or"
            f" give {name}=FILE"
        ) from error


def _text(record: Any, form: str, where: str) -> str:
    """The user's text of one row; rows that are conversations already are taken as they are."""
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with one of {', '.join(FIELDS)}")
    if isinstance(messages := record.get("messages"), list):
        for message in messages:
            if isinstance(message, Mapping) and message.get("role") == "user" and isinstance(message["content"], str):
                return message["content"]
    for field in FIELDS:
        value = record.get(field)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, str) and value.strip():
            extra = record.get("input") if field == "instruction" else None
            return form.format(f"{value}\n\n{extra}" if extra else value)
    raise UserError(
        f"{where}: none of {', '.join(FIELDS)} holds text; it has {', '.join(map(str, record)) or 'no keys'}"
    )
