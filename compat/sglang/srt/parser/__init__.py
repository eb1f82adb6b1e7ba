"""Parsers of models' outputs."""
