"""The models of an evaluation: what can be known of them before one is opened, and one at a time, opened."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..calib.model import Source
from ..calib.text import load_tokenizer
from ..errors import EvalError, TextError
from ..formats.checkpoint import open_checkpoint
from .model import PhasefoldLM
from .opening import check_pair_way, open_target
from .served import check_pair
from .settings import Settings
from .target import Target
from .tools.parse import format_of
from .whole import check_runner

#: letters, digits, marks, blanks, another script: two tokenizers that differ mostly differ here
_PROBE = "Return the 3rd item, or raise KeyError('x').\n\n    >>> x = {'a': [1, 2.50]}  # naïve\n\tÜber 北京 \U0001f600"


@dataclass(frozen=True, slots=True)
class Side:
    """A model that is ready: lm-eval's side of it, and ours, which is None of a server."""

    target: Target
    lm: Any
    runner: Any
    tokenizer: Any
    about: Mapping[str, Any]


def check_sides(targets: Sequence[Target], settings: Settings, generating: Sequence[str]) -> None:
    """Refuse, before hours of work, what opening one of them would refuse, and models whose tokens are not the same.

    generating: what takes models that generate. Reads headers, tokenizers and what servers say. Raises as `opened`
    does; EvalError: two that cannot be compared.
    """
    first: tuple[Any, ...] | None = None
    for target in targets:
        if target.url is not None:
            _server(target.url, settings)
            continue
        tokenizer = load_tokenizer(target.folders[0], trust_remote_code=settings.trust_remote_code)
        if settings.requests is not None:
            _check_template(target.folders[0], tokenizer)
        architecture, vocabulary = _model(target.folders[-1])
        if target.is_pair:
            check_pair(target.folders, target.kv, target.scales)
            check_pair_way(target, settings.dtype, settings.batch, settings.memory, settings.way)
        else:
            whole = check_runner(
                target.folders[0], dtype=settings.dtype, batch=settings.batch, memory=settings.memory,
                device=settings.device, way=settings.way, work=settings.work,
            )  # fmt: skip
            if generating and not whole:
                raise EvalError(
                    f"{target.text} runs layer by layer, which scores and does not generate, and {generating[0]} takes "
                    "answers: give more --memory, or tasks of log-likelihoods"
                )
        template = getattr(tokenizer, "chat_template", None) if settings.chat_template else None
        found = target.text, architecture, vocabulary, (tokenizer.get_vocab(), tokenizer.encode(_PROBE)), template
        if first is None:
            first = found
        elif found[1:] != first[1:]:
            names = ("architectures", "numbers of tokens", "tokenizers", "chat templates")
            place = [one == two for one, two in zip(first[1:], found[1:], strict=True)].index(False)
            told = f" ({first[place + 1]}, {found[place + 1]})" if place < 2 else ""
            raise EvalError(
                f"{first[0]} and {found[0]} have other {names[place]}{told}: their answers are not paired; give the "
                "checkpoint that the target was made from as --baseline, and its tokenizer files to both"
            )


def _model(folder: Path) -> tuple[str, int]:
    """Architecture and tokens of a model that transformers has a class for, all of whose tensors are there."""
    source = Source(open_checkpoint(folder))
    source.close()
    return source.model.architecture.name, int(source.config.vocab_size)


def _check_template(folder: Path, tokenizer: Any) -> None:
    template = getattr(tokenizer, "chat_template", None)
    if not isinstance(template, str):
        raise TextError(f"{folder}: has no chat template, or more than one: tool calls need one that takes tools")
    format_of(Source(open_checkpoint(folder)).model.family, template)


def _server(url: str, settings: Settings) -> tuple[Any, Mapping[str, Any]]:
    from .server import server_identity, server_lm

    about = server_identity(url, settings.served_model, key_file=settings.key_file)
    lm = server_lm(
        url, model=settings.served_model, tokenizer=settings.tokenizer, chat=settings.chat,
        concurrency=settings.concurrency, timeout=settings.timeout, seed=settings.seed, key_file=settings.key_file,
        trust_remote_code=settings.trust_remote_code,
    )  # fmt: skip
    return lm, about


@contextlib.contextmanager
def opened(target: Target, settings: Settings, batch: int) -> Iterator[Side]:
    """A model, until it is let go. Raises as the runners, tokenizers and clients do."""
    if target.url is not None:
        lm, about = _server(target.url, settings)
        yield Side(target, lm, None, None, about)
        return
    runner, tokenizer = open_target(
        target.text, dtype=settings.dtype, batch_size=batch, memory=settings.memory, device=settings.device,
        way=settings.way, work=settings.work, trust_remote_code=settings.trust_remote_code,
    )  # fmt: skip
    try:
        lm = PhasefoldLM(runner=runner, tokenizer=tokenizer, max_length=settings.max_length)
        yield Side(target, lm, runner, tokenizer, runner.about)
    finally:
        runner.close()
