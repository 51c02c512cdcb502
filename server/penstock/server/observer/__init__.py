"""The observer process: takes in what fronts and engine tell, for traces, metrics and operators."""
