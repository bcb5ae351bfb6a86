"""Tasks for lm-eval that need no download: questions made at run time from docstrings of the Python that runs.

`lm_eval --include_path FOLDER` finds them, for whatever model: they know nothing of phasefold's.
"""

from pathlib import Path

#: where the YAML files lie
FOLDER = Path(__file__).parent
