"""`python -m phasefold`."""

from .cli import main

main()
