"""The `headtrain` command. Each command loads what it needs, calls one function and prints its result."""

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

from decode.errors import UserError

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Draft heads for speculative decoding.")
console = Console(soft_wrap=True)  # paths and figures stay on one line
status = Console(stderr=True)

RecipeArgument = Annotated[Path, typer.Argument(help="YAML recipe")]
Overrides = Annotated[Optional[list[str]], typer.Argument(help="key=value overrides of the recipe")]  # noqa: UP045
HeadFolder = Annotated[Path, typer.Argument(help="folder of a trained head")]
DraftName = Annotated[Path, typer.Argument(help="folder of a head or of a smaller model, or `ngram`")]
TargetOption = Annotated[str | None, typer.Option("--target", help="target folder; default: the one it was trained on")]  # noqa: UP045
DtypeOption = Annotated[str, typer.Option(help="bfloat16, float16, float32 or auto")]


@app.command()
def inspect(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Show the data of a recipe: tokens and loss mask in colour, kept, cut and dropped rows."""
    from headtrain.inspect import inspect_recipe
    from headtrain.recipe import load_recipe

    inspect_recipe(load_recipe(recipe, overrides or []), console)


@app.command()
def cache(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Write the target's hidden states to the recipe's `data.cache` folder, for training without the target's forward."""
    from rich.progress import track

    from headtrain.data import build_dataset
    from headtrain.features import bytes_per_token, write_cache
    from headtrain.recipe import load_recipe
    from headtrain.target import Target
    from headtrain.trainer import build_head

    loaded = load_recipe(recipe, overrides or [])
    if loaded.data.cache is None:
        raise UserError("data.cache: names no folder; add data.cache=FOLDER")
    spec = loaded.target
    target = Target.load(spec.model, spec.dtype, spec.revision, spec.trust_remote_code)
    dataset = build_dataset(loaded.data, target.tokenizer)
    layers = build_head(loaded, target, dataset).target_layers
    per_token = bytes_per_token(target, layers)
    status.print(f"{per_token} bytes a token, {per_token * len(dataset.ids) / 1e9:.2f} GB in all")
    written = write_cache(dataset, target, layers, Path(loaded.data.cache), loaded.train.batch_tokens)
    for _ in track(written, "caching", console=status):
        pass
    console.print(loaded.data.cache)


@app.command()
def evaluate(
    head: DraftName,
    prompts: Annotated[list[str], typer.Option(help="file or Hub name of prompts; give it once a set")],
    out: Annotated[Path, typer.Option(help="folder for report.json")],
    limit: Annotated[Optional[int], typer.Option(help="first prompts of each set")] = None,  # noqa: UP045
    max_new_tokens: Annotated[int, typer.Option(help="tokens of each reply")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    rule: Annotated[Optional[str], typer.Option(help="acceptance rule; default greedy at 0, gumbel above")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="prompts decoded together")] = 1,
    target: TargetOption = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Measure acceptance, speed and parity on prompt sets; writes report.json."""
    from decode.settings import Settings
    from headtrain.evaluate import evaluate as measure
    from headtrain.evaluate import load_plan, open_draft, write_report

    settings = Settings(max_new_tokens=max_new_tokens, temperature=temperature, rule=rule, seed=seed)
    loaded, model = open_draft(head, target, dtype)
    plan, settings = load_plan(head, loaded, settings)
    with status.status("decoding"):
        report = measure(head, loaded, model, prompts, limit, settings, plan, batch_size, status.print)
    console.print(report_table(report))
    console.print(str(write_report(report, out)))


def report_table(report: dict[str, Any]) -> Table:
    settings = report["settings"]
    title = f"{settings['rule']}, temperature {settings['temperature']}, {report['dtype']}, {report['device']}"
    table = Table(title=title)
    for column in (
        "set",
        "acceptance length",
        "tokens/s",
        "x plain",
        "x generate",
        "identical",
        "near ties",
        "mismatches",
    ):
        table.add_column(column, justify="left" if column == "set" else "right")
    for row in report["sets"]:
        parity = row["parity"]
        table.add_row(
            row["name"],
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']['engine']:.2f}",
            f"{row['speedup']['transformers']:.2f}",
            f"{parity['identical']}/{parity['compared']}",
            str(parity["near_ties"]),
            str(parity["mismatches"]),
        )
    mean = report["mean"]
    speedup = mean["speedup"]
    table.add_section()
    figures = (mean["acceptance_length"], mean["tokens_per_second"], speedup["engine"], speedup["transformers"])
    table.add_row("mean", *(f"{value:.{1 if i == 1 else 2}f}" for i, value in enumerate(figures)), "", "", "")
    return table


@app.command()
def tune(
    head: HeadFolder,
    temperature: Annotated[float, typer.Option(help="temperature to tune for")] = 0.0,
    target: TargetOption = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Measure step times and acceptance on this device, choose the tree, save it with the head."""
    from headtrain.evaluate import open_head
    from headtrain.tune import save_plan
    from headtrain.tune import tune as choose

    loaded, model = open_head(head, target, dtype)
    result = choose(loaded, model, temperature, note=status.print)
    predicted, measured = result["predicted"], result["measured"]
    console.print(
        f"{result['plan']}: acceptance length {measured['acceptance_length']:.2f} (predicted"
        f" {predicted['acceptance_length']:.2f}), {measured['tokens_per_second']:.1f} tokens/s, predicted speedup"
        f" {predicted['speedup']:.2f}"
    )
    console.print(str(save_plan(head, result)))


@app.command()
def generate(
    head: DraftName,
    prompt: Annotated[str, typer.Argument(help="what the user says")],
    max_new_tokens: Annotated[int, typer.Option(help="most tokens of the reply")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    rule: Annotated[Optional[str], typer.Option(help="acceptance rule")] = None,  # noqa: UP045
    target: TargetOption = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Stream an answer."""
    from decode.engine import Engine
    from decode.settings import Settings
    from headtrain.evaluate import load_plan, open_draft

    settings = Settings(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed, rule=rule)
    loaded, model = open_draft(head, target, dtype)
    plan, settings = load_plan(head, loaded, settings)
    engine = Engine(model.model, loaded, plan, model.tokenizer)
    ids = model.prompt_ids([{"role": "user", "content": prompt}])
    tokens: list[int] = []
    shown = 0
    for new in engine.stream(ids, settings):
        tokens += new
        text = model.tokenizer.decode(tokens, skip_special_tokens=True)
        whole = len(text) - (1 if text.endswith("\ufffd") else 0)  # a character may be spread over several tokens
        sys.stdout.write(text[shown:whole])
        sys.stdout.flush()
        shown = max(shown, whole)
    sys.stdout.write("\n")


def main() -> None:
    try:
        app()
    except UserError as error:
        print(f"headtrain: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
