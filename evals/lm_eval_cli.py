"""lm-eval's own command line, which knows the model "phasefold" and phasefold's tasks besides its own.

lm-eval has no plug-ins: a model is known once the code that registers it has been imported, and tasks lie in a folder
that is named. Both is done here, and nothing else: `python -m phasefold.evals.lm_eval_cli run --model phasefold ...`.
"""

from __future__ import annotations

from ..errors import PhasefoldError
from . import model  # registers it
from .asked import OURS


def main() -> None:
    """As `lm-eval` has it, arguments included. What phasefold refuses is one line, and exit status 1."""
    from lm_eval._cli import HarnessCLI
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import setup_logging

    setup_logging()
    cli = HarnessCLI()
    arguments = cli.parse_args()
    if hasattr(arguments, "include_path"):
        given = arguments.include_path
        if not given and getattr(arguments, "config", None):
            given = EvaluatorConfig.load_yaml_config(arguments.config).get("include_path")
        others = given if isinstance(given, list) else [given] if given else []
        arguments.include_path = [str(OURS), *others]
    try:
        cli.execute(arguments)
    except PhasefoldError as error:
        raise SystemExit(f"phasefold: {error}") from None


__all__ = ["main", "model"]

if __name__ == "__main__":
    main()
