"""The tasks that ship with scforge, one a file."""
