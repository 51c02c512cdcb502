"""An executor without a model: a strict, deterministic device with simulated step times.

Importing this package loads nothing; `executor.SimulatedExecutor` is the executor, `tokens`
generates the reference output. Its faults are scripted with `penstock.executor.fault`.
"""
