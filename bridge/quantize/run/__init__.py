"""One run of a calibration: a text passes through a model block by block, in this process or on a cluster.

walk              what passes, and which layers are quantized for it
block_work        one block and some batches: its stages, their Hessians, the passes to the next block
worker            what a process keeps from block to block, and its tasks
cluster           where tasks run: in this process, or on the machines of a Dask cluster
layer_by_layer    the order of the tasks; `quantize_model`, `quantize_block` and `gptq`
gradients         what is gathered of the layers' outputs before that
calibrate         a checkpoint's layers, with a text's tokens (`calibration_text`) and what it takes (`needs`)
"""
