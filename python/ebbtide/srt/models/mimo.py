"""MiMo: Qwen2's decoder, and layers that draft tokens, whose weights are set aside."""

from ebbtide.srt.models.qwen2 import Qwen2ForCausalLM


class MiMoForCausalLM(Qwen2ForCausalLM):
    """Transformers has none of this name: its config is read as Qwen2's."""

    def ignored(self, name: str) -> bool:
        return super().ignored(name) or name.startswith("model.mtp_layers.")
