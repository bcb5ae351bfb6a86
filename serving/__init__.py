"""Does it load, and how: static rules, the runtimes themselves, and the pair as it is served."""
