"""The tasks included in scforge, one per file."""
