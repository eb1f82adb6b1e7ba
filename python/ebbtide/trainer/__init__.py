"""The trainer's side: sends weights to engines and servers."""

from ebbtide.trainer.weight_sender import SentWeights, WeightSender, WeightSendError

__all__ = ["SentWeights", "WeightSendError", "WeightSender"]
