"""The demo: a small model learns addition by GRPO, with rollouts by Ebbtide.

A step is like one of a reinforcement-learning framework: generate with the engine, score, release all of the
engine's memory, train, resume the weights, send the new ones, resume the KV cache. `trainer` has the task and
the trainer, `loop` the steps and measurements, `report` the plots and the page, `run` the command.
"""
