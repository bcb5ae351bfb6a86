"""To and from the Hugging Face Hub: checkpoints read from it, artifacts pushed to it and pulled."""
