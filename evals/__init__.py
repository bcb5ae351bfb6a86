"""Is an artifact, or a pair, as good as what it came from: what may be said of two runs on the same questions."""
