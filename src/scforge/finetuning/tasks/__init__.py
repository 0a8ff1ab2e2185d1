"""The tasks that ship with scforge, one per file."""
