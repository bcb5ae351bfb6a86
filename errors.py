"""The errors a user can cause or mend, split by what there is to do about them.

Each message names the thing, what was found, what was expected and what to do. The command line prints it as one
line; any exception outside this tree is a bug of ours and shows its traceback.
"""


class PhasefoldError(Exception):
    """Root of everything that phasefold refuses or fails at knowingly."""


class CheckpointError(PhasefoldError):
    """The source is damaged, incomplete or of a kind that is not supported: get a good copy."""


class RecipeError(PhasefoldError):
    """The request makes no sense, or not for this checkpoint: change the recipe."""


class PlanError(PhasefoldError):
    """The request is sound but cannot be carried out here (place, space, rights): change the command."""


class ResumeError(PhasefoldError):
    """The output folder cannot be gone on with: see what is in it, or give another one."""


class TextError(PhasefoldError):
    """The calibration text, or the tokenizer for it, cannot be used as it is: mend it, or give another one."""


class VerifyError(PhasefoldError):
    """An artifact is not what its manifest says."""


class LoadError(PhasefoldError):
    """A runtime cannot be asked, or a deployment makes no sense: install it, or change the command."""


class UsageError(PhasefoldError):
    """An option has no meaning, or no such value, whatever the checkpoint holds: change the command."""


class HubError(PhasefoldError):
    """The Hub cannot be asked, refuses, or holds something else: see the repo, the token, the connection."""


class EvalError(PhasefoldError):
    """An evaluation cannot be carried out, or two cannot be compared: see which task, model or file, and mend it."""


class PageError(PhasefoldError):
    """A request's page table does not lead to the request's own pages, or no page is left: that request is stopped."""
