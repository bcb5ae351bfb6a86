"""phasefold as a model of lm-eval: texts to tokens as lm-eval's own `hf` does it, the forward passes by a runner.

Importing this registers the model as "phasefold". lm-eval makes it from strings (`target=FOLDER,dtype=float32`), we
make it from a runner that is open.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ..errors import EvalError, LoadError, UsageError
from .answers import MAX_GEN_TOKS, Way, end_tokens, ends, way_of
from .opening import open_target
from .runner import Advance, Runner, score

try:
    from lm_eval.api.model import TemplateLM, tqdm
    from lm_eval.api.registry import model_registry
    from lm_eval.models.utils import postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise LoadError(f"lm-eval cannot be imported ({error}): pip install 'phasefold[evals]'") from None

NAME = "phasefold"
_HOW = tuple(name for name in inspect.signature(open_target).parameters if name != "target")


class PhasefoldLM(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A checkpoint, an artifact or a pair, for lm-eval.

    truncated: requests that lost their beginning, by task. seed: of sampling, where a request names none. advance: is
    told how many requests are done; without it there is lm-eval's own kind of progress bar.
    """

    def __init__(
        self,
        target: str | None = None,
        *,
        runner: Runner | None = None,
        tokenizer: Any = None,
        eos: Sequence[int] | None = None,
        max_length: int | None = None,
        seed: int = 0,
        **how: Any,
    ) -> None:
        """Either target and how it is run (`opening.open_target` has the names), or a runner and its tokenizer.

        eos: tokens that end an answer; None: those of the files beside the tokenizer. max_length: less than the
        model's. Raises UsageError, and whatever opening a target raises.
        """
        super().__init__()
        if (target is None) == (runner is None) or (runner is None) != (tokenizer is None):
            raise UsageError("a phasefold model is made of target=..., or of a runner and its tokenizer")
        if unknown := how.keys() - (_HOW if target is not None else ()):
            raise UsageError(f"phasefold model: {', '.join(sorted(unknown))}: expected {', '.join(_HOW)}")
        if target is not None:
            runner, tokenizer = open_target(str(target), **how)
        assert runner is not None
        self.runner, self.tokenizer, self.seed = runner, tokenizer, seed
        self.truncated: Counter[str] = Counter()
        self.advance: Advance | None = None
        self._max_length = runner.max_length if max_length is None else min(int(max_length), runner.max_length)
        self._ends = frozenset(eos if eos is not None else end_tokens(tokenizer))
        self._tasks: list[str] = []  # of the requests that are being scored, for what lm-eval does not pass on
        self._done: Advance = lambda _: None
        lead = self.tok_decode(tokenizer.encode(""), skip_special_tokens=False)
        self._leads = tuple(filter(None, [lead, self.tok_decode([self.prefix_token_id], skip_special_tokens=False)]))

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> PhasefoldLM:
        """From lm-eval's model_args and what its command line adds, where the former go before the latter.

        lm-eval always names a device, cuda:0 if nobody does: without CUDA it is the CPU, as for lm-eval's own models.
        """
        added = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if str(added.get("device", "")).startswith("cuda") and not torch.cuda.is_available():
            added["device"] = "cpu"
        if "max_batch_size" in added:
            raise UsageError("max_batch_size: a phasefold model tries no batch sizes; give batch_size")
        return cls(**{**added, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: Mapping[str, Any] | None = None) -> PhasefoldLM:
        """The same, from "key=value,key=value"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The tokenizer's end of text, or the first of the model's."""
        eos = self.tokenizer.eos_token_id
        if eos is None and not self._ends:
            raise EvalError("neither the tokenizer nor generation_config.json names an end-of-text token (eos_token)")
        return int(eos if eos is not None else min(self._ends))

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context."""
        begin = self.tokenizer.bos_token_id
        return int(begin) if begin is not None else self.eot_token_id

    @property
    def max_length(self) -> int:
        """Tokens that a text may have."""
        return self._max_length

    @property
    def max_gen_toks(self) -> int:
        """Tokens of an answer, where a task does not say."""
        return MAX_GEN_TOKS

    @property
    def batch_size(self) -> int:
        """The runner's."""
        return int(self.runner.about.get("batch", 1))

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's caches."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """As lm-eval's `hf`: with what the tokenizer puts before a text, but not again where it is written out.

        A chat template writes it out; `hf` knows that of a bos token only, we of all that is put before (GLM's two).
        """
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self._leads)
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def tok_decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Tokens to text."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))

    def passage(self, context: str, continuation: str | None) -> list[int]:
        """What the model reads of a question: of a prompt alone, or of context and continuation, as they are scored."""
        if continuation is None:
            made = self.tok_encode(context)
        elif context:
            made = [token for part in self._encode_pair(context, continuation) for token in part]
        else:
            made = self.tok_encode(continuation, add_special_tokens=False)
            made = made if made[:1] == [self.prefix_token_id] else [self.prefix_token_id, *made]
        return made[-self._max_length :]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Messages to a prompt, by the checkpoint's own template. EvalError where it has none, or refuses them."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise EvalError(f"{self.tokenizer.name_or_path}: has no chat template; ask without --chat-template")
        try:
            made = self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            roles = ", ".join(str(message.get("role")) for message in chat_history)
            why = " ".join(str(error).split())[:200]
            raise EvalError(
                f"{self.tokenizer.name_or_path}: its chat template does not take messages of {roles} ({why})"
            ) from None
        return str(made)

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each continuation given its context: nats, and whether greedy decoding makes it."""
        for request in requests:
            context, continuation = request.args
            if not continuation and context == context.rstrip():
                raise EvalError(f"task {request.task_name}: asks how likely it is that nothing comes")
        self._tasks = [str(request.task_name) for request in requests]
        with self._told("Running loglikelihood requests", len(requests), disable_tqdm) as advance:
            self._done = advance
            return list(super().loglikelihood(requests, disable_tqdm=True))

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [
            self._fitting(context, continuation, task)
            for (_, context, continuation), task in zip(requests, self._tasks, strict=True)
        ]
        answers = [(one.logprob, one.greedy) for one in score(self.runner, pairs, self._done)]
        for (request, _, _), answer in zip(requests, answers, strict=True):
            if request is not None:
                self.cache_hook.add_partial("loglikelihood", request, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each whole text: nats, by lm-eval's windows."""
        windows = [
            [
                make_disjoint_window(window)
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0]),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self._longest - 1,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        pairs = [pair for some in windows for pair in some]
        with self._told("Running loglikelihood_rolling windows", len(pairs), disable_tqdm) as advance:
            scored = iter(score(self.runner, pairs, advance))
        totals = [sum(next(scored).logprob for _ in some) for some in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return [float(total) for total in totals]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """An answer to each prompt, up to where a stop string begins or the model ends it."""
        ways: dict[Way, list[int]] = {}
        for number, request in enumerate(requests):
            way = way_of(request.args[1], request.task_name, self.seed)
            ways.setdefault(way, []).append(number)
        found = [""] * len(requests)
        with self._told("Running generate_until requests", len(requests), disable_tqdm) as advance:
            for way, members in ways.items():
                texts = self._answers(way, [requests[number] for number in members], advance)
                for number, text in zip(members, texts, strict=True):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _answers(self, way: Way, requests: list[Any], advance: Advance) -> Iterator[str]:
        room = self._max_length - way.limit
        if room < 1:
            raise EvalError(
                f"task {requests[0].task_name}: answers of up to {way.limit} tokens leave no place for the question: "
                f"the model takes {self._max_length}; give gen_kwargs max_gen_toks"
            )
        prompts = []
        for request in requests:
            prompt = self.tok_encode(request.args[0]) or [self.prefix_token_id]
            self._count(request.task_name, len(prompt) > room)
            prompts.append(prompt[-room:])
        stops = [*way.until, self.tok_decode([self.eot_token_id], skip_special_tokens=False)]
        finished = ends(stops, self._ends, lambda tokens: self.tok_decode(tokens, skip_special_tokens=False))
        for tokens in self.runner.generate(prompts, way.limit, way.sampling, finished, advance):
            kept = tokens[:-1] if tokens and tokens[-1] in self._ends else tokens
            yield str(postprocess_generated_text(self.tok_decode(kept), stops, None))

    def _count(self, task: Any, truncated: bool) -> None:
        if truncated:
            self.truncated[str(task)] += 1

    @property
    def _longest(self) -> int:
        """Tokens of context and continuation together: the last one is no input, where the model's end is not near."""
        return min(self._max_length + 1, self.runner.max_length)

    def _fitting(self, context: list[int], continuation: list[int], task: str) -> tuple[list[int], list[int]]:
        """The same, without the beginning of what is too long."""
        if not continuation:
            raise EvalError(f"task {task}: a continuation has no tokens of its own behind its context")
        context = context or [self.prefix_token_id]  # white space alone, which went into the continuation
        over = len(context) + len(continuation) - self._longest
        if over >= len(context):
            raise EvalError(
                f"task {task}: a continuation has {len(continuation)} tokens, the model takes {self._longest} with "
                "its context"
            )
        self._count(task, over > 0)
        return context[max(over, 0) :], continuation

    @contextlib.contextmanager
    def _told(self, what: str, total: int, quiet: bool) -> Iterator[Advance]:
        if self.advance is not None:
            yield self.advance
            return
        with tqdm(total=total, desc=what, disable=quiet) as bar:

            def advance(done: int) -> None:
                bar.update(done)

            yield advance


model_registry.register(NAME, target=PhasefoldLM)
