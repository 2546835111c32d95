"""The files of a checkpoint: a folder or a Hub id goes in, named tensors come out as numpy arrays.

`hub` finds or downloads the folder, `weight_files` decides which files count, `store` reads safetensors (start there),
`torch_store` pickles; `dtypes` converts floats. `folder` is the way out: a new checkpoint, never half-written.
"""
