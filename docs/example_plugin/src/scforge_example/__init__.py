"""A model, a tokenizer, an objective and a benchmark for scforge."""
