"""An engine under a storm of control requests, beside streams whose every token is checked."""
