"""What tests of calibration share: text of random tokens, jobs, and transformers on its own."""

import hashlib
from pathlib import Path
from typing import Any

import torch
import variants
from transformers import AutoModelForCausalLM

from phasefold.calib.forward import Forward
from phasefold.calib.model import Source
from phasefold.calib.rows import Rows
from phasefold.calib.run import Job, Options, Result, calibrate
from phasefold.calib.text import Text
from phasefold.calib.work import Work
from phasefold.formats.checkpoint import open_checkpoint
from phasefold.formats.statistics import Statistics, open_statistics

VOCABULARY = 1024


def made_text(sequences: int, length: int, seed: int = 0) -> Text:
    """Random tokens: routing and caches only need some."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, VOCABULARY, (sequences, length), generator=generator, dtype=torch.int32)
    return Text(blocks, hashlib.sha256(blocks.numpy().tobytes()).hexdigest(), 1, 1, 0, 0)


def job_of(folder: Path, sequences: int = 9, length: int = 24, **options: Any) -> Job:
    """A job on random text; experts="apart": with the least memory that it can do with."""
    apart = options.pop("experts", "together") == "apart"
    source = Source(open_checkpoint(folder))
    job = Job(source, made_text(sequences, length), Options(**({"dtype": "float32", "batch": 2} | options)))
    if not apart:
        return job
    least = max(min(need.whole, need.single or need.whole) for need in job.needs)
    options["memory"] = least
    found = Job(source, job.text, Options(**({"dtype": "float32", "batch": 2} | options)))
    assert found.whole == [need.single is None for need in found.needs]
    return found


def calibrated(folder: Path, out: Path, **options: Any) -> Statistics:
    """The statistics of a job on random text."""
    job = job_of(folder, **options)
    calibrate(job, out)
    job.source.close()
    return open_statistics(out)


def last_hidden(job: Job, out: Path, monkeypatch: Any) -> tuple[Result, Rows]:
    """Run a job, and the hidden states behind the last layer, all tokens in the job's order."""
    monkeypatch.setattr(Work, "remove", lambda self: None)
    result = calibrate(job, out)
    path = out / ".work" / f"hidden-{len(job.source.layers):05d}"
    return result, Rows(job.tokens, job.source.config.hidden_size, job.dtype, path, new=False)


def logits_of(job: Job, hidden: Rows) -> list[torch.Tensor]:
    """[B, L, vocabulary] of each batch."""
    forward = Forward(job.source, job.dtype, "cpu")
    with torch.inference_mode():
        return [forward.logits(hidden.get(b.rows).view(-1, job.length, hidden.width)) for b in job.batches()]


def by_transformers(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The whole model, as transformers loads it where nothing else is said of its attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()


def batches_of(job: Job) -> list[torch.Tensor]:
    """The same batches as token ids."""
    flat = job.blocks.view(-1).long()
    return [flat[b.rows.start : b.rows.stop].view(-1, job.length) for b in job.batches()]


def differing(a: Statistics, b: Statistics) -> list[str]:
    """Names that only one has, or whose values are not equal."""
    names = sorted(a.files.keys() ^ b.files.keys())
    for name in a.files.keys() & b.files.keys():
        ours, theirs = a.read(name), b.read(name)
        assert ours is not None and theirs is not None
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            names.append(name)
    return sorted(names)


def random_variant(folder: Path, base: str, **changes: Any) -> Path:
    """An example's config with changes, and random weights."""
    _, config = variants.load(variants.EXAMPLES / base)
    config = config | changes
    return variants.save(folder, variants.random_from(config), config)
