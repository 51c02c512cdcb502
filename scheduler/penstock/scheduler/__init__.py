"""The scheduler core: decides which requests each step runs, and manages their KV cache blocks.

Start reading at `engine.Engine.step`, then `planner.Planner.plan` and `results.Results.apply`. Uses
only numpy and the standard library, and has no threads, clock or sockets.
"""
