"""The TensorRT-LLM executor, for production. `config` and `model_kind` import no large packages."""
