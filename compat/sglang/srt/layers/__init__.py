"""What there is of the paths of layers."""
