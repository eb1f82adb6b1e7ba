"""SGLang's path of two formats for weights, which trainers import from here."""

from sglang.srt.model_executor.model_runner_components.weight_updater import (
    LocalSerializedTensor as LocalSerializedTensor,
)
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket as FlattenedTensorBucket
