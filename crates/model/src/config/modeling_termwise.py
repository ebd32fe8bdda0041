"""Loads this model in Transformers: ``AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)``.

The model has an attention variant of termwise. ``termwise.hf`` has the classes, and this file only refers to them.
"""

try:
    import termwise.hf
except ImportError as error:
    raise ImportError(
        "this model has an attention variant that Transformers does not compute: install the Python package termwise "
        "(`pip install termwise`, or a wheel built from its sources), and run `import termwise.hf` before from_pretrained"
    ) from error


def __getattr__(name):
    return getattr(termwise.hf, name)
