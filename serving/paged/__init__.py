"""One engine of the reference runtime: a decoded checkpoint in transformers' own model, over a paged KV cache."""
