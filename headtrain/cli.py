"""The `headtrain` command. Each command loads what it needs, calls one function and prints its result."""

import sys
from collections.abc import Sequence
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


def local_head(name: str) -> Path:
    """The folder of a head; one that is named org/name@revision is fetched from the Hub."""
    from headtrain import hub

    return hub.local_head(name)


def own_head(name: str) -> Path:
    """The folder of a head that the command writes into, so a copy of the Hub's in its cache will not do."""
    from headtrain.target import HUB_NAME

    repo, _, revision = name.partition("@")
    if not Path(name).exists() and HUB_NAME.fullmatch(repo):
        download = f"hf download {repo}{revision and ' --revision ' + revision} --local-dir FOLDER"
        raise UserError(f"{name}: is no folder, and the tree is saved with the head; for one on the Hub: {download}")
    return Path(name)


HeadFolder = Annotated[Path, typer.Argument(parser=local_head, help="folder of a trained head, or org/name@revision")]
OwnHead = Annotated[Path, typer.Argument(parser=own_head, help="folder of a trained head")]
DraftName = Annotated[
    Path,
    typer.Argument(parser=local_head, help="head (folder or org/name@revision), folder of a smaller model, or `ngram`"),
]
TargetOption = Annotated[str | None, typer.Option("--target", help="target folder; default: the one it was trained on")]  # noqa: UP045
DtypeOption = Annotated[str, typer.Option(help="bfloat16, float16, float32 or auto")]


@app.command()
def inspect(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=0, help="run for the estimate of memory and time; 0: no estimate")] = 3,
) -> None:
    """Show the data of a recipe, tokens and loss mask in colour, and the memory and time that the run will need."""
    from headtrain.inspect import inspect_recipe
    from headtrain.recipe import load_recipe

    inspect_recipe(load_recipe(recipe, overrides or []), console, steps=steps)


@app.command()
def cache(recipe: RecipeArgument, overrides: Overrides = None) -> None:
    """Write the target's hidden states to the recipe's `data.cache` folder, for training without the target's forward."""
    from rich.progress import track

    from headtrain.data import build_dataset
    from headtrain.features import bytes_per_token, cache_error, write_cache
    from headtrain.recipe import load_recipe
    from headtrain.target import Target
    from headtrain.trainer import build_head

    loaded = load_recipe(recipe, overrides or [])
    if loaded.data.cache is None:
        raise UserError("data.cache: names no folder; add data.cache=FOLDER")
    spec = loaded.target
    target = Target.load(spec.model, spec.dtype, spec.revision, spec.trust_remote_code, device_map=spec.device_map)
    dataset = build_dataset(loaded.data, target.tokenizer)
    layers = build_head(loaded, target, dataset).target_layers
    folder, storage = Path(loaded.data.cache), loaded.data.cache_dtype
    per_token = bytes_per_token(target, layers, storage)
    status.print(f"{per_token} bytes a token, {per_token * len(dataset.ids) / 1e9:.2f} GB in all")
    written = write_cache(dataset, target, layers, folder, loaded.train.batch_tokens, storage)
    for _ in track(written, "caching", console=status):
        pass
    if errors := cache_error(folder):
        shown = ", ".join(f"{name} {value:.2%}" for name, value in errors.items())
        status.print(f"relative error of {storage}: {shown}")
    console.print(loaded.data.cache)


