"""Files of a checkpoint: folders, the Hub, safetensors and pickles, dtypes."""
