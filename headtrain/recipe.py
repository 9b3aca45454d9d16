"""The recipe: one strict, typed YAML file that says everything about a run.

Paths in a recipe are relative to the current working directory, not to the recipe's folder. Scalars follow YAML 1.2:
`1e-3` is a number and `no` is a word. Every mistake is one `UserError` line, raised before anything is loaded.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SerializeAsAny, ValidationError

from decode.errors import UserError

DATA_SUFFIXES = (".jsonl", ".json", ".ndjson", ".txt", ".yaml", ".yml", ".parquet", ".csv", ".gz", ".arrow")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_DATA = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _as_sources(value: Any) -> Any:
    if not isinstance(value, (str, list, tuple)):
        raise ValueError("should be text or a list of texts")
    return (value,) if isinstance(value, str) else tuple(value)


Text = Annotated[str, Field(min_length=1)]
Sources = Annotated[tuple[Text, ...], BeforeValidator(_as_sources), Field(min_length=1)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """What all sections share: unknown keys are errors, types are not converted, values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class TargetConfig(Section):
    model: Text
    """Folder, or Hub name `org/name`, of the target."""
    revision: str | None = None
    """Branch, tag or commit of a Hub target."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the target's weights; auto keeps that of the checkpoint."""
    trust_remote_code: bool = False
    """Run Python code that comes with the target; only for authors you trust."""
    device_map: Literal["auto"] | None = None
    """auto spreads a target that one device cannot hold over all devices of this machine; null keeps it on one."""


class HeadChoice(Section):
    family: str
    """Family of the draft head: the name of a file in headtrain/heads."""
    config: SerializeAsAny[BaseModel]
    """The family's own settings; in the recipe they stand beside `family`."""


class DataConfig(Section):
    train: Sources
    """Conversations: file, saved `datasets` folder, Hub name `org/name[/config][:split]`, or a list of these."""
    eval: Sources | None = None
    """Held-out conversations for the evaluation loss, in the same forms."""
    max_length: Annotated[int, Field(ge=2)] = 2048
    """Most tokens of one row; longer rows are cut on the right and counted."""
    turns: Literal["all", "last"] = "all"
    """Assistant turns of a conversation that are trained."""
    template_kwargs: dict[str, Any] = {}
    """Extra variables for the chat template, such as {enable_thinking: false}."""
    limit: Positive | None = None
    """Most conversations used, drawn with `seed`; null uses all."""
    seed: int = 0
    """Seed of the draw of `limit` conversations."""
    pack: bool = False
    """Lay conversations end to end in one row of `train.batch_tokens`, each by itself, instead of padding rows."""
    cache: str | None = None
    """Folder of hidden states that `headtrain cache` wrote; null asks the target during training."""
    cache_dtype: Literal["target", "float8_e4m3fn"] = "target"
    """Type that the cache stores; target: as the target gives them; float8 is smaller and inexact."""


class TrainConfig(Section):
    epochs: Positive | None = None
    """Passes over the data; 1 where neither `epochs` nor `steps` is given."""
    steps: Positive | None = None
    """Optimizer steps, instead of `epochs`."""
    batch_tokens: Positive = 8192
    """Tokens of one micro-batch on one device, padding included; a longer single conversation forms its own."""
    accumulation: Positive = 1
    """Micro-batches per device in one optimizer step."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak learning rate."""
    warmup: Annotated[float, Field(ge=0)] = 0.02
    """Steps of linear warm-up; a value below 1 is a share of all steps."""
    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the learning rate behind the warm-up; cosine and linear end at zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of AdamW, on matrices only."""
    betas: Annotated[tuple[float, float], BeforeValidator(_as_tuple)] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    clip_norm: Annotated[float, Field(gt=0)] | None = 0.5
    """Largest gradient norm; null does not clip."""
    precision: Literal["auto", "bf16", "no"] = "auto"
    """Mixed precision of the head's forward; no computes in float32. auto: bf16 where the device is faster at it."""
    seed: int = 0
    """Seed of initial weights, row order and dropout."""
    log_every: Positive = 10
    """Steps between two log lines."""
    save_every: Positive | None = 500
    """Steps between two checkpoints; null saves only at the end."""
    keep: Positive = 2
    """Most recent checkpoints kept on disk."""


