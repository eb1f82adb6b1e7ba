"""What a trainer and an engine both speak."""