@app.command()
def synthesize(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    head: Annotated[
        Path | None, typer.Option(parser=local_head, help="head that drafts: the same replies, sooner")
    ] = None,  # noqa: UP045
) -> None:
    """Write conversations in the target's own words to the recipe's `synthesize.output`; a killed run goes on."""
    from headtrain.recipe import load_recipe
    from headtrain.synthesize import summary
    from headtrain.synthesize import synthesize as write

    # The data to train on may be what is about to be written.
    loaded = load_recipe(recipe, overrides or [], check_paths=False)
    account, worked = write(loaded, head)
    status.print(summary(account), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{loaded.synthesize.output}{'' if worked else ' was finished before: nothing to do'}")


@app.command()
def evaluate(
    heads: Annotated[list[str], typer.Argument(help="heads as for generate, or `ngram`; behind --sweep also axes")],
    prompts: Annotated[list[str], typer.Option(help="set (gsm8k, spec_bench, ..), file or Hub name; once a set")],
    out: Annotated[Path, typer.Option(help="folder for report.json, plots and report.html")],
    limit: Annotated[Optional[int], typer.Option(help="first prompts of each set")] = None,  # noqa: UP045
    max_new_tokens: Annotated[int, typer.Option(help="tokens of each reply")] = 96,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    rule: Annotated[Optional[str], typer.Option(help="acceptance rule; default greedy at 0, gumbel above")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    batch_size: Annotated[int, typer.Option(help="prompts decoded together")] = 1,
    sweep: Annotated[
        list[str] | None, typer.Option(help="batch=1,2 temperature=0,1 context=256,1k tree=1..64 rule=..")
    ] = None,
    tokens: Annotated[int, typer.Option(help="replies of each set in the token view")] = 1,
    target: TargetOption = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Measure acceptance, speed and parity on prompt sets; writes report.json, plots and report.html."""
    from decode.settings import Settings
    from headtrain.benchmark import Job, run_one, run_points

    axes = [*(sweep or ()), *(name for name in heads if sweep and "=" in name and not Path(name).exists())]
    settings = Settings(max_new_tokens=max_new_tokens, temperature=temperature, rule=rule, seed=seed)
    folders = [local_head(name) for name in heads if name not in axes]
    job = Job(folders, prompts, out, settings, limit, batch_size, target, dtype, axes, tokens)
    with status.status("decoding"):
        if axes or len(folders) > 1:
            show(sweep_table(run_points(job, status.print)))
            console.print(str(out / "sweep.json"))
        else:
            report, predicted = run_one(job, status.print)
            show(report_table(report, predicted))
            console.print(str(out / "report.json"))
    console.print(str(out / "report.html"))


def show(table: Table) -> None:
    """Print a table; in a file or a pipe it is as wide as it needs."""
    (console if console.is_terminal else Console(width=160)).print(table)


def figures_table(columns: Sequence[str], first: str | None = None, title: str | None = None) -> Table:
    """A table of numbers; `first` names a column of words."""
    table = Table(title=title)
    if first is not None:
        table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def sweep_table(rows: list[dict[str, Any]]) -> Table:
    axes = [axis for axis in rows[0]["point"] if len({row["point"][axis] for row in rows}) > 1]
    table = figures_table([*axes, "tokens/step", "tokens/s", "x plain", "x generate", "mismatches"])
    for row in rows:
        speedup = row["speedup"]
        figures = (row["acceptance_length"], row["tokens_per_second"], speedup["engine"], speedup["transformers"])
        values = (f"{value:.{1 if i == 1 else 2}f}" for i, value in enumerate(figures))
        table.add_row(*(str(row["point"][axis]) for axis in axes), *values, str(row["mismatches"]))
    return table


@app.command()
def predict(
    head: Annotated[Path | None, typer.Argument(parser=local_head, help="head; without one give --acceptance")] = None,
    acceptance: Annotated[
        str | None, typer.Option(help="by depth, 0.7,0.6; one number: the same at all depths")
    ] = None,
    chains: Annotated[str, typer.Option(help="numbers of drafted tokens K; `` for none")] = "1..5+1",
    trees: Annotated[str, typer.Option(help="numbers of nodes, root included")] = "",
    batch: Annotated[str, typer.Option(help="sequences decoded together")] = "1",
    context: Annotated[str, typer.Option(help="tokens, such as 1k,8k")] = "1k",
    temperature: Annotated[str, typer.Option(help="such as 0,1")] = "0",
    prompts: Annotated[Optional[list[str]], typer.Option(help="sets to measure acceptance on")] = None,  # noqa: UP045
    limit: Annotated[Optional[int], typer.Option(help="first prompts of each set")] = None,  # noqa: UP045
    device: Annotated[Optional[str], typer.Option(help="a100, h100, h200, l40s, rtx4090; default: as tuned")] = None,  # noqa: UP045
    bandwidth: Annotated[Optional[float], typer.Option(help="of the device's memory, GB/s")] = None,  # noqa: UP045
    tflops: Annotated[Optional[float], typer.Option(help="of the device in this dtype, dense")] = None,  # noqa: UP045
    memory: Annotated[Optional[float], typer.Option(help="of the device, GB")] = None,  # noqa: UP045
    parameters: Annotated[Optional[str], typer.Option(help="of the target, such as 8B")] = None,  # noqa: UP045
    draft_parameters: Annotated[Optional[str], typer.Option(help="read for one drafted level, such as 250M")] = None,  # noqa: UP045
    cache_bytes: Annotated[Optional[float], typer.Option(help="of one token of context")] = None,  # noqa: UP045
    target: TargetOption = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Expected speedup from a head's acceptance and a device's step times, and where speculation does not pay."""
    from headtrain.outlook import Question, find_costs, find_profiles
    from headtrain.predict import predict as foresee
    from headtrain.sweep import parse_numbers, parse_whole

    depths = parse_whole(chains, "--chains") if chains else []
    sizes = parse_whole(trees, "--trees") if trees else []
    batches, contexts = parse_whole(batch, "--batch"), parse_whole(context, "--context")
    question = Question(
        head, target, acceptance, max(depths, default=6), parse_numbers(temperature, "--temperature"), prompts or (), limit,
        device, bandwidth, tflops, memory, parameters, draft_parameters, cache_bytes, dtype,
    )  # fmt: skip
    costs = find_costs(question)
    rows, warnings = foresee(find_profiles(question, status.print), costs, depths, sizes, batches, contexts)
    settings = [{"batch": r.batch, "context": r.context, "temperature": f"{r.temperature:g}"} for r in rows]
    if not costs.knows_context:
        settings = [{**setting, "context": "as tuned"} for setting in settings]
    varied = [axis for axis in settings[0] if len({setting[axis] for setting in settings}) > 1]
    title = ", ".join(f"{axis} {value}" for axis, value in settings[0].items() if axis not in varied)
    table = figures_table([*varied, "tokens/step", "step ms", "plain ms", "tokens/s", "speedup"], "tree", title)
    for row, setting in zip(rows, settings, strict=True):
        figures = (f"{row.tokens_per_step:.2f}", f"{row.step_ms:.2f}", f"{row.plain_ms:.2f}")
        own = [str(setting[axis]) for axis in varied]
        table.add_row(row.plan, *own, *figures, f"{row.tokens_per_second:.1f}", f"{row.speedup:.2f}")
    show(table)
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False)


def report_table(report: dict[str, Any], predicted: Sequence[dict[str, Any]] = ()) -> Table:
    settings = report["settings"]
    title = f"{settings['rule']}, temperature {settings['temperature']}, {report['dtype']}, {report['device']}"
    table = Table(title=title)
    for column in (
        "set",
        "acceptance length",
        "tokens/s",
        "x plain",
        *(["predicted"] if predicted else []),
        "x generate",
        "identical",
        "near ties",
        "mismatches",
    ):
        table.add_column(column, justify="left" if column == "set" else "right")
    for number, row in enumerate(report["sets"]):
        parity = row["parity"]
        table.add_row(
            row["name"],
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second']:.1f}",
            f"{row['speedup']['engine']:.2f}",
            *([f"{predicted[number]['predicted']:.2f}"] if predicted else []),
            f"{row['speedup']['transformers']:.2f}",
            f"{parity['identical']}/{parity['compared']}",
            str(parity["near_ties"]),
            str(parity["mismatches"]),
        )
    mean = report["mean"]
    speedup = mean["speedup"]
    table.add_section()
    figures = (mean["acceptance_length"], mean["tokens_per_second"], speedup["engine"], speedup["transformers"])
    values = [f"{value:.{1 if i == 1 else 2}f}" for i, value in enumerate(figures)]
    if predicted:
        values.insert(3, f"{sum(row['predicted'] for row in predicted) / len(predicted):.2f}")
    table.add_row("mean", *values, "", "", "")
    return table


@app.command()
def tune(
    head: OwnHead,
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
    top_k: Annotated[int, typer.Option(help="sample among the k likeliest; 0: all")] = 0,
    top_p: Annotated[float, typer.Option(help="sample among the likeliest that reach this mass")] = 1.0,
    stop: Annotated[Optional[list[str]], typer.Option(help="end the reply at this text; may be given again")] = None,  # noqa: UP045
    seed: Annotated[int, typer.Option(help="of the noise")] = 0,
    rule: Annotated[Optional[str], typer.Option(help="acceptance rule")] = None,  # noqa: UP045
    target: TargetOption = None,
    dtype: DtypeOption = "bfloat16",
) -> None:
    """Stream an answer."""
    from decode.graphs import GraphEngine
    from decode.settings import Settings
    from headtrain.evaluate import load_plan, open_draft

    settings = Settings(
        max_new_tokens, temperature, top_k=top_k, top_p=top_p, stop_strings=stop or (), seed=seed, rule=rule
    )
    loaded, model = open_draft(head, target, dtype)
    plan, settings = load_plan(head, loaded, settings)
    engine = GraphEngine(model.model, loaded, plan, model.tokenizer)
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


@app.command()
def push(
    head: HeadFolder,
    repo: Annotated[str, typer.Argument(help="repository on the Hub, as org/name")],
    private: Annotated[bool, typer.Option("--private", help="make a new repository private")] = False,
    revision: Annotated[Optional[str], typer.Option(help="branch; default main")] = None,  # noqa: UP045
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the card and the files, upload nothing")] = False,
    report: Annotated[Optional[Path], typer.Option(help="default: report.json in the head's folder")] = None,  # noqa: UP045
    target: Annotated[Optional[str], typer.Option(help="the target's name on the Hub, org/name")] = None,  # noqa: UP045
    license: Annotated[Optional[str], typer.Option(help="licence of the head, such as apache-2.0")] = None,  # noqa: UP045
) -> None:
    """Upload a head with a model card, its recipe and its report to the Hugging Face Hub, in one commit."""
    from headtrain import hub

    files = hub.prepare(head, repo, report, target, license)
    if dry_run:
        typer.echo(hub.describe(files))
    for note in hub.advise(files):
        typer.echo(f"note: {note}", err=True)
    if not dry_run:
        typer.echo(hub.push(files, repo, private, revision))


@app.command()
def export(
    head: HeadFolder,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    format: Annotated[str, typer.Option("--format", help="public layout, such as speculators or sglang")],
    embedding: Annotated[bool, typer.Option("--embedding", help="save the target's embedding with the head")] = False,
    target: TargetOption = None,
) -> None:
    """Write a head in a public layout, for other servers."""
    from headtrain.formats.convert import export_head

    for warning in export_head(head, format, out, target, embedding):
        status.print(f"warning: {warning}", markup=False, soft_wrap=True)
    console.print(str(out))


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(help="folder of a head in a public layout")],
    out: Annotated[Path, typer.Argument(help="folder to write")],
    target: Annotated[Optional[str], typer.Option("--target", help="its target; default: the one it names")] = None,  # noqa: UP045
    format: Annotated[Optional[str], typer.Option("--format", help="its layout; default: detected")] = None,  # noqa: UP045
    pickle: Annotated[bool, typer.Option("--pickle", help="read .bin and .pt files, plain tensors only")] = False,
) -> None:
    """Turn a head in a public layout into one of this project."""
    from headtrain.formats.convert import import_head

    layout, warnings = import_head(source, out, target, format, pickle)
    for warning in warnings:
        status.print(f"warning: {warning}", markup=False, soft_wrap=True)
    console.print(f"{layout.name}: {out}")


@app.command()
def merge(
    head: HeadFolder,
    out: Annotated[Path, typer.Argument(help="folder to write: target/ and head/")],
    target: TargetOption = None,
    dtype: DtypeOption = "float32",
) -> None:
    """Build what a head adds to its target into the target's weights."""
    from headtrain.evaluate import open_head

    if out.exists():
        raise UserError(f"{out}: exists already; give a folder that does not")
    open_head(head, target, dtype)[0].merge(out)
    console.print(f"{out / 'target'} and {out / 'head'}")


def main() -> None:
    try:
        sys.exit(app(standalone_mode=False) or 0)
    except UserError as error:
        print(f"headtrain: {error}", file=sys.stderr)
        sys.exit(2)
    except typer.Abort:
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # else a wrong option: typer and click raise kinds of their own
            raise
        if message := error.format_message():  # none where help has been shown
            print(f"headtrain: {message[:1].lower()}{message[1:]}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
