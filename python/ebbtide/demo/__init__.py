"""The demo: a small model learns addition by GRPO, and every rollout is Ebbtide's.

A step is that of a reinforcement-learning framework: generate through the engine, score, release all of the
engine's memory, train, resume the weights, send the new ones, resume the KV cache. `trainer` has the task,
`loop` the step, `memory` what is measured, `report` and `figures` what is shown.
"""
