"""What the layout promises: imports go one way, families stay in their folder, files stay small, start-up stays light."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"headtrain": ROOT / "headtrain", "decode": ROOT / "decode", "headtrain_kernels": ROOT / "kernels"}
FORBIDDEN = {
    "headtrain_kernels": {"decode", "headtrain", "train", "scripts", "transformers", "tests"},
    "decode": {"headtrain", "train", "scripts", "tests"},
    "headtrain": {"train", "scripts", "tests"},
}
HEAVY = {"datasets", "peft", "deepspeed", "wandb", "triton", "matplotlib"}
FAMILY = re.compile("medusa|eagle|hydra", re.IGNORECASE)


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(tree: ast.AST) -> set[str]:
    """Top-level packages that a file imports anywhere, in functions too."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_imports_are_found_wherever_they_stand():
    text = "import a.b\nfrom .local import x\ndef f():\n    from c.d import e\n    if x:\n        import g as h\n"
    assert imported(ast.parse(text)) == {"a", "c", "g"}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    files = sorted(PACKAGES[package].rglob("*.py"))
    assert files
    wrong = {
        str(path): found for path in files if (found := imported(ast.parse(path.read_text())) & FORBIDDEN[package])
    }
    assert not wrong


def families_named(path: Path) -> list[str]:
    return [f"{path}:{i}: {line}" for i, line in enumerate(path.read_text().splitlines(), 1) if FAMILY.search(line)]


def test_no_family_is_named_outside_its_folder():
    inside = [ROOT / "headtrain" / "heads", ROOT / "headtrain" / "formats"]
    outside = [p for p in sources("headtrain", "decode", "kernels") if not any(p.is_relative_to(f) for f in inside)]
    assert not [line for path in outside for line in families_named(path)]
    assert families_named(ROOT / "headtrain" / "heads" / "medusa.py")  # the search finds what there is


def test_kernels_folder_is_no_package():
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_sizes():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    folders = ("headtrain", "decode", "kernels", "scripts", "tests")
    lengths = {path: len(path.read_text().splitlines()) for path in [*sources(*folders), *ROOT.glob("*.py")]}
    assert not {str(path): n for path, n in lengths.items() if n > 600}


def top_level(tree: ast.Module) -> set[str]:
    """Packages that are imported when the file is, so not those inside functions."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    names, waiting = set(), list[ast.AST](tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= imported(node)
        elif not isinstance(node, functions):
            waiting += ast.iter_child_nodes(node)
    return names


def test_heavy_packages_are_imported_where_they_are_used():
    assert top_level(ast.parse("try:\n    import a\nexcept E:\n    from b import c\ndef f():\n    import d")) == {
        "a",
        "b",
    }
    files = [*sources("headtrain", "decode"), *ROOT.glob("*.py")]
    assert not {str(path): found for path in files if (found := top_level(ast.parse(path.read_text())) & HEAVY)}


def test_start_up_loads_nothing_heavy():
    """transformers' models load triton themselves where it is installed; nothing of ours adds to what they load."""
    code = (
        "import sys, transformers.modeling_utils; before = set(sys.modules);"
        "import headtrain.cli, headtrain.trainer, decode.engine; print(*(sys.modules.keys() - before))"
    )
    environment = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {name.split(".")[0] for name in done.stdout.split()}
    assert "headtrain" in found and not found & HEAVY, found & HEAVY
