"""The parts of the flax model, one a file."""
