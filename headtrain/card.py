"""The model card of a head: a Markdown page whose measured figures are all taken from the head's report."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decode.errors import UserError, one_line
from decode.tree import Chain, Dynamic, Plan, Static, from_dict
from decode.verify import RULES
from headtrain.recipe import source_kind

TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
RESERVED = {"models", "datasets", "spaces", "docs", "api"}  # pages of the Hub, so no one's name there
BOOKKEEPING = {"data": ("cache",), "train": ("log_every", "save_every", "keep")}  # no part of how a head is trained
Finite = Annotated[float, Field(allow_inf_nan=False)]


class Part(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Speedup(Part):
    engine: Finite
    transformers: Finite


class Parity(Part):
    compared: int
    identical: int
    near_ties: int
    mismatches: int


class Measured(Part):
    """One prompt set of a report."""

    name: str
    prompts: int
    acceptance_length: Finite
    acceptance_by_depth: list[Finite]
    tokens_per_second: Finite
    speedup: Speedup
    parity: Parity


class Mean(Part):
    acceptance_length: Finite
    tokens_per_second: Finite
    speedup: Speedup


class Conditions(Part):
    rule: str
    temperature: Finite
    max_new_tokens: int
    limit: int | None
    threads: int
    batch_size: int
    plan: dict[str, Any]


class Report(Part):
    """What a card quotes of the report.json that `headtrain evaluate` writes."""

    target: str
    device: str
    dtype: str
    date: str
    versions: dict[str, str]
    settings: Conditions
    sets: Annotated[list[Measured], Field(min_length=1)]
    mean: Mean


def read_report(path: Path) -> Report:
    """Raises UserError, with the first thing that is wrong, for a file that is no report."""
    mend = "measure the head again with `headtrain evaluate`"
    try:
        return Report.model_validate(json.loads(path.read_text()))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(f"{path}: is no report, {where}: {first['msg']}; {mend}") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is no report ({one_line(error)}); {mend}") from error


def hub_name(source: str) -> str | None:
    """`source` where it names a repository on the Hub, None where it is a file or folder of this machine."""
    if source_kind(source) != "hub" or source.partition("/")[0] in RESERVED:
        return None
    return source


def public_name(source: str) -> str:
    """A Hub name as it is, of a path only the last part."""
    return hub_name(source) or re.split(r"[/\\]", source.rstrip("/\\"))[-1]


def shorten(value: Any) -> Any:
    """The value with public names for all paths in it, without what is null or empty."""
    if isinstance(value, dict):
        return {key: short for key, item in value.items() if (short := shorten(item)) not in (None, {}, [])}
    if isinstance(value, list):
        return [shorten(item) for item in value]
    return public_name(value) if isinstance(value, str) else value


def training_recipe(path: Path) -> dict[str, Any]:
    """The sections of a recipe.yaml that say how a head is trained; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        recipe = yaml.safe_load(path.read_text())
        sections = {name: dict(recipe[name]) for name in ("target", "head", "data", "train") if recipe.get(name)}
    except (OSError, ValueError, TypeError, AttributeError, yaml.YAMLError) as error:
        raise UserError(f"{path}: is no recipe ({one_line(error)}); delete it or train the head again") from error
    for name, keys in BOOKKEEPING.items():
        for key in keys:
            sections.get(name, {}).pop(key, None)
    return shorten(sections)


def data_names(recipe: dict[str, Any]) -> list[str]:
    """Public names of the training data; `train` is one source, or a list of sources or of {path or name: ...}."""
    train = recipe.get("data", {}).get("train", [])
    return [str(source) for source in (train if isinstance(train, list) else [train])]


def describe_plan(plan: Plan) -> str:
    """In words; a node is a token that the target checks, the last committed one included."""
    if isinstance(plan, Chain):
        return f"a chain of {plan.depth} guesses"
    if isinstance(plan, Static):
        return f"a fixed tree of {plan.num_nodes} nodes, {plan.depth} deep"
    assert isinstance(plan, Dynamic), plan
    return f"a tree of the best {plan.num_nodes} nodes, {plan.depth} deep and {plan.width} wide"


