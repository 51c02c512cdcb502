"""The core: states, queue, KV blocks, batch, policies.

Start reading at `engine.Engine.step`, then `planner.Planner.plan` and `results.Results.apply`.
numpy and the standard library only; no threads, no clock, no sockets.
"""
