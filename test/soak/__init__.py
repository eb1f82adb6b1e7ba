"""A soak test: control requests at random, against an engine whose streams are checked token by token."""
