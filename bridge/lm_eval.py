"""EleutherAI's evaluation harness with this project's models: its own command line, and one more `--model`.

    python -m bridge.lm_eval --model gguf-bridge --model_args path=model.gguf,precision=f32 --tasks hellaswag

In a program, `import bridge.lm_eval` registers the model for lm_eval.simple_evaluate(model="gguf-bridge"). It has no
entry points for models, so one of the two is needed.
"""

from bridge.nn.lm_eval_model import BridgeLM

__all__ = ["BridgeLM"]

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
