"""Tokenizers of Hugging Face as tokenizer.* keys of a GGUF. Read `vocabulary`, the two forms, then `gguf_tokenizer`.

bpe_vocabulary, sentencepiece, tiktoken,
wordpiece, unigram, plamo                 the kinds of files
special_tokens, pretokenizer              the roles of tokens; how text is split before
tokenizer_json                            the way back
"""
