"""The modules that are run as processes."""

ENGINE_MODULE = "penstock.server.processes.engine_process"
FRONT_MODULE = "penstock.server.processes.front_process"
OBSERVER_MODULE = "penstock.server.processes.observer_process"
