"""The older path of `sglang.srt.utils.hf_transformers_utils`."""

from sglang.srt.utils.hf_transformers_utils import get_tokenizer as get_tokenizer
