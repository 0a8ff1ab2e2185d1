"""A model, a tokenizer, an objective, a benchmark and a task for scforge."""
