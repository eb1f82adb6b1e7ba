"""Ebbtide's sampling parameters, with one attribute per key of a request."""

from ebbtide.srt.sampling_params import SamplingParams as SamplingParams
