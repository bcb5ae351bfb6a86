"""phasefold: one Kimi or GLM checkpoint folded into the right weights for each phase of serving."""

__version__ = "0.1.0"
