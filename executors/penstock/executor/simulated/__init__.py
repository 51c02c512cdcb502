"""An executor without a model: deterministic output and simulated step times.

`executor.SimulatedExecutor` is the executor; `tokens` generates its output. Faults are scripted
with `penstock.executor.fault`.
"""
