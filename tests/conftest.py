import os
import shutil

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors are tiny: more threads only wait for each other
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    """A tiny random Llama in float32 with a byte-level tokenizer and a ChatML template. Read only."""
    from tests.folders import make_target_folder

    return make_target_folder(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def chats(tmp_path_factory) -> Path:
    """A dozen short conversations. Read only."""
    from tests.folders import write_chats

    return write_chats(tmp_path_factory.mktemp("data") / "chats.jsonl")


@pytest.fixture
def fresh_accelerator():
    """Accelerate keeps one state per process; a test that trains in this process starts and leaves without any."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
