"""Text of the kind that the tiny checkpoints know, and that they have never seen: docstrings of installed packages.

They were trained on docstrings of the Python standard library, NumPy, SciPy, SymPy, NetworkX and PyTorch; none of those
is read here. A file's path decides, by its hash, whether its docstrings serve for calibration or for evaluation. A
docstring with a line of 40 characters or more that also stands in the training packages' sources (those that are
installed), or in any file of the other half, is left out of evaluation: people copy. An evaluation block is taken
from a file of its own, so that blocks are as independent as files are, and intervals over blocks are honest.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

from phasefold.evals.tasks.docstrings import File, docstrings_of

SITE = Path(sysconfig.get_path("purelib"))
#: read, where installed: what phasefold's test environment brings along
PACKAGES = (
    "_pytest", "accelerate", "anyio", "click", "compressed_tensors", "filelock", "fsspec", "huggingface_hub",
    "hypothesis", "jinja2", "loguru", "mypy", "packaging", "pydantic", "pygments", "rich", "transformers", "typer",
)  # fmt: skip
TRAINED = ("numpy", "scipy", "sympy", "networkx", "torch")  # and the standard library
LINE = 40  # characters from which an equal line counts as copied
BLOCK = 256  # tokens, the context that they were trained with


def standard_library() -> str:
    """Docstrings of the installed standard library, which the tiny checkpoints were trained on: for `pair.py`."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-s]*.py"))
    return "\n\n".join(text for path in paths for text in docstrings_of(path))


def lines_of(text: str) -> Iterator[str]:
    """Its lines that are long enough to tell a copy."""
    return (line for raw in text.splitlines() if len(line := raw.strip()) >= LINE)


def is_evaluation(path: str) -> bool:
    """Which half a file belongs to, by its path alone: about a half of all files."""
    return hashlib.sha256(path.encode()).digest()[0] % 2 == 0


@cache
def files() -> tuple[File, ...]:
    """Every file with docstrings, ordered by the hash of its path, so that a beginning of the list is a fair sample."""
    found = []
    for package in PACKAGES:
        for path in sorted((SITE / package).rglob("*.py")):
            name = path.relative_to(SITE).as_posix()
            # modelling files repeat each other; vendored copies belong to somebody else
            if "_vendor" in name or name.startswith("transformers/models/"):
                continue
            if texts := docstrings_of(path):
                found.append(File(name, texts))
    return tuple(sorted(found, key=lambda file: hashlib.sha256(file.path.encode()).digest()[1:]))


@cache
def calibration() -> tuple[File, ...]:
    """The files whose text may be calibrated with."""
    return tuple(file for file in files() if not is_evaluation(file.path))


@cache
def evaluation() -> tuple[File, ...]:
    """The files whose text may be evaluated on, without docstrings that share a line with training or calibration."""
    seen = {line for file in calibration() for text in file.docstrings for line in lines_of(text)}
    roots = [Path(sysconfig.get_path("stdlib")), *(SITE / name for name in TRAINED)]
    ours = [file for file in files() if is_evaluation(file.path)]
    wanted = {line for file in ours for text in file.docstrings for line in lines_of(text)}
    for root in roots:
        for path in root.rglob("*.py"):
            if SITE in path.parents and root not in (SITE / name for name in TRAINED):
                continue  # site-packages lies within the standard library's folder
            seen |= wanted.intersection(lines_of(path.read_text(encoding="utf-8", errors="replace")))
    kept = []
    for file in ours:
        if texts := tuple(text for text in file.docstrings if seen.isdisjoint(lines_of(text))):
            kept.append(File(file.path, texts))
    return tuple(kept)


def evaluation_blocks(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """`count` blocks of 256 tokens, each from the beginning of another file's docstrings. SystemExit for too few."""
    blocks: list[list[int]] = []
    for file in evaluation():
        if len(blocks) == count:
            break
        ids = tokenizer.encode("\n\n".join(file.docstrings)).ids
        if len(ids) >= BLOCK:
            blocks.append(ids[:BLOCK])
    if len(blocks) < count:
        raise SystemExit(f"{len(blocks)} files give a block of {BLOCK} tokens, {count} are asked for: lower --tokens")
    return blocks
