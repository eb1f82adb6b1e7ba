"""Ebbtide's sampling parameters: one attribute per key of the wire."""

from ebbtide.srt.sampling_params import SamplingParams as SamplingParams
