"""What runs in the trainer's process: it brings weights into engines and servers."""

from ebbtide.trainer.weight_sender import SentWeights, WeightSender, WeightSendError

__all__ = ["SentWeights", "WeightSendError", "WeightSender"]
