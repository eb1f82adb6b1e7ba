"""Parsers of what models say."""
