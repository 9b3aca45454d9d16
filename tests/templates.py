"""Chat templates in the style of real families, tiny tokenizers for them, and what each should render, by hand.

An oracle gives the rows of a conversation as pieces (text, trained). It never looks at the jinja text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{% for message in messages %}{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system
You are a tiny model.<|im_end|>
' }}{% endif %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

LLAMA3 = """{% for message in messages %}{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>

' + message['content'] | trim + '<|eot_id|>' %}{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>

' }}{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}{% endif %}{% set role = 'model' if message['role'] == 'assistant'
else message['role'] %}{{ '<start_of_turn>' + role + '
' + message['content'] | trim + '<end_of_turn>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model
' }}{% endif %}"""

MISTRAL = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '

' %}{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}{{ bos_token }}
{%- for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}
{{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}{% else %}
{{- ' ' + message['content'] | trim + eos_token }}{% endif %}{% endfor %}"""

THINKING = """{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message['role'] == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}
{%- if message['role'] != 'assistant' %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>
' }}{% else %}{% set reply = message['content'] %}{% set reason = '' %}{% if message['reasoning_content'] is string %}
{%- set reason = message['reasoning_content'] %}{% elif '</think>' in reply %}
{%- set reason = reply.split('</think>')[0].split('<think>')[-1] %}{% set reply = reply.split('</think>')[-1] %}
{%- endif %}{{ '<|im_start|>assistant
' }}{% if loop.index0 > ns.last and (loop.last or reason) %}{{ '<think>
' + reason.strip('\\n') + '
</think>

' }}{% endif %}{{ reply.lstrip('\\n') + '<|im_end|>
' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>

</think>

' }}{% endif %}{% endif %}"""

OPENED = """{{ bos_token }}{% for message in messages %}{% if message['role'] != 'assistant' %}
{{- '<|User|>' + message['content'] }}{% else %}{{ '<|Assistant|>' + message['content'].split('</think>')[-1] +
'<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|Assistant|><think>
' }}{% endif %}"""

MARKED = """{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant
' }}{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '
' }}{% else %}{{ '<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>
' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}"""

END = "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
assert END in MARKED
MARKED_WITHOUT_END = MARKED.replace(END, "{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}")
MARKED_NOTHING = MARKED.replace(END, "{% endgeneration %}{{ message['content'] + '<|im_end|>\n' }}")
MARKED_ALL = (
    "{% generation %}"
    + MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    + "{% endgeneration %}"
)

PHI = """{% for message in messages %}{{ '<|' + message['role'] + '|>
' + message['content'] + '<|end|>
' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>
' }}{% else %}{{ eos_token }}{% endif %}"""

PLAIN = """{% for message in messages %}{{ message['role'].upper() + ': ' + message['content'].strip() + '
' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"""

Piece = tuple[str, bool]
Pieces = list[Piece]


def chatml(messages, system="You are a tiny model.") -> list[Pieces]:
    row: Pieces = []
    if system and messages[0]["role"] != "system":
        row.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for message in messages:
        reply = message["role"] == "assistant"
        row += [(f"<|im_start|>{message['role']}\n", False), (message["content"] + "<|im_end|>", reply), ("\n", False)]
    return [row]


def llama3(messages) -> list[Pieces]:
    row: Pieces = [("<|bos|>", False)]
    for message in messages:
        row.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        row.append((message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"))
    return [row]


def gemma(messages) -> list[Pieces]:
    row: Pieces = [("<bos>", False)]
    for message in messages:
        role = {"user": "user", "assistant": "model"}[message["role"]]
        row.append((f"<start_of_turn>{role}\n", False))
        row += [(message["content"].strip() + "<end_of_turn>", role == "model"), ("\n", False)]
    return [row]


def mistral(messages) -> list[Pieces]:
    row: Pieces = [("<s>", False)]
    system = ""
    for message in messages:
        if message["role"] == "system":
            system = message["content"] + "\n\n"
        elif message["role"] == "user":
            row.append((f"[INST] {system}{message['content']} [/INST]", False))
            system = ""
        else:
            row.append((f" {message['content'].strip()}</s>", True))
    return [row]


def thinking(messages, enabled=True) -> list[Pieces]:
    """One row per reply: the reply with its reasoning, behind a history without any."""
    rows: list[Pieces] = []
    history = ""
    for message in messages:
        if message["role"] != "assistant":
            history += f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n"
            continue
        head, found, tail = message["content"].rpartition("</think>")
        answer = tail.lstrip("\n")
        reason = head.split("</think>")[0].split("<think>")[-1].strip("\n") if found else ""
        history += "<|im_start|>assistant\n"
        block = f"<think>\n{reason}\n</think>\n\n"
        rows.append([(history, False), (block, enabled), (f"{answer}<|im_end|>", True), ("\n", False)])
        history += f"{answer}<|im_end|>\n"
    return rows


def marked(messages) -> list[Pieces]:
    return chatml(messages, system="")


def phi(messages) -> list[Pieces]:
    row: Pieces = []
    for message in messages:
        row.append((f"<|{message['role']}|>\n", False))
        row += [(message["content"] + "<|end|>", message["role"] == "assistant"), ("\n", False)]
    return [[*row, ("<|endoftext|>", False)]]


def plain(messages) -> list[Pieces]:
    row: Pieces = []
    for message in messages:
        row.append((message["role"].upper() + ":", False))
        row += [(" " + message["content"].strip(), message["role"] == "assistant"), ("\n", False)]
    return [row]


@dataclass(frozen=True)
class Style:
    """A template, its special tokens (bos and eos first) and its oracle."""

    template: str
    tokens: tuple[str, ...]
    oracle: Callable[..., list[Pieces]]
    system: bool = True  # takes a system message
    kwargs: dict = field(default_factory=dict, hash=False)


STYLES = {
    "chatml": Style(CHATML, ("<|im_start|>", "<|im_end|>", "<|endoftext|>"), chatml),
    "llama3": Style(LLAMA3, ("<|bos|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"), llama3),
    "gemma": Style(GEMMA, ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), gemma, system=False),
    "mistral": Style(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), mistral),
    "thinking": Style(THINKING, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"), thinking),
    "marked": Style(MARKED, ("<|im_start|>", "<|im_end|>"), marked),
    "marked without end": Style(MARKED_WITHOUT_END, ("<|im_start|>", "<|im_end|>"), marked),
    "marked nothing": Style(MARKED_NOTHING, ("<|im_start|>", "<|im_end|>"), marked),
    "marked all": Style(MARKED_ALL, ("<|im_start|>", "<|im_end|>"), marked),
    "phi": Style(PHI, ("<s>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), phi),
    "plain": Style(PLAIN, ("<s>", "</s>"), plain),
}

LINES = [
    "The quick brown fox jumps over the lazy dog, and the dog says nothing at all.",
    "user assistant system model INST think You are a tiny model.\n\n\n\n",
    "def add(a, b):\n    return a + b\n\n\n  print(add(1, 2))\n",
    "Übergrößenträger naïve café 😀😀 日本語 text   with   spaces",
]


@lru_cache
def byte_tokenizer(name: str, nfc: bool = False, rstrip: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, newline runs among them, and the template of `STYLES[name]`."""
    style = STYLES[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if nfc:
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[AddedToken(token, special=True, normalized=False, rstrip=rstrip) for token in style.tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 4, trainer)
    return _wrap(backend, style)


@lru_cache
def piece_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer in the style of SentencePiece: it puts a space in front of a text, and words carry their space."""
    style = STYLES[name]
    backend = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    backend.train_from_iterator(LINES * 4, trainer)
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in style.tokens])
    return _wrap(backend, style)


def _wrap(backend: Tokenizer, style: Style) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=style.tokens[0], eos_token=style.tokens[1], pad_token=style.tokens[1]
    )
    tokenizer.chat_template = style.template
    return tokenizer


# The GPT-2 byte alphabet: printable bytes stand for themselves, the others for code points from 256 on.
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTE_OF = {chr(byte): byte for byte in PRINTABLE}
BYTE_OF |= {chr(256 + index): byte for index, byte in enumerate(byte for byte in range(256) if byte not in PRINTABLE)}


def token_bytes(tokenizer: PreTrainedTokenizerFast, token: int) -> bytes:
    """What a token of a `byte_tokenizer` stands for."""
    added = tokenizer.added_tokens_decoder.get(token)
    if added is not None:
        return str(added).encode()
    return bytes(BYTE_OF[char] for char in tokenizer.convert_ids_to_tokens(token))
