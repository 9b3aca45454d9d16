"""What the package may import, and that it needs neither triton nor a GPU to be imported."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "kernels/headtrain_kernels"
FILES = sorted(PACKAGE.glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_imports_torch_and_triton_only(file):
    allowed = {"torch", "triton", "headtrain_kernels", "__future__"} | sys.stdlib_module_names
    for node in ast.walk(ast.parse(file.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= allowed


def test_root_folder_is_no_package():
    """A root package named `kernels` would shadow the distribution of that name, which transformers imports."""
    assert not (PACKAGE.parent / "__init__.py").exists()


def test_import_and_cpu_path_without_triton():
    """With triton hidden every module imports, the torch forms run, and a launch says what is missing."""
    code = """
import sys
sys.modules["triton"] = None
import importlib, torch
for name in NAMES:
    importlib.import_module("headtrain_kernels." + name)
from headtrain_kernels.noise import counter_noise, launch_noise
zero = torch.zeros(1, dtype=torch.int64)
assert counter_noise(1, zero, zero, 10).shape == (1, 10)
try:
    launch_noise(1, zero, zero, 10, 0, "bits")
except ModuleNotFoundError as error:
    assert "triton is not installed" in str(error)
else:
    raise SystemExit("launched without triton")
"""
    names = [file.stem for file in FILES if file.stem != "__init__"]
    run = subprocess.run(
        [sys.executable, "-c", f"NAMES = {names}\n{code}"], cwd=PACKAGE.parent, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.slow
@pytest.mark.parametrize("extra", [[], ["--all"]], ids=["some", "all"])
def test_compiles_for_sm90(extra):
    """Real Triton, without a GPU: see `compile_sm90`."""
    pytest.importorskip("triton")
    script = Path(__file__).with_name("compile_sm90.py")
    run = subprocess.run([sys.executable, script, *extra], cwd=PACKAGE.parent, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "compiled for sm_90" in run.stdout
