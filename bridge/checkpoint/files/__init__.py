"""The files of a checkpoint: from a folder or a Hub id to named tensors as numpy arrays.

`hub` finds or downloads the folder, `weight_files` selects the files, `store` reads safetensors (start there),
`torch_store` reads pickles, `dtypes` converts floats. `folder` writes a new checkpoint, never half-written.
"""
