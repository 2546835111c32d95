"""Generate with transformers on the weights of a GGUF: under_transformers.py MODEL MODEL.gguf PROMPT"""

import sys

from transformers import AutoTokenizer

import bridge

folder, gguf, prompt = sys.argv[1:]
model = bridge.nn.load(folder, gguf)
tokenizer = AutoTokenizer.from_pretrained(folder)
tokens = model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=20, do_sample=False)
print(tokenizer.decode(tokens[0]))