class EvalConfig(Section):
    prompts: Text | None = None
    """File, saved `datasets` folder or Hub name of held-out prompts that are decoded for real."""
    every: Positive | None = None
    """Steps between two such evaluations; null evaluates only at the end."""
    choose: Literal["best", "last"] | None = None
    """Head to publish: of the greatest acceptance length, or of the last step; null: best where `prompts` is given."""
    patience: Positive | None = None
    """Stop after so many evaluations in a row without a better one; null goes on to the end."""
    limit: Positive | None = 16
    """First prompts used; null uses all."""
    max_new_tokens: Positive = 64
    """Most tokens decoded for one prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Temperature of the decoding; 0 is greedy."""


class TrackingConfig(Section):
    wandb: bool = False
    """Log to Weights & Biases."""
    tensorboard: bool = False
    """Log to TensorBoard files in the run's folder."""
    trackio: bool = False
    """Log to Trackio."""
    project: str = "headtrain"
    """Project that the run appears under."""
    name: str | None = None
    """Name of the run; null takes the name of the run's folder."""


class SynthesizeConfig(Section):
    output: Text | None = None
    """JSONL file of conversations that `headtrain synthesize` writes."""
    prompts: Sources | None = None
    """Conversations whose replies the target makes anew, in the forms of `data.train`; null samples the prompts too."""
    number: Positive | None = None
    """First conversations used of `prompts`, or prompts sampled; null uses all of `prompts`."""
    max_prompt_tokens: Positive = 256
    """Most tokens of a sampled prompt; a longer one is skipped."""
    max_new_tokens: Positive = 512
    """Most tokens of a reply; a longer one is cut and marked as unfinished."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Temperature of prompts and replies; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample among the likeliest tokens that reach this mass."""
    seed: int = 0
    """Seed of the sampling; each conversation draws by its own number."""
    rows: Positive = 48
    """Conversations decoded side by side; one that ends makes room for the next."""
    batch: Positive = 192
    """Conversations between two writes; a kill loses at most these."""


class Recipe(Section):
    target: TargetConfig
    """The frozen model that is to answer faster."""
    head: HeadChoice
    """The draft head: `family` and the family's own settings."""
    data: DataConfig
    """The conversations."""
    train: TrainConfig
    """The optimizer and its schedule."""
    eval: EvalConfig
    """Decoding of held-out prompts during training."""
    tracking: TrackingConfig
    """Where numbers are logged besides the run's JSON lines."""
    synthesize: SynthesizeConfig
    """Conversations that the target writes itself."""
    output: Text
    """The run's folder."""

    @classmethod
    def from_dict(
        cls, raw: Any, where: str = "recipe", overridden: Sequence[str] = (), check_paths: bool = True
    ) -> Recipe:
        """Checks nested dictionaries in the shape of the YAML.

        `where` and `overridden` (dotted paths) serve the messages. `check_paths=False` takes another machine's recipe.
        """
        report = _Report(where, overridden)
        if not isinstance(raw, dict):
            raise report.error("", f"expected sections such as target, head and data, found {_shown(raw)}")
        resolved = {key: dict(value) if isinstance(value, dict) else value for key, value in raw.items()}
        for section in ("train", "eval", "tracking", "synthesize"):
            if resolved.get(section) is None:
                resolved[section] = {}
        train = resolved["train"]
        if isinstance(train, dict) and train.get("epochs") is None and train.get("steps") is None:
            train["epochs"] = 1
        if "head" in resolved:
            resolved["head"] = _resolve_head(resolved["head"], report)
        recipe = report.validate(cls, resolved)
        _check_contradictions(recipe, report)
        if check_paths:
            _check_paths(recipe, report)
        return recipe

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain values in the shape of the YAML, every default filled in."""
        plain = self.model_dump(mode="json")
        plain["head"] = {"family": plain["head"]["family"], **plain["head"]["config"]}
        return plain

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the resolved YAML. The file is complete or absent, never half-written."""
        path = Path(path)
        text = yaml.dump(self.to_dict(), Dumper=_Dumper, sort_keys=False, width=120)
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with partial.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise UserError(
                f"{path}: cannot write the recipe ({error.strerror}); choose a folder you can write to"
            ) from error


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = (), check_paths: bool = True) -> Recipe:
    """Reads a recipe and applies `key=value` overrides: dotted keys, YAML values (`data.train=[a.jsonl, b.jsonl]`)."""
    path = Path(path)
    try:
        raw = _parse(path.read_text(encoding="utf-8-sig"), str(path))
    except FileNotFoundError:
        raise UserError(f"{path}: no such recipe; give the path of a YAML file{_nearby(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a folder; give the path of a YAML file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; give the path of a YAML file") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the recipe ({error.strerror})") from None
    if raw is None:
        raise UserError(f"{path}: the recipe is empty; it needs the sections target, head, data and the key output")
    overridden = [_override(raw, text, str(path)) for text in overrides] if isinstance(raw, dict) else []
    return Recipe.from_dict(raw, str(path), overridden, check_paths)


