"""The scheduler core: request states, queue, KV cache blocks, batch, policies.

Start reading at `engine.Engine.step`, then `planner.Planner.plan` and `results.Results.apply`. Uses
only numpy and the standard library, and has no threads, clock or sockets.
"""
