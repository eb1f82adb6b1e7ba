"""How the demo fails."""


class DemoFailed(RuntimeError):
    """Something that the demo is to show does not hold."""