def source_kind(source: str, suffixes: Sequence[str] = DATA_SUFFIXES) -> Literal["local", "hub", "missing"]:
    """Local path that exists, Hub name `org/name[/config][:split]`, or neither. A local path wins over a Hub name."""
    if Path(source).expanduser().exists() or Path(source.rpartition(":")[0] or source).expanduser().exists():
        return "local"
    return "hub" if _HUB_DATA.fullmatch(source) and not source.endswith(tuple(suffixes)) else "missing"


_RESOLVERS = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    "merge": (r"<<", ["<"]),
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"):
            if key.value in seen:
                problem = f"the key {key.value} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
            key.tag = "tag:yaml.org,2002:str"
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _tag, (_pattern, _first) in _RESOLVERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)

_Loader.add_constructor(
    "tag:yaml.org,2002:int", lambda loader, node: int(node.value, 0 if node.value[:2] in ("0x", "0o") else 10)
)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader with other number rules)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: not valid YAML: {_line(error.problem or str(error))}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid YAML: {_line(str(error))}") from None


def _override(raw: dict[str, Any], text: str, where: str) -> str:
    """Sets one `key=value` in the nested dictionaries `raw`. Returns the dotted path of what is new."""
    key, equals, value = text.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise UserError(f"{where}: the override {text!r} is not key=value, such as train.learning_rate=3e-4")
    node: Any = raw
    new = len(names)
    for depth, name in enumerate(names[:-1], start=1):
        if node.get(name) is None:
            node[name] = {}
            new = min(new, depth)
        node = node[name]
        if not isinstance(node, dict):
            above = f"{'.'.join(names[:depth])}, which is {_shown(node)}, not a section"
            raise UserError(f"{where}: the override {text!r} goes below {above}")
    node[names[-1]] = _parse(value, f"{where}: the override {text!r}")
    return ".".join(names[:new])


def _line(text: str) -> str:
    return " ".join(text.split())


