"""The TensorRT-LLM executor: production. `config` and `model_kind` import nothing heavy."""
