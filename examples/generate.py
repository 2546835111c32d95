"""Continue a text with a GGUF, token by token: generate.py MODEL.gguf PROMPT [TOKENS]"""

import sys

import bridge

path, prompt, *count = sys.argv[1:]
with bridge.Model.load(path) as model:
    print(prompt, end="", flush=True)
    for piece in model.generate(prompt, int(count[0]) if count else 100, temperature=0):
        print(piece, end="", flush=True)
print()