def _shown(value: Any) -> str:
    text = _line(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _nearby(path: Path) -> str:
    names = [item.name for item in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f", such as {path.parent / close[0]}" if close else ""


def _fields(model: type[BaseModel] | None, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all keys below a model."""
    for name, field in (model.model_fields if model else {}).items():
        yield prefix + name
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _fields(field.annotation, f"{prefix}{name}.")


class _Report:
    """Turns what is wrong with a recipe into the one line that the user sees."""

    def __init__(self, where: str, overridden: Sequence[str]) -> None:
        self.where, self.overridden = where, overridden

    def error(self, path: str, problem: str) -> UserError:
        given = any(re.match(re.escape(key) + r"(?![\w-])", path) for key in self.overridden)
        shown = f"{path} (from the command line)" if given else path
        return UserError(f"{self.where}: {shown + ': ' if shown else ''}{problem}")

    def validate(self, model: type[Any], raw: Any, prefix: str = "", also: Sequence[str] = ()) -> Any:
        try:
            # By way of JSON, where a strict tuple takes a list.
            return (
                model.model_validate(raw)
                if model is Recipe
                else model.model_validate_json(json.dumps(raw, default=repr))
            )
        except ValidationError as error:
            problems = error.errors(include_url=False)
            # An unknown key explains a missing one (`trian` and `train`), so it is the line to show.
            first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
            path, problem = self._describe(model, raw, first, prefix, also)
            more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
            raise self.error(path, problem + more) from None

    def _describe(
        self, model: type[BaseModel], raw: Any, problem: Any, prefix: str, also: Sequence[str]
    ) -> tuple[str, str]:
        kind, found = problem["type"], f"found {_shown(problem['input'])}"
        path, parents = prefix, []
        for part in problem["loc"]:
            known = isinstance(raw, dict) and part in raw or isinstance(raw, (list, tuple)) and isinstance(part, int)
            if not known and kind != "missing":
                break  # the name of a member of a union, not of a key
            parents.append(str(part))
            path += f"[{part}]" if isinstance(part, int) else f"{'.' if path else ''}{part}"
            raw = raw[part] if known and (isinstance(raw, dict) or part < len(raw)) else None
        if kind == "extra_forbidden":
            keys = [*_fields(model), *also]
            return path, f"unknown key, {found}; {_suggest(parents[-1], '.'.join(parents[:-1]), keys, prefix)}"
        if kind == "missing":
            return path, "missing; add it to the recipe"
        if kind == "model_type":
            return path, f"should be a section with keys, {found}"
        message = _line(problem["msg"].removeprefix("Value error, ").replace("Input should", "should"))
        if kind == "literal_error" and isinstance(problem["input"], str):
            choices = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
            close = difflib.get_close_matches(problem["input"], choices, n=1)
            found += f"; did you mean {close[0]}?" if close else ""
        return path, f"{message}, {found}"


def _suggest(name: str, parents: str, known: Sequence[str], prefix: str) -> str:
    lead = f"{prefix}." if prefix else ""
    level = f"{parents}." if parents else ""
    siblings = [key[len(level) :] for key in known if key.startswith(level) and "." not in key[len(level) :]]
    close = difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)
    elsewhere = [key for key in known if key.rpartition(".")[2] == name]
    if not close and elsewhere:
        return f"did you mean {lead}{elsewhere[0]}?"
    if close or (close := difflib.get_close_matches(name, siblings, n=1, cutoff=0.3)):
        return f"did you mean {lead}{level}{close[0]}?"
    return f"valid keys are {', '.join(siblings)}"


def _resolve_head(raw: Any, report: _Report) -> HeadChoice:
    from headtrain.heads.base import families, load_family

    if not isinstance(raw, dict):
        raise report.error("head", f"should be a section with the key family, found {_shown(raw)}")
    settings = dict(raw)
    family = settings.pop("family", None)
    names = families()
    if family is None:
        raise report.error("head.family", f"missing; choose one of {', '.join(names)}")
    if family not in names:
        close = difflib.get_close_matches(str(family), names, n=1, cutoff=0.3)
        nearest = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(names)}"
        raise report.error("head.family", f"unknown family, found {_shown(family)}; {nearest}")
    config = report.validate(load_family(family).Config, settings, "head", also=("family",))
    return HeadChoice(family=family, config=config)


def _check_contradictions(recipe: Recipe, report: _Report) -> None:
    train, evaluation, data = recipe.train, recipe.eval, recipe.data
    if train.epochs is not None and train.steps is not None:
        raise report.error(
            "train.epochs", f"{train.epochs} contradicts train.steps {train.steps}; give one, or set one to null"
        )
    if train.warmup > 1 and train.warmup % 1:
        raise report.error("train.warmup", f"should be whole steps, or a share below 1, found {train.warmup:g}")
    if train.steps is not None and train.warmup >= max(1, train.steps):
        raise report.error(
            "train.warmup", f"{train.warmup:g} steps do not fit into train.steps {train.steps}; lower train.warmup"
        )
    if evaluation.every is not None and evaluation.prompts is None:
        raise report.error(
            "eval.every", f"{evaluation.every} contradicts eval.prompts, which is null; name prompts or drop eval.every"
        )
    if evaluation.choose == "best" and evaluation.prompts is None:
        raise report.error("eval.choose", "best contradicts eval.prompts, which is null; name prompts or give last")
    if evaluation.patience is not None and evaluation.every is None:
        raise report.error(
            "eval.patience", f"{evaluation.patience} needs several evaluations; give eval.prompts and eval.every"
        )
    if recipe.target.revision is not None and Path(recipe.target.model).expanduser().exists():
        raise report.error(
            "target.revision", "contradicts target.model, which is a local folder; revisions belong to Hub names"
        )
    for source in data.eval or ():
        if source in data.train:
            raise report.error("data.eval", f"{source} is also in data.train; hold other conversations out")


def _check_paths(recipe: Recipe, report: _Report) -> None:
    model = recipe.target.model
    if not Path(model).expanduser().exists() and not (_HUB_NAME.fullmatch(model) and not model.startswith("~")):
        raise report.error(
            "target.model",
            f"no such folder: {model} (paths are relative to {Path.cwd()}); Hub names are written org/name",
        )
    if Path(model).expanduser().is_file():
        raise report.error("target.model", f"{model} is a file; give the model's folder")
    sources = [("data.train", data) for data in recipe.data.train]
    sources += [("data.eval", data) for data in recipe.data.eval or ()]
    sources += [("eval.prompts", recipe.eval.prompts)] if recipe.eval.prompts is not None else []
    for key, source in sources:
        if source_kind(source) == "missing":
            mend = "write it with `headtrain synthesize`" if source == recipe.synthesize.output else ""
            mend = mend or "Hub names are written org/name"
            raise report.error(key, f"no such file: {source} (paths are relative to {Path.cwd()}); {mend}")
    if Path(recipe.output).expanduser().is_file():
        raise report.error("output", f"{recipe.output} is a file; give a folder for the run")
