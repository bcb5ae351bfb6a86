"""Each runtime asked in a process of its own: does it take this checkpoint, all of it, and what does it say then."""