def report_plan(report: Report, path: Path) -> Plan:
    try:
        return from_dict(report.settings.plan)
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: settings.plan is no tree ({one_line(error)}); measure the head again") from error


def format_row(row: Measured) -> dict[str, str]:
    """The figures as the card shows them."""
    parity = row.parity
    return {
        "name": row.name.replace("|", "\\|"),
        "prompts": str(row.prompts),
        **format_figures(row),
        "identical": f"{parity.identical} of {parity.compared}",
        "near_ties": str(parity.near_ties),
        "mismatches": str(parity.mismatches),
    }


def format_figures(row: Measured | Mean) -> dict[str, str]:
    return {
        "length": f"{row.acceptance_length:.2f}",
        "rate": f"{row.tokens_per_second:.1f}",
        "engine": f"{row.speedup.engine:.2f}",
        "transformers": f"{row.speedup.transformers:.2f}",
    }


def format_depths(sets: list[Measured]) -> list[list[str]]:
    """One row a set: its name and the accepted share of each depth, "-" where no step got that far."""
    deepest = max(len(row.acceptance_by_depth) for row in sets)
    rows = [[row.name.replace("|", "\\|"), *(f"{share:.2f}" for share in row.acceptance_by_depth)] for row in sets]
    return [row + ["-"] * (1 + deepest - len(row)) for row in rows]


def write_card(
    repo: str,
    config: dict[str, Any],
    recipe: dict[str, Any],
    report: Path,
    target: str | None = None,
    license: str | None = None,
    servers: dict[str, str] | None = None,
) -> str:
    """The card's text.

    `config` is the head's config.json, `recipe` what `training_recipe` gives; `target` is the target's Hub name where
    the head knows only a folder; `servers` maps vllm and sglang to the export format that each reads.
    """
    from huggingface_hub import ModelCard, ModelCardData

    measured = read_report(report)
    plan = report_plan(measured, report)
    known = config["target"].get("name", "")
    model = target or hub_name(known)
    data = data_names(recipe)
    public = ["/".join(name.partition(":")[0].split("/")[:2]) for name in data if hub_name(name)]
    metadata = ModelCardData(
        base_model=model,
        license=license,
        library_name="headtrain",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "draft-head", config["family"]],
        datasets=sorted(set(public)) or None,
    )
    rule = RULES.get(measured.settings.rule)
    card = ModelCard.from_template(
        metadata,
        template_path=str(TEMPLATE),
        repo=repo,
        name=repo.partition("/")[2],
        config=config,
        family=config["family"],
        model=model,
        target=model or public_name(known),
        target_option="" if model == known else f" --target {model or 'FOLDER'}",
        license_name=license,
        lossless=rule is not None and rule.lossless,
        report=measured,
        plan=describe_plan(plan),
        rows=[format_row(row) for row in measured.sets],
        mean=format_figures(measured.mean),
        depths=format_depths(measured.sets),
        data=data,
        recipe=yaml.safe_dump(recipe, sort_keys=False, default_flow_style=None, width=100).rstrip() if recipe else "",
        servers=servers or {},
        drafted=plan.depth,
    )
    return str(card).rstrip() + "\n"


def serving_formats(config: dict[str, Any]) -> dict[str, str]:
    """The export format that each server reads, by server, where it can hold the head of this config.json."""
    from headtrain.formats.base import Portable, load_format

    head = Portable(config["family"], config["head"], list(config["layers"]), {})
    found = {}
    for server, name in (("vllm", "speculators"), ("sglang", "sglang")):
        layout = load_format(name)
        with suppress(UserError):
            layout.check(head, config["target"]["num_layers"])
            if head.family in layout.families:
                found[server] = name
    return found
