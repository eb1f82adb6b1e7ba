"""Parts of SGLang's `layers` that frameworks import."""
