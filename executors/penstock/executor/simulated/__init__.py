"""An executor without a model: deterministic output and simulated step times.

`executor.SimulatedExecutor` is the executor; `tokens` generates its output from the ids that
`vocabulary` selects. Faults are scripted
with `penstock.executor.fault`.
"""
